"""The command line of convert.py: sub-commands, which each kind of data adds, and the flags that they share.

A command imports what it needs when it runs: torch alone takes seconds, for which --help and mistakes should not wait.
"""

import argparse
import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from fastgpu.process.machine import available_cpus

if TYPE_CHECKING:
    from fastgpu.rows.contract import Dataset

Run = Callable[[Namespace], int | None]
"""A command. It returns the exit code of the process; None means 0."""


class CommandLine:
    """The commands of convert.py.

    commands_files.py and the module `commands` of each folder add their own in the function
    `add_commands(command_line)`. A project for one kind of data has only the folder that belongs to it. The docstrings
    of these modules follow the description.
    """

    def __init__(self, description: str):
        folders = sorted(path.parent.name for path in Path(__file__).parent.glob("*/commands.py"))
        names = ["commands_files", *(f"{folder}.commands" for folder in folders)]
        modules = [import_module(f"fastgpu.convert.{name}") for name in names]
        texts = [description.strip(), *((module.__doc__ or "").strip() for module in modules)]
        self.parser = ArgumentParser(
            description="\n\n".join(texts), formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.commands = self.parser.add_subparsers(required=True, metavar="COMMAND")
        for module in modules:
            module.add_commands(self)

    def add(self, run: Run, source: str = "", *, many: bool = False, writes: bool = True) -> ArgumentParser:
        """Add a command with the name and the docstring of the function `run`.

        source: help text of its argument `source`; empty if it has none. many: it takes several of them. writes: it
        has the argument `target` and the flags that `write` reads.
        """
        text = run.__doc__ or ""
        summary = " ".join(text.partition("\n\n")[0].split())
        parser = self.commands.add_parser(run.__name__, help=summary, description=text)
        parser.set_defaults(run=run)
        if source:
            parser.add_argument("source", help=source, nargs="+" if many else None)
        help_text = "threads that read, decode, hash and compress; default: the number of CPUs"
        parser.add_argument("--threads", type=int, default=available_cpus(), help=help_text)
        if writes:
            _add_target_flags(parser)
        return parser


# ---------------------------------------------------------------------------------------------- shared flags


def _add_target_flags(parser: ArgumentParser) -> None:
    """TARGET, and how it is written. `write` reads them."""
    parser.add_argument("target", type=Path, help="file to write; it has a temporary name until it is complete")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything that is random; default: 0")
    parser.add_argument("--keep-order", action="store_true", help="write the rows in the order of the source")
    parser.add_argument("--compression", choices=("none", "gzip"), default="none", help="default: none")
    parser.add_argument("--force", action="store_true", help="replace existing files")
    parser.add_argument("--dry-run", action="store_true", help="show what was understood of the source; write nothing")


def write(parts: Mapping[str, "Dataset"], args: Namespace) -> None:
    """Write each part to a file, as the flags of `_add_target_flags` say (see `write_files`)."""
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


def add_on_error_flag(parser: ArgumentParser) -> None:
    """--on-error."""
    text = (
        "at a broken image. stop: find the others, list them all, and write nothing. skip: leave it out, and list it "
        "beside TARGET; stop if more than 1 %%, and more than one, are broken"
    )
    parser.add_argument("--on-error", choices=("stop", "skip"), default="stop", help=text)


# ---------------------------------------------------------------------------------------------- signals

_received_signals: list[int] = []


def exit_on_signals() -> None:
    """End the process at Ctrl-C and SIGTERM without a traceback; context managers remove what is not complete.

    The exit code is 128 + the number of the signal, as shells have it. Python drops an exception that is raised while
    a destructor runs, so the handler also remembers the signal, and the loop that writes asks for it.
    """
    sys.unraisablehook = report_unraisable
    signal.signal(signal.SIGINT, _handle)
    signal.signal(signal.SIGTERM, _handle)


def exit_if_signalled() -> None:
    """Exit if a signal came whose exception was dropped."""
    if _received_signals:
        sys.exit(128 + _received_signals[0])


def report_unraisable(unraisable: "sys.UnraisableHookArgs") -> None:
    """Report an exception that a destructor raised, unless it is the exit that a signal asked for."""
    if not isinstance(unraisable.exc_value, SystemExit):
        sys.__unraisablehook__(unraisable)


def _handle(number: int, frame: FrameType | None) -> None:
    _received_signals.append(number)
    exit_if_signalled()
