"""What convert.py is made of: other data into HDF5 files that are read fastest, and a look at the files one has.

Training does not import this room. If you do not need it, delete it together with convert.py.
A `Reader` is a map-style Dataset (reader.py), a table is a CSV (tables.py); writing.py takes rows to files, which
writer.py writes. The modules `commands` of this folder and of those in it are the command line.
"""
