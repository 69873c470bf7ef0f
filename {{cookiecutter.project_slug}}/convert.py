"""Your data -> HDF5 files that are read fastest, and a look at the files you have.

The files have blocks of 2 MiB, rows in random order and a checksum for each block. They are complete, or absent.
`python convert.py COMMAND --help` lists the flags of a command.
"""

import signal
import sys
from argparse import ArgumentParser, ArgumentTypeError, Namespace, RawDescriptionHelpFormatter
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fastgpu.process.launch import UserError, exit_with_message
from fastgpu.process.tools import start_tool

COMMANDS = {
    "commands.arrays": "x.npy, y.npz, z.npz::x, scipy's sparse m.npz, x.h5::/x: arrays images=x.npy y.npz train.h5",
    "commands.dataset": "your own torch Dataset, package.module:Class: dataset mine:Photos photos/ train.h5",
    "commands.repack": "file.h5, file.h5::/group or quoted patterns -> a file that is read fast: repack old.h5 x.h5",
    "commands.info": "rows, classes and layout of file.h5 or file.h5::/group: info train.h5",
    "commands.check": "which blocks are damaged: check train.h5; the exit code is 1 if there is one",
    "images.commands.images": "folders of classes, a CSV of path,label, images and masks: images photos/ x.h5",
    "images.commands.pixels": "a CSV of square grey images, pixels in columns or in `pixels`: pixels fer.csv fer.h5",
    "recsys.commands.events": "MovieLens, a CSV or sparse.npz, split as Liang et al. (2018): events ml.zip ml.h5",
}
"""{module.function in fastgpu/convert: what the command does, with an example}"""
MAX_SIDE = 1 << 14
"""Pixels of a side of an image."""
WRITING = "arrays dataset repack images pixels events"


