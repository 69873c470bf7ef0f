"""
Images:

python convert.py images photos/ photos.h5 --size 64 --split 0.9    a folder for each class -> photos-train.h5, -val.h5
python convert.py images photos.csv photos.h5 --size 64             or a CSV with lines of path,label
python convert.py images photos/ photos.h5 --keep-encoded           the JPEG files themselves, decoded in each epoch
python convert.py images photos/ cells.h5 --masks masks/ --size 64  images and masks of the same names
python convert.py pixels fer2013.csv fer2013.h5 --split-by Usage    a CSV with the pixels in it
"""

import re
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from fastgpu.convert.command_line import Commands, add_command, add_split_flag, add_target, parse_columns, write
from fastgpu.process.launch import UserError


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    parser = add_command(commands, images, "folder or .csv file")
    _add_table_flags(parser)
    add = parser.add_argument
    add("--columns", default="path,label", help="of the CSV: the path and its labels; default: path,label")
    add("--root", type=Path, help="folder that the paths start from; default: that of the CSV")
    add("--size", type=_parse_size, metavar="HxW", help="height and width of the rows; default: those of the images")
    text = "shorter: cover the size and cut off the rest. exact: stretch"
    add("--resize", choices=("shorter", "exact"), default="shorter", help=text)
    text = "write the files as they are; each epoch decodes them. With --size 256, those whose shorter side is longer"
    add("--keep-encoded", action="store_true", help=f"{text} become smaller JPEG files")
    add("--quality", type=_parse_quality, default=92, help="of those; default: 92")
    add("--masks", type=Path, metavar="DIR", help="folder with a mask of the same name for each image")
    add("--binary-masks", action="store_true", help="the masks hold 0 and 255, which is class 1 and not ignored")
    text = "at a broken image. stop: find the others, list them all, and write nothing. skip: leave it out, and list it"
    text += " beside TARGET; stop if more than 1 %%, and more than one, are broken"
    add("--on-error", choices=("stop", "skip"), default="stop", help=text)

    parser = add_command(commands, pixels, ".csv file")
    _add_table_flags(parser)
    add = parser.add_argument
    add("--label", type=str.strip, metavar="COLUMN", help="default: the one column that is neither pixels nor split")
    add("--shape", type=_parse_shape, metavar="CxHxW", help="of an image; default: 1 x a square")


def images(args: Namespace) -> None:
    """Decode image files: a folder with a sub-folder for each class, a CSV with a path and labels in each line, or a
    folder with another one of --masks."""
    from fastgpu.convert.images.readers import ImageFiles, ImageFolder, Kept, Masks
    from fastgpu.convert.reader import ReaderRows
    from fastgpu.convert.splits import split_rows
    from fastgpu.images.files import Preprocessing

    if args.keep_encoded and (args.masks or args.resize != "shorter" or (args.size and args.size[0] != args.size[1])):
        raise UserError("--keep-encoded takes --size SIDE, one number; drop --masks, --resize and --size HxW")
    if args.binary_masks and not args.masks:
        raise UserError("--binary-masks belongs to --masks")
    prepared: Preprocessing | Kept = Preprocessing(args.size, args.resize)
    if args.keep_encoded:
        prepared = Kept(args.size and args.size[0], args.quality)
    source = Path(args.source)
    reader: ImageFiles
    if source.is_dir() and args.split_by:
        raise UserError("--split-by is for a CSV; for a folder, name its sub-folders train, val and test")
    if args.masks:
        reader = Masks(source, args.masks, Preprocessing(args.size, args.resize), is_binary=args.binary_masks)
    elif source.is_dir():
        reader = ImageFolder(source, prepared)
    else:
        from fastgpu.convert.images.table_readers import ImageTable

        reader = ImageTable(
            source,
            prepared,
            columns=parse_columns(args.columns),
            split_by=args.split_by,
            n_classes=args.classes,
            root=args.root,
        )
    write(split_rows(ReaderRows(reader, args.on_error), reader.splits, args.split, args.seed), args)


def pixels(args: Namespace) -> None:
    """Read a CSV whose rows are images: a column for each pixel, or a column `pixels` of numbers between spaces."""
    from fastgpu.convert.images.table_readers import PixelTable
    from fastgpu.convert.reader import ReaderRows
    from fastgpu.convert.splits import split_rows

    reader = PixelTable(
        args.source,
        label=args.label,
        split_by=args.split_by,
        shape=args.shape,
        n_classes=args.classes,
    )
    write(split_rows(ReaderRows(reader), reader.splits, args.split, args.seed), args)


def _add_table_flags(parser: ArgumentParser) -> None:
    add_target(parser)
    add_split_flag(parser)
    add = parser.add_argument
    add("--split-by", type=str.strip, metavar="COLUMN", help="column of the CSV that says train, val or test")
    add("--classes", type=int, help="number of classes, if labels are numbers; default: highest + 1")


def _parse_quality(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 100:
        raise ArgumentTypeError(f"{text!r} is not a quality of JPEG files, 1 to 100")
    return int(text)


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
