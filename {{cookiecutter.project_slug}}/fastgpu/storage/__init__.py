"""Rows on a disk or in memory, read as blocks: each kind here keeps the contract `Dataset` of rows/contract.py.

meaning.py           what numbers mean: names, ranges, order; and whether sources agree on it
store.py, hdf5.py    HDF5 files as one dataset, and what is wrong with files that are not
columns.py           the fields of a dataset: in memory, in a file, ragged
layout.py, file.py   where the rows of an HDF5 dataset lie, and how the bytes of a file are read
codecs.py            compression, undone by each thread on its own
arrays.py            NumPy arrays as a dataset
"""
