"""What the commands of convert.py share: TARGET and its flags, --split, --on-error.

A command imports what it needs when it runs: torch alone takes seconds, for which --help and mistakes should not wait.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastgpu.process.machine import available_cpus

if TYPE_CHECKING:
    from fastgpu.rows.contract import Dataset

Run = Callable[[Namespace], int | None]
"""A command. It returns the exit code of the process; None means 0."""
Commands = Any
"""What `ArgumentParser.add_subparsers` returns."""


def add_command(commands: Commands, run: Run, source: str, *, many: bool = False) -> ArgumentParser:
    """Add a command with the name and the docstring of the function `run`, and return its parser.

    source: help text of the argument `source`. many: it takes several of them.
    """
    text = run.__doc__ or ""
    parser: ArgumentParser = commands.add_parser(
        run.__name__, help=" ".join(text.partition("\n\n")[0].split()), description=text
    )
    parser.set_defaults(run=run)
    parser.add_argument("source", help=source, nargs="+" if many else None)
    help_text = "threads that read, decode, hash and compress; default: the number of CPUs"
    parser.add_argument("--threads", type=int, default=available_cpus(), help=help_text)
    return parser


def add_target(parser: ArgumentParser) -> None:
    """TARGET, and how it is written. `write` reads the flags."""
    add = parser.add_argument
    add("target", type=Path, help="file to write; it has a temporary name until it is complete")
    add("--seed", type=int, default=0, help="seed of everything that is random; default: 0")
    add("--keep-order", action="store_true", help="write the rows in the order of the source")
    add("--compression", choices=("none", "gzip"), default="none", help="default: none")
    add("--force", action="store_true", help="replace existing files")
    add("--dry-run", action="store_true", help="show what was understood of the source; write nothing")


def write(parts: Mapping[str, "Dataset"], args: Namespace) -> None:
    """Write each part to a file, as the flags of `add_target` say (see `write_files`)."""
    from fastgpu.convert.writer import WriteOptions
    from fastgpu.convert.writing import write_files

    seed = None if args.keep_order else args.seed
    options = WriteOptions(args.compression, args.threads, args.force)
    write_files(parts, args.target, options, seed=seed, is_dry_run=args.dry_run)


def add_split_flag(parser: ArgumentParser) -> None:
    """--split."""
    text = "share to train on, such as 0.9 (the rest is for validation), or of train, val and test: 0.8,0.1,0.1"
    parser.add_argument("--split", type=parse_split, metavar="SHARES", help=text)


def parse_split(text: str) -> tuple[float, ...]:
    """The shares of train, val and perhaps test: `0.9` is (0.9, 0.1), `0.8,0.1,0.1` is itself."""
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) == 1:
        shares = (shares[0], 1 - shares[0])
    is_whole = abs(sum(shares) - 1) < 1e-6
    if len(shares) not in (2, 3) or not is_whole or min(shares) <= 0:
        kinds = "the share to train on, such as 0.9, or the shares of train, val and test, such as 0.8,0.1,0.1"
        raise ArgumentTypeError(f"{text} should be {kinds}")
    return shares


def parse_columns(text: str) -> list[str]:
    """The names of columns in `path, label`, without spaces around them: headers are read so, too."""
    return [name.strip() for name in text.split(",")]
