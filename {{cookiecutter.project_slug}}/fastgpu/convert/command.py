"""The command line of convert.py: a dataclass for each command, whose fields are its arguments.

This module does not import torch, which takes seconds: --help and mistakes, also in paths, are shown immediately.
"""

import glob
import os
import re
import signal
import sys
from abc import ABC, abstractmethod
from argparse import ArgumentTypeError
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, Literal, get_args

from fastgpu import convert
from fastgpu.process.commands import argument, flag, parse_command
from fastgpu.process.config import MAX_THREADS
from fastgpu.process.launch import UserError, exit_with_message, list_first
from fastgpu.process.project import install_command
from fastgpu.process.tools import check_exist, start_tool

__all__ = ["main"]

TEXT = """\
Write your data to HDF5 files that are read fastest, and look at files.

The files have blocks of 2 MiB, rows in random order and a checksum for each
block. A file gets its name when it is complete."""
SUFFIXES = (".h5", ".hdf5")
"""Suffixes of the files that are written. .gitignore has them."""
PARQUET = (".parquet", ".pq")
"""Suffixes of Parquet files, alone or in a pattern."""

NumberType = Literal[
    "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64"
]


def natural(text: str, lowest: int = 0, highest: int | None = None) -> int:
    """A whole number of at least `lowest`, and at most `highest` if that is given."""
    if not text.isdecimal() or int(text) < lowest or int(text) > (highest or int(text)):
        limit = "" if highest is None else f", and at most {highest:,}"
        raise ArgumentTypeError(f"{text} should be a whole number of at least {lowest}{limit}")
    return int(text)


def shares(text: str) -> tuple[float, ...]:
    """The shares of train, val and, if given, test: `0.9` is (0.9, 0.1), `0.8,0.1,0.1` is (0.8, 0.1, 0.1)."""
    try:
        numbers = tuple(map(float, text.split(",")))
    except ValueError:
        numbers = ()
    if len(numbers) == 1:
        numbers = (numbers[0], 1 - numbers[0])
    if not 2 <= len(numbers) <= 3 or not abs(sum(numbers) - 1) < 1e-6 or min(numbers) <= 0:
        raise ArgumentTypeError(f"{text} should be a share, such as 0.9, or shares with the sum 1: 0.8,0.1,0.1")
    return numbers


def max_broken(text: str) -> float:
    """The maximum share of broken rows: `stop` is 0, `skip` is 0.01, `skip=10%` is 0.1."""
    if text in ("stop", "skip"):
        return 0.0 if text == "stop" else 0.01
    found = re.fullmatch(r"skip=(\d+\.?\d*)%", text)
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share <= 1:
        raise ArgumentTypeError(f"{text} should be stop, skip or a share such as skip=10%")
    return share


def split_name(source: str) -> tuple[str, str]:
    """(name, path) of `name=path`. The name of a path alone is empty, also of an existing folder `year=2024`."""
    name, equals, path = source.partition("=")
    is_path = os.path.lexists(source) or glob.glob(source)  # noqa: PTH207 (absolute ones, too)
    return (name, path) if equals and not is_path else ("", source)


def is_parquet(path: str) -> bool:
    """Whether a path, a pattern or `x.parquet::column` names Parquet files."""
    return path.partition("::")[0].lower().endswith(PARQUET)


class Command(ABC):
    """A command with its arguments. Arguments that do not fit together, and missing paths, raise UserError."""

    @abstractmethod
    def run(self) -> int | None:
        """Run the command. Returns the exit code, or None for 0. Raises UserError."""


