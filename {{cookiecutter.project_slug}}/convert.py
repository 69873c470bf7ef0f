"""Write your data to HDF5 files that are read fastest, and look at files: `python convert.py --help`."""

import sys

from fastgpu.convert.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
