"""What a run did: its values and where its time went; or many runs beside each other."""

import sys

from fastgpu.report.command import main

if __name__ == "__main__":
    main(sys.argv[1:])
