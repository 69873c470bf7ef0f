"""
Users and the items they like:

python convert.py events ml-20m.zip ml-20m.h5                       -> ml-20m-train.h5, ml-20m-val.h5, ml-20m-test.h5
python convert.py arrays items=matrix.npz x.h5 --held-out 1000      a sparse matrix, split in the same way
"""

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING

from fastgpu.convert import commands as files
from fastgpu.convert.command_line import Commands, add_command, add_target, parse_columns, write
from fastgpu.process.launch import UserError

if TYPE_CHECKING:
    from fastgpu.convert.recsys.interactions import HeldOutSplit

COLUMNS = "userId,movieId,rating"


def add_commands(commands: Commands) -> None:
    """Add the commands of this module, and --held-out to `arrays`."""
    parser = add_command(commands, events, "ratings.csv, ratings.dat or u.data, or the zip file that holds it")
    add_target(parser)
    parser.add_argument("--above", type=float, help="count ratings above this; default: 3.5")
    parser.add_argument("--held-out", type=int, default=10_000, help="users for validation, and as many for the test")
    text = f"columns of the CSV; default: {COLUMNS}. USER,ITEM: without ratings, so that each line counts"
    parser.add_argument("--columns", default=COLUMNS, help=text)

    parser = commands.choices["arrays"]
    parser.set_defaults(run=arrays)
    text = "for a sparse matrix: rows for validation, and as many for the test"
    parser.add_argument("--held-out", type=int, help=text)


def events(args: Namespace) -> None:
    """Convert MovieLens as published (the ratings, or the zip file that holds them), or a CSV of whole numbers.

    Users are held out as Liang et al. (2018) do.
    """
    from fastgpu.convert.recsys.events import read_events
    from fastgpu.convert.recsys.interactions import hold_out_users

    columns = parse_columns(args.columns)
    if args.above is not None and len(columns) == 2:
        raise UserError(f"--above is {args.above:g}, but --columns, {args.columns}, names no ratings; drop it")
    above = 3.5 if args.above is None else args.above
    users, items = read_events(Path(args.source), columns, above)
    print(f"{len(users):,}", "events, which all count" if len(columns) == 2 else f"ratings are above {above:g}")
    _write_split(hold_out_users(args.source, users, items, args.held_out), args)


def arrays(args: Namespace) -> None:
    """The command `arrays`, with --held-out."""
    if not args.held_out:
        files.arrays(args)
        return
    import numpy as np

    from fastgpu.convert.array_files import KEEP_LIKES, open_arrays
    from fastgpu.convert.recsys.interactions import hold_out_users

    source = open_arrays(args.source)
    first_field = next(iter(source.fields))
    if list(source.lengths) != [first_field]:
        raise UserError(f"--held-out is for one sparse matrix of ones: items=matrix.npz; {KEEP_LIKES}")
    if others := [name for name in source.fields if name != first_field]:
        raise UserError(
            f"--held-out is for a matrix alone, without {', '.join(others)}: it deals the rows anew; the field user of "
            "the files has the row of the matrix, by which you can look up other arrays"
        )
    if args.split:
        raise UserError("--split and --held-out do not go together: --held-out says how many rows val and test have")
    rows = source.ragged(first_field)
    users = np.repeat(np.arange(len(rows)), np.diff(rows.offsets))
    _write_split(hold_out_users(source.name, users, rows.values, args.held_out), args)


def _write_split(split: "HeldOutSplit", args: Namespace) -> None:
    if split.n_repeated:
        print(f"events that repeat an earlier one of the same user and item, and do not count: {split.n_repeated:,}")
    n_train_items = split.parts["train"].fields["items"].n_items
    counts = f"{split.n_events:,} events of {split.n_users:,} users with 5 or more, {split.n_items:,} items"
    print(f"{counts}; {n_train_items:,} of the training users")
    for name in ("val", "test"):
        n_hidden = split.parts[name].lengths["held_out"]
        n_without = (n_hidden == 0).sum()
        print(f"{name}: {n_hidden.sum():,} items to be found; {n_without:,} of {len(n_hidden):,} users have none")
    write(split.parts, args)