def parse(argv: list[str]) -> Namespace:
    """The command line. `run` is the module of the command and its function. Exits for mistakes."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    parsers: dict[str, ArgumentParser] = {}
    for run, text in COMMANDS.items():
        module, _, name = run.rpartition(".")
        file = Path(__file__).parent / f"fastgpu/convert/{module.replace('.', '/')}.py"
        if file.exists():  # a project may be without images, or without users
            parsers[name] = commands.add_parser(name, help=text, description=text)
            parsers[name].set_defaults(run=run)

    def add(names: str, flag: str, **options: Any) -> None:
        for name in parsers.keys() & {*names.split()}:
            parsers[name].add_argument(flag, **options)

    switch = {"action": "store_true"}
    add("dataset images pixels events", "source")
    add("arrays repack info check", "source", nargs="+")
    add("dataset", "path", help="what the class is called with, such as a folder")
    add(WRITING, "target", type=Path, help="file to write; it has a temporary name until it is complete")
    add(WRITING, "--seed", type=natural, default=0, help="seed of order and split, but not of the users of `events`")
    add(WRITING, "--keep-order", **switch, help="write the rows in the order of the source")
    add(WRITING, "--compression", choices=("none", "gzip"), default="none", help="default: none")
    add(WRITING, "--force", **switch, help="replace existing files")
    add(WRITING, "--dry-run", **switch, help="show what was understood of the source; write nothing")
    add("arrays images pixels", "--split", type=shares, help="shares of train, val and test, 0.8,0.1,0.1; or of train")
    add("images pixels", "--split-by", type=str.strip, default="", help="column that says train, val or test")
    add("arrays", "--layout", choices=("nhwc",), help="of fields with four axes: write them as (N, C, H, W)")
    add("dataset repack", "--fields", nargs="+", metavar="NAME[=KEY]", help="default: images and labels; repack: all")
    add("dataset", "--num-workers", type=natural, help="processes that read; 0: none, to debug; default: the CPUs")
    add("images pixels events", "--no-header", **switch, help="the first line is a row; columns are called 1, 2, ...")
    add("images", "--columns", help="of the CSV: the path and its labels; default: path,label")
    add("images", "--size", type=size, metavar="HxW", help="height and width of the rows; default: those of the images")
    add("images", "--resize", choices=("shorter", "exact"), help="cut off the rest (shorter, the default), or stretch")
    add("images", "--keep-encoded", **switch, help="keep the files; if the shorter side is above --size: smaller JPEG")
    add("images", "--masks", type=Path, metavar="DIR", help="folder with a mask of the same name for each image")
    add("images", "--binary-masks", **switch, help="the masks hold 0 and 255, which is class 1 and not ignored")
    fits = {"choices": ("shown", "stored"), "help": "where EXIF turns images: whether masks are of the turned ones"}
    add("images", "--masks-fit", **fits)
    on_error = {"type": max_broken, "default": 0.0, "metavar": "{stop,skip,skip=10%%}"}
    add("images", "--on-error", **on_error, help="list broken ones (default), or leave out 1 %% of them, or a share")
    add("pixels", "--label", type=str.strip, default="", help="its column; default: the only one, or label")
    add("events", "--above", type=float, help="count ratings above this; default: 3.5")
    users = {"type": partial(natural, lowest=1), "default": 10_000, "metavar": "N"}
    add("events", "--held-out", **users, help="users for val, and as many for test; default: 10,000")
    add(
        "events",
        "--columns",
        help="of the CSV; default: userId,movieId,rating; a fourth is the time. Or two: each line counts",
    )
    return parser.parse_args(argv)


def shares(text: str) -> tuple[float, ...]:
    """The shares of train, val and perhaps test: `0.9` is (0.9, 0.1), `0.8,0.1,0.1` is itself."""
    numbers = tuple(map(float, text.split(",")))
    if len(numbers) == 1:
        numbers = (numbers[0], 1 - numbers[0])
    if len(numbers) > 3 or not abs(sum(numbers) - 1) < 1e-6 or min(numbers) <= 0:
        raise ArgumentTypeError(f"{text} should be a share, such as 0.9, or shares with the sum 1: 0.8,0.1,0.1")
    return numbers


def size(text: str) -> tuple[int, ...]:
    """(height, width) of 218x178, or of 64 for both."""
    numbers = tuple(map(int, text.split("x")))
    if len(numbers) > 2 or min(numbers) < 1 or max(numbers) > MAX_SIDE:
        raise ArgumentTypeError(f"{text} should be HxW, such as 218x178, or one number for both, up to {MAX_SIDE:,}")
    return (numbers * 2)[:2]


def max_broken(text: str) -> float:
    """The share of the images that may be left out: of `stop` none, of `skip` 1 %."""
    word, _, pct = text.partition("=")
    share = {"stop": 0.0, "skip": 0.01}.get(text) if not pct else float(pct.removesuffix("%")) / 100
    if share is None or (pct and not (word == "skip" and pct.endswith("%") and 0 < share <= 1)):
        raise ArgumentTypeError(f"{text} should be stop, skip or a share such as skip=10%")
    return share


def natural(text: str, lowest: int = 0) -> int:
    """A whole number of at least `lowest`."""
    if not text.isdecimal() or int(text) < lowest:
        raise ArgumentTypeError(f"{text} should be a whole number of at least {lowest}")
    return int(text)


def main(args: Namespace) -> int:
    """Run one command. Returns the exit code."""
    module, _, name = args.run.rpartition(".")
    with exit_with_message(OSError):
        try:
            return getattr(import_module(f"fastgpu.convert.{module}"), name)(args) or 0
        except ModuleNotFoundError as error:
            if error.name not in ("polars", "scipy"):  # a Dataset of your own may import others
                raise
            raise UserError(f"{error}; convert.py needs: pip install -c constraints.txt -e '.[convert]'") from None


if __name__ == "__main__":
    args = parse(sys.argv[1:])
    start_tool()
    if args.run in ("commands.info", "commands.check"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends them, which write no files
    import torch  # whose import takes seconds: --help and mistakes should not wait for it

    torch.set_num_threads(1)  # each of the reader threads works alone
    sys.exit(main(args))