@dataclass(frozen=True, kw_only=True)
class WriteCommand(Command):
    """The arguments of all commands that write files."""

    target: Path = argument("file to write; it has a temporary name until it is complete")
    seed: int = flag("seed of order and split", type=natural, default=0, metavar="N")
    keep_order: bool = flag("write the rows in the order of the source", default=False)
    compression: Literal["none", "gzip"] = flag("default: none", default="none")
    force: bool = flag("replace existing files", default=False)
    on_error: float | None = flag(
        "broken rows: list them and stop (default), or leave out up to 1 %% (skip) or another share of all rows. With "
        "this flag, also with stop, rows with NaN or infinite values are broken",
        type=max_broken,
        metavar="{stop,skip,skip=10%}",
    )
    limit: int | None = flag(
        "write N rows, for a first look: drawn at random, the same share of each class; or the first ones, if the "
        "order is kept",
        type=partial(natural, lowest=1),
        metavar="N",
    )
    threads: int | None = flag(
        "threads that read rows; default: the CPUs. It does not limit polars (POLARS_MAX_THREADS does)",
        type=partial(natural, lowest=1, highest=MAX_THREADS),
        metavar="N",
    )
    dry_run: bool = flag("show the rows, classes and splits of the source; write nothing", default=False)

    def __post_init__(self) -> None:
        if self.target.suffix not in SUFFIXES:
            raise UserError(f"TARGET is {self.target}; it should end in {' or '.join(SUFFIXES)}")


@dataclass(frozen=True, kw_only=True)
class SplitCommand(WriteCommand):
    """The arguments of all commands that can split rows at random."""

    split: tuple[float, ...] | None = flag(
        "shares of train, val and test, 0.8,0.1,0.1; or of train", type=shares, metavar="SHARES"
    )
    split_by: str = flag(
        "column, such as patient: --split puts all rows with one value into one file. Without --split, the values are "
        "train, val or test",
        type=str.strip,
        default="",
        metavar="COLUMN",
    )


