"""Rows on a disk or in memory, read as blocks: each kind here keeps the contract `Dataset` of rows/contract.py.

meaning.py      what numbers mean: names, ranges, order; and whether sources agree on it
store.py        HDF5 files as one dataset
columns.py      the fields of a dataset: in memory, in a file, ragged
csr.py          which datasets of a file belong to a field, plain or ragged
hdf5.py         opens files, groups and datasets, and says what is wrong with them
layout.py       where the rows of an HDF5 dataset lie, and how they are read
file.py         one open file: system calls, page cache, scratch memory
codecs.py       compression, undone by each thread on its own
arrays.py       NumPy arrays as a dataset
"""
