"""Your data -> HDF5 files that are read fastest, and a look at the files you have.

The files have blocks of 2 MiB, rows in random order and a checksum for each block. They are complete, or absent.
`python convert.py COMMAND --help` lists the flags of a command.
"""

import signal
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from importlib import import_module
from pathlib import Path

from fastgpu.convert import commands as files
from fastgpu.process.launch import UserError, exit_with_message


def parse(argv: list[str]) -> Namespace:
    """The command line. Exits for mistakes."""
    kinds = sorted(path.parent.name for path in Path(files.__file__).parent.glob("*/commands.py"))
    modules = [files, *(import_module(f"fastgpu.convert.{kind}.commands") for kind in kinds)]
    text = "\n".join((module.__doc__ or "").rstrip() for module in [sys.modules[__name__], *modules])
    parser = ArgumentParser(description=text, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in modules:
        module.add_commands(commands)
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
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is not complete is removed
    import torch  # whose import takes seconds: --help and mistakes should not wait for it

    torch.set_num_threads(1)  # each of the reader threads works alone
    sys.exit(main(args))