@dataclass(frozen=True, kw_only=True)
class Arrays(SplitCommand):
    """Write NumPy arrays, sparse matrices or columns of Parquet files.

    python convert.py arrays images=x.npy labels=y.npy data/x.h5 --split 0.9
    """

    sources: tuple[str, ...] = argument(
        "name=x.npy, y.npz, name=z.npz::x, name=m.npz of scipy.sparse, name=x.h5::/x; or x.parquet or a quoted pattern "
        "of such files, or name=x.parquet::column",
        metavar="SOURCE",
    )
    layout: Literal["nhwc"] | None = flag("of fields with four axes: write them as (N, C, H, W)")
    dtype: NumberType | None = flag(
        "type of the numbers in raw binary files, name=x.bin, such as uint16; their order is kept",
        choices=get_args(NumberType),
        metavar="TYPE",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype and self.split:
            cure = "leave it out, and train with data.val=10%, the end of the series"
            raise UserError(f"--split would draw single numbers of a series at random; {cure}")
        if self.dtype and self.split_by:
            raise UserError("--split-by names a column, which raw files of --dtype do not have; drop it")
        check_exist(*(split_name(source)[1] for source in self.sources))
        if self.dtype and any(is_parquet(split_name(source)[1]) for source in self.sources):
            raise UserError("--dtype has no meaning for Parquet files, whose columns have types; drop it")

    def run(self) -> None:
        from fastgpu.convert.arrays import open_arrays
        from fastgpu.convert.program import write
        from fastgpu.rows import contract

        rows: contract.Dataset
        how: dict[str, Any] = {"channels_last": self.layout == "nhwc", "split_by": self.split_by}
        if any(is_parquet(split_name(source)[1]) for source in self.sources):
            from fastgpu.convert.parquet_rows import open_parquet  # polars is of the extra `convert`

            rows = open_parquet(self.sources, **how)
        else:
            rows = open_arrays(self.sources, dtype=self.dtype, **how)
        write(rows, replace(self, keep_order=self.keep_order or bool(self.dtype)))


@dataclass(frozen=True, kw_only=True)
class Dataset(WriteCommand):
    """Write the items of your own torch Dataset.

    python convert.py dataset mine:Photos photos/ data/photos.h5
    """

    source: str = argument("package.module:Class, or a function that returns the Dataset")
    path: str = argument("the argument of the class or function, such as a folder")
    fields: tuple[str, ...] = flag(
        "names of the values of an item; default: images labels", default=(), nargs="+", metavar="NAME[=KEY]"
    )
    num_workers: int | None = flag(
        "processes that read; 0: none, to debug; default: the CPUs", type=natural, metavar="N"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads:
            raise UserError("--threads has no effect on a Dataset, whose items processes read; use --num-workers")

    def run(self) -> None:
        from fastgpu.convert.program import write_dataset

        write_dataset(self)


@dataclass(frozen=True, kw_only=True)
class Repack(WriteCommand):
    """Rewrite the rows of HDF5 files so that they are read fast.

    python convert.py repack old.h5 data/x.h5
    """

    sources: tuple[str, ...] = argument("file.h5, file.h5::/group or quoted patterns", metavar="SOURCE")
    fields: tuple[str, ...] = flag("datasets to write; default: all", default=(), nargs="+", metavar="NAME[=KEY]")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_exist(*self.sources)

    def run(self) -> None:
        from fastgpu.convert.program import repack

        repack(self)


@dataclass(frozen=True, kw_only=True)
class LookCommand(Command):
    """The arguments of all commands that only read files."""

    sources: tuple[str, ...] = argument("file.h5, or file.h5::/group", metavar="SOURCE")

    def __post_init__(self) -> None:
        check_exist(*self.sources)


@dataclass(frozen=True, kw_only=True)
class Info(LookCommand):
    """Show rows, classes and layout of HDF5 files.

    python convert.py info data/x.h5
    """

    def run(self) -> None:
        from fastgpu.convert.program import show

        show(self)


@dataclass(frozen=True, kw_only=True)
class Check(LookCommand):
    """List the damaged blocks of HDF5 files; the exit code is 1 if any.

    python convert.py check data/x.h5
    """

    def run(self) -> int:
        from fastgpu.convert.program import check

        return check(self)


def commands() -> Mapping[str, type[Command]]:
    """{name: command}. Each folder beside this module adds the commands for one kind of data, if a project has it."""
    kinds: dict[str, type[Command]] = {
        "arrays": Arrays,
        "dataset": Dataset,
        "repack": Repack,
        "info": Info,
        "check": Check,
    }
    for room in iter_modules(convert.__path__):
        if room.ispkg:
            kinds |= import_module(f"{convert.__name__}.{room.name}.command").COMMANDS
    return kinds


def parse(argv: Sequence[str]) -> Command:
    """The command that a command line asks for. Raises UserError for mistakes."""
    return parse_command(commands(), argv, program="convert.py", text=TEXT)


def run(command: Command) -> int:
    """Run a command. Returns the exit code. Raises UserError."""
    try:
        return command.run() or 0
    except ModuleNotFoundError as error:
        if error.name not in ("polars", "scipy"):  # a Dataset of your own may import others
            raise
        raise UserError(f"{error}; convert.py needs: {install_command('convert')}") from None


def announce(command: WriteCommand) -> None:
    """Print the sources on a terminal: listing folders and parsing tables may take long before the next output."""
    given = vars(command)
    sources = given.get("sources") or [given["source"]]
    if sys.stderr and sys.stderr.isatty():
        print(f"reading {list_first([*map(str, sources)])}", file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> None:
    """Run `convert.py` with these words. The exit code is 1 if `check` finds damage."""
    start_tool()
    with exit_with_message():
        command = parse(argv)
    if isinstance(command, LookCommand):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends them, which write no files

    if isinstance(command, WriteCommand):
        announce(command)
    # Torch, whose import takes seconds, comes after what can be wrong without it.
    import torch

    torch.set_num_threads(1)  # each of the reader threads works alone
    with exit_with_message(OSError):
        exit_code = run(command)
    sys.exit(exit_code)
