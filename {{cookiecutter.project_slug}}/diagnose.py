"""Where does the time go, and which setting would help?"""

import sys

from fastgpu.diagnose.command import Program, main


def import_train() -> Program:
    """Import train.py after the config is read, because train.py imports torch, which takes seconds."""
    import train

    return train


if __name__ == "__main__":
    main(sys.argv[1:], import_train)
