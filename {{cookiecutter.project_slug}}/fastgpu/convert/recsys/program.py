"""The command for users and items."""

from argparse import Namespace

import numpy as np

from fastgpu.convert.arrays import load
from fastgpu.convert.commands import write
from fastgpu.convert.recsys.interactions import hold_out_users
from fastgpu.process.launch import UserError


def events(args: Namespace) -> None:
    """Convert ratings, or a sparse matrix (users, items) of ones. Users are held out as Liang et al. (2018) do."""
    users, items = _read_matrix(args) if args.source.endswith(".npz") else _read_table(args)
    split = hold_out_users(args.source, users, items, args.held_out)
    if split.n_repeated:
        print(f"events that repeat an earlier one of the same user and item, and do not count: {split.n_repeated:,}")
    n_items = split.parts["train"].fields["items"].n_items
    print(f"{split.n_events:,} events of {split.n_users:,} users with 5 or more; training users have {n_items:,} items")
    for name in ("val", "test"):
        held_out = split.parts[name].lengths["held_out"]
        n_without = (held_out == 0).sum()
        print(f"{name}: {held_out.sum():,} items to be found; {n_without:,} of {len(held_out):,} users have none")
    write(split.parts, args)


def _read_matrix(args: Namespace) -> tuple[np.ndarray, np.ndarray]:
    """(users, items) of the places of a matrix."""
    if args.columns or args.above is not None or args.no_header:
        raise UserError(
            "--columns, --above and --no-header are for a CSV; of a matrix, keep what counts: matrix = matrix > 3"
        )
    matrix = load(args.source)
    if not hasattr(matrix, "indptr") or (matrix.data != 1).any():
        raise UserError(f"{args.source} is no sparse matrix of ones; save one, such as matrix = matrix > 3")
    return np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices


def _read_table(args: Namespace) -> tuple[np.ndarray, np.ndarray]:
    """(users, items) of the lines of a CSV that count."""
    from fastgpu.convert.recsys.events import read_events  # polars is of the extra `convert`

    columns = (args.columns or ("1,2,3" if args.no_header else "userId,movieId,rating")).split(",")
    if args.above is not None and len(columns) == 2:
        raise UserError(f"--above is {args.above:g}, but --columns, {args.columns}, names no ratings; drop it")
    above = 3.5 if args.above is None else args.above
    users, items = read_events(args.source, columns, above, has_header=not args.no_header)
    print(f"{len(users):,}", "events, which all count" if len(columns) == 2 else f"ratings are above {above:g}")
    return users, items
