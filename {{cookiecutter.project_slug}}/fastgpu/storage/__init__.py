"""Rows on a disk or in memory, read as blocks: each kind here keeps the contract `Dataset` of rows/contract.py.

store.py opens HDF5 files as one dataset, arrays.py takes NumPy arrays as one. Both have a column for each field
(columns.py). Blocks of a file are found by layout.py, read by file.py and decompressed by codecs.py; hdf5.py says what
is wrong with a file. meaning.py compares what the numbers of two sources stand for.
"""
