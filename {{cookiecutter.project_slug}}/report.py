"""Show the values of a run and where its time went; or compare runs."""

import sys

from fastgpu.report.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
