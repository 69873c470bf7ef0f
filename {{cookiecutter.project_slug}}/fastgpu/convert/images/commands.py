"""The commands for images."""

from argparse import Namespace
from pathlib import Path

from fastgpu.convert.commands import write
from fastgpu.convert.images.readers import ImageFiles, ImageFolder, Masks
from fastgpu.convert.splits import split_rows
from fastgpu.images.parts import Preprocessing
from fastgpu.process.launch import UserError


def images(args: Namespace) -> None:
    """Decode image files: of a folder for each class, of a CSV, or with masks."""
    source = Path(args.source)
    size = args.size
    if args.keep_encoded and size and size[0] != size[1]:
        raise UserError("--size should be one number, of the shorter side, with --keep-encoded")
    _refuse(args, "masks resize" if args.keep_encoded else "", "with --keep-encoded")
    _refuse(args, "" if args.masks else "binary_masks", "without --masks")
    _refuse(args, "columns split_by" if source.is_dir() else "masks", f"for {source}")
    prepared = Preprocessing(size, args.resize or "shorter")
    reader: ImageFiles
    if args.masks:
        reader = Masks(source, args.masks, prepared, is_binary=args.binary_masks)
    elif source.is_dir():
        reader = ImageFolder(source, prepared, encoded=args.keep_encoded)
    else:
        from fastgpu.convert.images.table_readers import ImageTable  # polars is of the extra `convert`

        columns = (args.columns or "path,label").split(",")
        reader = ImageTable(source, prepared, columns=columns, split_by=args.split_by, encoded=args.keep_encoded)
    write(split_rows(reader, args.split, args.seed), args)


def _refuse(args: Namespace, names: str, where: str) -> None:
    """Raise UserError if one of these flags is given."""
    for name in names.split():
        if getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} has no meaning {where}; drop it")


def pixels(args: Namespace) -> None:
    """Read a CSV whose rows are images."""
    from fastgpu.convert.images.table_readers import PixelTable

    reader = PixelTable(args.source, label=args.label, split_by=args.split_by)
    write(split_rows(reader, args.split, args.seed), args)
