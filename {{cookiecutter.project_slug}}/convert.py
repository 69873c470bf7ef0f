"""Your data -> HDF5 files that are read fastest, and a look at the files you have.

The files have blocks of 2 MiB, rows in random order and a checksum for each block. They are complete, or absent.
`python convert.py COMMAND --help` lists the flags of a command.
"""

import sys
from argparse import Namespace

from fastgpu.convert.command_line import CommandLine, exit_on_signals
from fastgpu.process.launch import UserError, exit_with_message


def parse(argv: list[str]) -> Namespace:
    """The command line. Exits for mistakes."""
    parser = CommandLine(__doc__).parser
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}; put flags before SOURCE or behind TARGET")
    return args


def main(args: Namespace) -> int:
    """Run one command. Returns the exit code."""
    with exit_with_message("interrupted"):
        try:
            return args.run(args) or 0
        except ModuleNotFoundError as error:
            if error.name not in ("polars", "scipy"):
                raise
            raise UserError(f"{error.name} is not installed: pip install -c constraints.txt -e '.[convert]'") from None
        except BrokenPipeError:
            raise UserError("whoever reads these lines has gone, so the command has ended; see what it wrote") from None
        except OSError as error:
            raise UserError(f"{error}; nothing was written: is the disk full or gone?") from None


if __name__ == "__main__":
    exit_on_signals()
    args = parse(sys.argv[1:])
    import torch  # whose import takes seconds: --help and mistakes should not wait for it

    torch.set_num_threads(1)  # each of the reader threads works alone
    sys.exit(main(args))
