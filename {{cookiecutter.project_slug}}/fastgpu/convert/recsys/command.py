"""The command for users and items."""

from dataclasses import dataclass
from functools import partial

from fastgpu.convert.command import WriteCommand, natural
from fastgpu.process.commands import argument, flag
from fastgpu.process.launch import UserError
from fastgpu.process.tools import check_exist


@dataclass(frozen=True, kw_only=True)
class Events(WriteCommand):
    """Write users and the items they like, split as Liang et al. (2018) do.

    python convert.py events ml-20m.zip data/ml-20m.h5
    """

    source: str = argument("MovieLens as published, a CSV file, or a sparse matrix of ones (.npz)")
    seed: int = flag("seed of the order; the split has that of the paper", type=natural, default=0, metavar="N")
    no_header: bool = flag("the first line is a row; columns are called 1, 2, ...", default=False)
    above: float | None = flag("count ratings above this; default: 3.5", metavar="RATING")
    held_out: int = flag(
        "users for val, and as many for test; default: 10,000",
        type=partial(natural, lowest=1),
        default=10_000,
        metavar="N",
    )
    columns: str | None = flag(
        "of the CSV; default: userId,movieId,rating; a fourth is the time. Or two: each line counts", metavar="NAMES"
    )

    @property
    def is_matrix(self) -> bool:
        """Whether the source is a sparse matrix."""
        return self.source.endswith(".npz")

    @property
    def column_names(self) -> list[str]:
        """The columns of the CSV that are read."""
        return (self.columns or ("1,2,3" if self.no_header else "userId,movieId,rating")).split(",")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.is_matrix and (self.columns or self.above is not None or self.no_header):
            cure = "of a matrix, keep what counts: matrix = matrix > 3"
            raise UserError(f"--columns, --above and --no-header are for a CSV; {cure}")
        if self.above is not None and len(self.column_names) == 2:
            raise UserError(f"--above is {self.above:g}, but --columns, {self.columns}, names no ratings; drop it")
        check_exist(self.source)

    def run(self) -> None:
        from fastgpu.convert.arrays import read_ones
        from fastgpu.convert.program import write
        from fastgpu.convert.recsys.interactions import hold_out_users

        if self.is_matrix:
            users, items = read_ones(self.source)
        else:
            from fastgpu.convert.recsys.events import read_events  # polars is of the extra `convert`

            above = 3.5 if self.above is None else self.above
            users, items = read_events(self.source, self.column_names, above, has_header=not self.no_header)
            counts = "events, which all count" if len(self.column_names) == 2 else f"ratings are above {above:g}"
            print(f"{len(users):,} {counts}")
        split = hold_out_users(self.source, users, items, self.held_out)
        if n := split.n_repeated:
            print(f"events that repeat an earlier one of the same user and item, and do not count: {n:,}")
        n_items = split.parts["train"].fields["items"].n_items
        kept = f"{split.n_events:,} events of {split.n_users:,} users with 5 or more"
        print(f"{kept}; training users have {n_items:,} items")
        for name in ("val", "test"):
            held_out = split.parts[name].lengths["held_out"]
            n_without = (held_out == 0).sum()
            print(f"{name}: {held_out.sum():,} items to be found; {n_without:,} of {len(held_out):,} users have none")
        write(split.parts, self)


COMMANDS = {"events": Events}
