"""Images:

python convert.py images photos/ photos.h5 --size 64 --split 0.9    a folder for each class -> photos-train.h5, -val.h5
python convert.py images photos.csv photos.h5 --size 64             or a CSV with lines of path,label
python convert.py cifar10 cifar-10-python.tar.gz cifar10.h5         -> cifar10-train.h5, cifar10-test.h5
python convert.py celeba celeba/ celeba.h5                          -> celeba-train.h5, celeba-val.h5, celeba-test.h5
python convert.py synthetic made-up.h5 --rows 50000 --shape 3x32x32 made-up images, to try things with
"""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

from fastgpu.convert.cifar_celeba import open_celeba, open_cifar10
from fastgpu.convert.command_line import (
    CommandLine,
    add_on_error_flag,
    add_split_flag,
    add_target_flags,
    read_target,
)
from fastgpu.convert.image_files import ImageFiles, Listing, list_csv, list_folder, split_listing
from fastgpu.convert.synthetic_images import SyntheticImages
from fastgpu.convert.writing import write_files
from fastgpu.rows.contract import Source
from fastgpu.storage.images import Preprocessing, Resize

SYNTHETIC_ROWS = 50_000


def add_commands(command_line: CommandLine) -> None:
    """Add the commands for images."""
    parser = command_line.add(images, "folder or .csv file")
    add_target_flags(parser)
    _add_decoding_flags(parser)
    add_split_flag(parser)
    parser.add_argument("--columns", default="path,label", help="columns of the CSV that hold paths and labels")
    parser.add_argument(
        "--classes", type=int, help="number of classes, if the labels of the CSV are numbers; default: highest + 1"
    )
    parser.add_argument("--root", type=Path, help="folder that the paths start from; default: that of the CSV")

    add_target_flags(command_line.add(cifar10, "cifar-10-python.tar.gz, cifar-10-binary.tar.gz, or the folder in it"))

    parser = command_line.add(celeba, "folder with the images and the two lists")
    add_target_flags(parser)
    _add_decoding_flags(parser)

    parser = command_line.add_synthetic("images", make_images)
    parser.add_argument(
        "--shape", type=_parse_shape, default=(3, 32, 32), metavar="CxHxW", help="of an image; default: 3x32x32"
    )
    parser.add_argument("--classes", type=int, default=10, help="number of classes of images; default: 10")


def images(args: Namespace) -> None:
    """Decode image files: a folder with a sub-folder for each class, or a CSV with a path and a label in each line."""
    source = Path(args.source)
    if source.is_dir():
        listing = list_folder(source)
        root = args.root or source
    else:
        listing = list_csv(source, args.columns.split(","), args.classes)
        root = args.root or source.parent

    def open_part(files: Listing) -> ImageFiles:
        return ImageFiles(
            args.source,
            files,
            lambda name: (root / name).open("rb"),
            preprocessing=_read_preprocessing(args),
            on_error=args.on_error,
        )

    if args.split:
        train, val = split_listing(listing, args.split, args.seed)
        write_files({"train": open_part(train), "val": open_part(val)}, read_target(args))
    else:
        write_files({"": open_part(listing)}, read_target(args))


def cifar10(args: Namespace) -> None:
    """Convert CIFAR-10 as published: the python or the binary archive, or its folder."""
    write_files(open_cifar10(Path(args.source)), read_target(args))


def celeba(args: Namespace) -> None:
    """Convert CelebA as published: a folder with img_align_celeba (or .zip) and its lists.

    The lists are list_attr_celeba.txt and list_eval_partition.txt.
    """
    parts = open_celeba(Path(args.source), _read_preprocessing(args), args.on_error)
    write_files(parts, read_target(args))


def make_images(args: Namespace) -> Mapping[str, Source]:
    """Made-up images: for each class one picture, under noise."""
    n_rows = args.rows or SYNTHETIC_ROWS
    if not args.split:
        return {"": SyntheticImages(n_rows, args.shape, args.classes, seed=args.seed)}
    n_train = round(args.split * n_rows)
    return {
        "train": SyntheticImages(n_train, args.shape, args.classes, seed=args.seed),
        "val": SyntheticImages(n_rows - n_train, args.shape, args.classes, seed=args.seed, part=1),
    }


def _add_decoding_flags(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--size", type=_parse_size, metavar="HxW", help="height and width of the rows; default: those of the images"
    )
    parser.add_argument(
        "--resize",
        choices=get_args(Resize),
        default="shorter",
        help="shorter: cover the size and cut off the rest. exact: stretch. pad: add black borders",
    )
    parser.add_argument("--crop", type=_parse_size, metavar="HxW", help="cut out the centre first")
    add_on_error_flag(parser, "image")


def _read_preprocessing(args: Namespace) -> Preprocessing:
    return Preprocessing(args.size, args.resize, args.crop)


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a height and width such as 218x178, or 64 for both")
    height, width = match.groups()
    return int(height), int(width or height)


def _parse_shape(text: str) -> tuple[int, int, int]:
    match = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", text)
    if match is None:
        raise ArgumentTypeError(f"{text!r} is not a shape such as 3x32x32")
    return int(match[1]), int(match[2]), int(match[3])
