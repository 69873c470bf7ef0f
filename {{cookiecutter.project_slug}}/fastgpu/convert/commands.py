"""
Files, arrays and Datasets:

python convert.py arrays images=x.npy labels=y.npy train.h5         NumPy arrays, sparse matrices of scipy; --split 0.9
python convert.py dataset mine:Photos photos/ train.h5              a torch Dataset of your own, decoded once
python convert.py repack old-*.h5 train.h5                          HDF5 files -> one that is read fastest
python convert.py info train.h5                                     rows, classes, layout, and what would be faster
python convert.py check train.h5                                    whether blocks are damaged, and which
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fastgpu.convert.command_line import Commands, add_command, add_split_flag, add_target, write
from fastgpu.process.launch import UserError

if TYPE_CHECKING:
    from fastgpu.rows.contract import Dataset

DATASET_FIELDS = {"images": "images", "labels": "labels"}
"""Fields of a Dataset, if --fields does not name them."""


def add_commands(commands: Commands) -> None:
    """Add the commands of this module."""
    help_text = "name=file.npy, file.npz, name=matrix.npz or name=file.h5::/dataset"
    parser = add_command(commands, arrays, help_text, many=True)
    add_target(parser)
    add_split_flag(parser)
    parser.add_argument("--layout", choices=("nhwc",), help="of fields with four axes: write them as (N, C, H, W)")

    parser = add_command(commands, dataset, "package.module:Class, a map-style torch Dataset")
    parser.add_argument("path", help="what the class is called with, such as a folder")
    add_target(parser)
    parser.add_argument("--fields", nargs="+", default=[], metavar="NAME=FIELD", help="default: images and labels")

    parser = add_command(commands, repack, "file.h5, file.h5::/group or a quoted glob pattern", many=True)
    add_target(parser)
    parser.add_argument("--fields", nargs="+", default=[], metavar="NAME=DATASET", help="default: all datasets")

    add_command(commands, info, "file.h5 or file.h5::/group", many=True)
    add_command(commands, check, "file.h5 or file.h5::/group", many=True)


def arrays(args: Namespace) -> None:
    """Write arrays of equal length, one for each field of the rows.

    A source is name=file.npy, file.npz, name=matrix.npz of scipy.sparse, or name=file.h5::/dataset.
    """
    from fastgpu.convert.array_files import open_arrays
    from fastgpu.convert.splits import split_rows

    source = open_arrays(args.source, channels_last=args.layout == "nhwc")
    write(split_rows(source, {}, args.split, args.seed), args)


def dataset(args: Namespace) -> None:
    """Write the items of a torch Dataset, which is called with PATH."""
    from fastgpu.dataset.source import open_dataset

    source = open_dataset("SOURCE", args.path, _parse_fields(args) or DATASET_FIELDS, factory=args.source)
    source.name = f"{args.source} called with {args.path}"
    write({"": source}, args)


def repack(args: Namespace) -> None:
    """Write the rows of HDF5 files anew."""
    from fastgpu.storage.store import expand

    sources = {Path(file).resolve() for path in args.source for file, _ in expand("SOURCE", path)}
    if len(sources) > 1 and args.target.resolve() in sources:  # so that its old rows would be in it again
        raise UserError(f"{args.target} is one of the {len(sources)} files of SOURCE; choose another name")
    write({"": _open_files(args.source, _parse_fields(args))}, args)


def _parse_fields(args: Namespace) -> dict[str, str]:
    for pair in args.fields:
        if "=" not in pair:
            raise UserError(f"--fields is {pair}; it should be NAME=DATASET, such as images=x")
    return dict(pair.split("=", 1) for pair in args.fields)


def _open_files(paths: Sequence[str], fields: dict[str, str]) -> "Dataset":
    """Checksums are verified if all fields have them. fields: empty for all datasets of the group."""
    from fastgpu.convert.summary import columns_of, fields_of
    from fastgpu.storage.store import expand, open_store

    file, group = expand("SOURCE", paths[0])[0]
    columns = columns_of(f"{file}::{group}")
    group = group.strip("/")
    groups = {name.strip("/"): fields_of_group for name, fields_of_group in fields_of(columns).items()}
    if group not in groups and not fields:
        names = ", ".join(f"/{name}" for name in sorted(groups)) or "no numbers"
        raise UserError(f"{paths[0]} has no rows in /{group}, but {names}; name one: file.h5::/group")
    is_checked = True
    for column in columns:
        own_group = column.group.strip("/")
        if group in (own_group, own_group.rpartition("/")[0]):  # ragged rows lie one group deeper than the others
            is_checked &= column.has_digests
    fields = fields or groups[group]
    for name in fields:
        if f"{name}_values" in fields:  # a matrix: without its values, opening it says what gets lost
            open_store("SOURCE", paths, {name: fields[name]})
    return open_store("SOURCE", paths, fields, verify=is_checked)


def info(args: Namespace) -> None:
    """Show what files hold, how their rows lie, and what would make reading faster."""
    from fastgpu.convert.summary import advise, columns_of, describe_rows, fields_of
    from fastgpu.feed.sizes import auto_pool_rows, class_order_warning
    from fastgpu.storage.file import split_group
    from fastgpu.storage.store import open_store

    for path in args.source:
        columns = columns_of(path)
        print(path)
        for column in columns:
            print(f"  {column}")
        advice = advise(columns)
        file = split_group(path)[0]
        for group, fields in sorted(fields_of(columns).items()):
            try:
                source = open_store("FILE", f"{file}::{group}", fields)
            except UserError as error:
                advice.append(str(error).removeprefix("FILE: "))
                continue
            if group != "/":
                print(f"  {group}")
            print(*describe_rows({"": source}), sep="\n")
            if problem := class_order_warning(source, auto_pool_rows(source)):
                advice.append(problem)
        for text in advice:
            print(f"  advice: {text}")


def check(args: Namespace) -> int:
    """Read files, count the damaged blocks and list the first of them. The exit code is 1 if there is one."""
    from fastgpu.convert.messages import list_first
    from fastgpu.convert.summary import columns_of, damaged
    from fastgpu.convert.writing import progress_bar

    exit_code = 0
    for path in args.source:
        columns = columns_of(path)
        with progress_bar(sum(column.nbytes for column in columns), "B") as bar:
            damages = damaged(path, args.threads, bar.update)
        exit_code |= bool(damages)
        verdict = f"{len(damages):,} blocks are damaged" if damages else "whole"
        print(*filter(None, [list_first(damages, "\n")]), f"{path}: {verdict}", sep="\n")
        for column in columns:
            if not column.has_digests:
                print(f"  {column.path} was read, but has no checksums; `python convert.py repack` writes them")
    return exit_code
