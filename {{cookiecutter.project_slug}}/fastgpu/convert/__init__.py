"""What convert.py is made of: other data into HDF5 files that are read fastest. Training does not import this room.

command.py    the command line: a dataclass for each command, without torch
program.py    what the commands do with HDF5 files and Datasets, and how all of them write
reader.py     a source of rows, some of which may be broken
broken.py     how many broken rows may be left out, and the lists of them
splits.py     which rows go to which file
items.py      the items of a torch Dataset as rows
arrays.py     NumPy arrays and sparse matrices as rows
tables.py     CSV files, and labels from columns of text
parquet.py    Parquet files, one row group at a time
parquet_rows.py  their columns of numbers as rows
writing.py    from a source to files: rows are read in their order, written and counted
writer.py     the layout of a file
summary.py    what files hold, and which of their blocks are damaged

A folder has the same for one kind of data: its commands and its readers.
"""
