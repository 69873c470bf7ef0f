"""What convert.py is made of: other data into HDF5 files that are read fastest, and a look at the files one has.

Training does not import this room. If you do not need it, delete it together with convert.py.
What is written is a source of rows (rows/contract.py). A `Reader` is one that is a map-style Dataset, too: the folders
here have some, and tables.py reads CSV files for them. writing.py takes the rows in their final order to files, which
writer.py writes. The modules `commands` run what convert.py, the command line, was asked for.
"""
