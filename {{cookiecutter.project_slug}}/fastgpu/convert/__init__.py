"""What convert.py is made of: other data into HDF5 files that are read fastest. Training does not import this room. A
`Reader` is a source of rows and a map-style Dataset. writing.py reads rows in their order, writer.py writes them."""
