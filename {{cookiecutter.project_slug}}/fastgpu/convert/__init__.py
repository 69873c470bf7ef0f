"""What convert.py is made of: other data into HDF5 files that are read fastest, and a look at the files one has.

Training does not import this room. If you do not need it, delete it together with convert.py.
commands_files.py and the module `commands` of each folder are the commands, command_line.py finds them. Each source of
rows has a module of its own; writing.py takes their rows to files, which writer.py writes.
"""
