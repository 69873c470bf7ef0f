"""Rows on a disk or in memory, read in blocks. The datasets here implement `Dataset` of rows/contract.py.

store.py         HDF5 files as one dataset
part.py          one of these files: its columns, opened and checked
windows.py       windows of long series: a row is made of neighbouring rows of another dataset
arrays.py        arrays in memory as a dataset
columns.py       one field of a dataset: in memory, ragged, or decoded while it is read
layout.py        one field in an HDF5 file, and three ways to read it
chunks.py        the places of its chunks in the file, and their checksums
file.py          an open file, read with system calls, through a mapping of the file, or through h5py
filters.py       HDF5's filters, such as gzip, decoded without HDF5's lock
hdf5.py          a file as h5py sees it, and its errors in one line
meaning.py       checks that the numbers of two datasets have the same meaning
"""
