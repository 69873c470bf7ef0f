"""Your data -> HDF5 files that are read fastest, and a look at the files you have.

The files have blocks of 2 MiB, rows in random order and a checksum for each block. They are complete, or absent.
`python convert.py COMMAND --help` lists the flags of a command.
"""

import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from importlib import import_module
from pathlib import Path
from typing import Any

import fastgpu.convert
from fastgpu.process.launch import UserError, exit_with_message

ROOM = Path(fastgpu.convert.__file__ or "").parent


def parse(argv: list[str]) -> Namespace:
    """The command line. `run` is the module of the command and its function. Exits for mistakes."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_file_commands(commands)
    if (ROOM / "images").exists():
        add_image_commands(commands)
    if (ROOM / "recsys").exists():
        add_recsys_commands(commands)
    return parser.parse_args(argv)


def add_file_commands(commands: Any) -> None:
    """Arrays, Datasets and HDF5 files."""
    text = "NumPy arrays or sparse matrices, one for each field: arrays images=x.npy labels=y.npy train.h5 --split 0.9"
    source = "name=file.npy, file.npz, name=matrix.npz of scipy.sparse, or name=file.h5::/dataset"
    parser = add_command(commands, "commands.arrays", text, source, nargs="+")
    add_target(parser, can_split=True)
    parser.add_argument("--layout", choices=("nhwc",), help="of fields with four axes: write them as (N, C, H, W)")

    text = "your own torch Dataset: dataset mine:Photos photos/ train.h5"
    parser = add_command(commands, "commands.dataset", text, "package.module:Class, a map-style torch Dataset")
    parser.add_argument("path", help="what the class is called with, such as a folder")
    add_target(parser)
    parser.add_argument("--fields", nargs="+", default=[], metavar="NAME=FIELD", help="default: images and labels")

    text = "HDF5 files -> one that is read fast: repack old-*.h5 train.h5"
    source = "file.h5, file.h5::/group or a quoted glob pattern"
    parser = add_command(commands, "commands.repack", text, source, nargs="+")
    add_target(parser)
    parser.add_argument("--fields", nargs="+", default=[], metavar="NAME=DATASET", help="default: all datasets")

    text = "rows, classes and layout: info train.h5"
    add_command(commands, "commands.info", text, "file.h5 or file.h5::/group", nargs="+")
    text = "which blocks are damaged: check train.h5; the exit code is 1 if there is one"
    add_command(commands, "commands.check", text, "file.h5 or file.h5::/group", nargs="+")


def add_image_commands(commands: Any) -> None:
    """Image files, and pixels in a CSV. Flags that are not given are false."""
    text = "a folder for each class, a CSV of path,label, or images and masks: images photos/ photos.h5 --size 64"
    parser = add_command(commands, "images.commands.images", text, "folder or .csv file")
    add_target(parser, can_split=True, has_table=True)
    add = parser.add_argument
    add("--columns", help="of the CSV: the path and its labels; default: path,label")
    add("--size", type=parse_size, metavar="HxW", help="height and width of the rows; default: those of the images")
    text = "shorter (default): cover the size and cut off the rest. exact: stretch"
    add("--resize", choices=("shorter", "exact"), help=text)
    text = "write the files as they are; each epoch decodes them. With --size 256, those whose shorter side is longer"
    add("--keep-encoded", action="store_true", help=f"{text} become smaller JPEG files")
    add("--masks", type=Path, metavar="DIR", help="folder with a mask of the same name for each image")
    add("--binary-masks", action="store_true", help="the masks hold 0 and 255, which is class 1 and not ignored")
    text = "at a broken image. stop: find the others, list them all, and write nothing. skip: leave it out, and list it"
    text += " beside TARGET; stop if more than 1 %%, and more than one, are broken"
    add("--on-error", choices=("stop", "skip"), default="stop", help=text)

    text = "a CSV with the pixels of square grey images: pixels fer2013.csv fer.h5"
    source = ".csv file with a column for each pixel, or a column `pixels`"
    parser = add_command(commands, "images.commands.pixels", text, source)
    add_target(parser, can_split=True, has_table=True)
    text = "default: the one column that is neither pixels nor split"
    parser.add_argument("--label", type=str.strip, metavar="COLUMN", help=text)


def add_recsys_commands(commands: Any) -> None:
    """Users and items."""
    text = "users and items, split as Liang et al. (2018) do: events ml-20m.zip ml-20m.h5"
    source = "MovieLens (a file of ratings, or the zip file), a CSV, or a sparse matrix.npz"
    parser = add_command(commands, "recsys.commands.events", text, source)
    add_target(parser)
    add = parser.add_argument
    add("--above", type=float, help="count ratings above this; default: 3.5")
    add("--held-out", type=int, default=10_000, help="users for validation, and as many for the test; default: 10,000")
    text = "of the CSV; default: userId,movieId,rating. USER,ITEM: without ratings, so that each line counts"
    add("--columns", help=text)


def add_command(commands: Any, run: str, text: str, source: str, *, nargs: str | None = None) -> ArgumentParser:
    """A command. run: `module.function` in fastgpu/convert. text: what it does, with an example. source: its help."""
    parser: ArgumentParser = commands.add_parser(run.rpartition(".")[2], help=text, description=text)
    parser.set_defaults(run=run)
    parser.add_argument("source", nargs=nargs, help=source)
    return parser


def add_target(parser: ArgumentParser, *, can_split: bool = False, has_table: bool = False) -> None:
    """TARGET, and how it is written. can_split, has_table: with --split, with --split-by."""
    add = parser.add_argument
    add("target", type=Path, help="file to write; it has a temporary name until it is complete")
    add("--seed", type=int, default=0, help="seed of everything that is random; default: 0")
    add("--keep-order", action="store_true", help="write the rows in the order of the source")
    add("--compression", choices=("none", "gzip"), default="none", help="default: none")
    add("--force", action="store_true", help="replace existing files")
    add("--dry-run", action="store_true", help="show what was understood of the source; write nothing")
    if can_split:
        text = "share to train on, such as 0.9 (the rest is for validation), or of train, val and test: 0.8,0.1,0.1"
        add("--split", type=parse_split, metavar="SHARES", help=text)
    if has_table:
        text = "column of the CSV that says train, val or test"
        add("--split-by", type=str.strip, metavar="COLUMN", help=text)


def parse_split(text: str) -> tuple[float, ...]:
    """The shares of train, val and perhaps test: `0.9` is (0.9, 0.1), `0.8,0.1,0.1` is itself."""
    try:
        shares = tuple(float(word) for word in text.split(","))
    except ValueError:
        shares = ()
    if len(shares) == 1:
        shares = (shares[0], 1 - shares[0])
    if len(shares) not in (2, 3) or not abs(sum(shares) - 1) < 1e-6 or min(shares) <= 0:
        kinds = "the share to train on, such as 0.9, or the shares of train, val and test, such as 0.8,0.1,0.1"
        raise ArgumentTypeError(f"{text} should be {kinds}")
    return shares


def parse_size(text: str) -> tuple[int, ...]:
    """(height, width) of 218x178, or of 64 for both."""
    words = text.split("x")
    if len(words) > 2 or not all(word.isdecimal() and int(word) for word in words):
        raise ArgumentTypeError(f"{text} should be HxW, such as 218x178, or one number for both")
    return tuple(map(int, words * 2))[:2]


def main(args: Namespace) -> int:
    """Run one command. Returns the exit code."""
    module, _, name = args.run.rpartition(".")
    with exit_with_message():
        try:
            return getattr(import_module(f"fastgpu.convert.{module}"), name)(args) or 0
        except ModuleNotFoundError as error:
            if error.name not in ("polars", "scipy"):
                raise
            raise UserError(f"{error.name} is not installed: pip install -c constraints.txt -e '.[convert]'") from None
        except OSError as error:  # such as a disk that is full
            raise UserError(str(error)) from None


if __name__ == "__main__":
    args = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is not complete is removed
    import torch  # whose import takes seconds: --help and mistakes should not wait for it

    torch.set_num_threads(1)  # each of the reader threads works alone
    sys.exit(main(args))
