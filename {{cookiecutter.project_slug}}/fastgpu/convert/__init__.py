"""What convert.py is made of: other data into HDF5 files that are read fastest. Training does not import this room.

A `Reader` (reader.py) is a source of rows and a map-style Dataset. writing.py takes rows in their final order to files,
which writer.py writes. The modules `commands` run what the command line asks for.
"""
