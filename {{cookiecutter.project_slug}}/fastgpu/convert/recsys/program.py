"""What the command for users and items does."""

import numpy as np

from fastgpu.convert.arrays import load
from fastgpu.convert.program import write
from fastgpu.convert.recsys.command import Events
from fastgpu.convert.recsys.interactions import hold_out_users
from fastgpu.process.launch import UserError


def write_events(asked: Events) -> None:
    """Convert ratings, or a sparse matrix (users, items) of ones. Users are held out as Liang et al. (2018) do."""
    users, items = _read_matrix(asked.source) if asked.is_matrix else _read_table(asked)
    split = hold_out_users(asked.source, users, items, asked.held_out)
    if split.n_repeated:
        print(f"events that repeat an earlier one of the same user and item, and do not count: {split.n_repeated:,}")
    n_items = split.parts["train"].fields["items"].n_items
    print(f"{split.n_events:,} events of {split.n_users:,} users with 5 or more; training users have {n_items:,} items")
    for name in ("val", "test"):
        held_out = split.parts[name].lengths["held_out"]
        n_without = (held_out == 0).sum()
        print(f"{name}: {held_out.sum():,} items to be found; {n_without:,} of {len(held_out):,} users have none")
    write(split.parts, asked)


def _read_matrix(source: str) -> tuple[np.ndarray, np.ndarray]:
    """(users, items) of the places of a matrix."""
    matrix = load(source)
    if not hasattr(matrix, "indptr") or (matrix.data != 1).any():
        raise UserError(f"{source} is no sparse matrix of ones; save one, such as matrix = matrix > 3")
    return np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr)), matrix.indices


def _read_table(asked: Events) -> tuple[np.ndarray, np.ndarray]:
    """(users, items) of the lines of a CSV that count."""
    from fastgpu.convert.recsys.events import read_events  # polars is of the extra `convert`

    above = 3.5 if asked.above is None else asked.above
    users, items = read_events(asked.source, asked.column_names, above, has_header=not asked.no_header)
    counts = "events, which all count" if len(asked.column_names) == 2 else f"ratings are above {above:g}"
    print(f"{len(users):,} {counts}")
    return users, items
