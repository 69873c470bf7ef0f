"""The commands for images."""

from argparse import Namespace
from pathlib import Path

from fastgpu.convert.commands import write
from fastgpu.convert.images.readers import ImageFolder, ImageTable, Masks, PixelTable
from fastgpu.images.parts import Preprocessing
from fastgpu.process.launch import UserError


def images(args: Namespace) -> None:
    """Decode image files: of a folder for each class, of a CSV, or with masks."""
    source = Path(args.source)
    if source.is_file() and source.suffix.lower() in (".zip", ".tar", ".tgz", ".gz"):
        raise UserError(f"{source} is an archive; unpack it and name the folder")
    idle = "columns split_by no_header" if source.is_dir() else "masks"
    idle += " masks resize" if args.keep_encoded else ""
    idle += "" if args.masks else " binary_masks masks_fit"
    if given := [f"--{name.replace('_', '-')}" for name in idle.split() if getattr(args, name)]:
        raise UserError(f"{given[0]} has no meaning for {source} with these flags; drop it")
    if args.keep_encoded and args.size and args.size[0] != args.size[1]:
        raise UserError("--size should be one number, of the shorter side, with --keep-encoded")
    how = {"prepared": Preprocessing(args.size, args.resize or "shorter"), "encoded": args.keep_encoded}
    if args.masks:
        write(Masks(source, args.masks, is_binary=args.binary_masks, drawn_on=args.masks_fit, **how), args)
    elif source.is_dir():
        write(ImageFolder(source, **how), args)
    else:
        columns = (args.columns or ("1,2" if args.no_header else "path,label")).split(",")
        write(ImageTable(source, columns=columns, split_by=args.split_by, has_header=not args.no_header, **how), args)


def pixels(args: Namespace) -> None:
    """Read a CSV whose rows are images."""
    write(PixelTable(args.source, label=args.label, split_by=args.split_by, has_header=not args.no_header), args)
