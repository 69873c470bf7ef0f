"""What convert.py is made of: other data into HDF5 files that are read fastest, and a look at the files one has.

Training does not import this room. If you do not need it, delete it together with convert.py.
A `Reader` is a map-style Dataset (reader.py). block_readers.py and the folders here have some, and tables.py reads CSV
files for them. writing.py takes their rows in their final order to files, which writer.py writes. The modules
`commands` run what convert.py, the command line, was asked for.
"""
