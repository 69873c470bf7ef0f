"""Rows on a disk or in memory, read as blocks: each kind here keeps the contract `Dataset` of rows/contract.py.

store.py         HDF5 files as one dataset
part.py          one of them: its columns, opened and checked
windows.py       windows of long series: rows made of neighbouring rows of one of the others
arrays.py        arrays in memory as a dataset
columns.py       one field of a dataset: in memory, ragged, or decoded while it is read
layout.py        one field in an HDF5 file, and three ways to read it
chunks.py        where its chunks are in the file, and their checksums
file.py          an open file: bytes by system calls, by a mapping of the file, or through h5py
filters.py       HDF5's filters, such as gzip, undone without HDF5's lock
hdf5.py          a file as h5py sees it, and what is wrong with it in one line
meaning.py       whether two sources agree about what their numbers mean
"""
