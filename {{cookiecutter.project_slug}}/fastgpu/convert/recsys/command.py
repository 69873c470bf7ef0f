"""The command for users and items."""

from argparse import ArgumentTypeError
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from fastgpu.convert.command import WriteCommand, is_parquet, natural, shares
from fastgpu.process.commands import argument, flag
from fastgpu.process.launch import UserError
from fastgpu.process.tools import check_exist

if TYPE_CHECKING:  # NumPy comes after what can be wrong without it
    from fastgpu.convert.recsys.interactions import Split

MIN_ITEMS = 5
HELD_OUT = 10_000


def moments(text: str) -> tuple[float, ...] | tuple[str, ...]:
    """Shares of train, val and, if given, test; or the times at which training and, if given, validation end."""
    words = text.split(",")
    with suppress(ValueError):
        if any(0 < float(word) < 1 for word in words):
            return shares(text)
    for word in words:
        try:
            float(word)
        except ValueError:
            with suppress(ValueError):
                datetime.fromisoformat(word)
                continue
            allowed = "a share, 0.9, shares, 0.8,0.1,0.1, a date, 2026-01-31, or two dates"
            raise ArgumentTypeError(f"{text} should be {allowed}") from None
    if len(words) > 2:
        raise ArgumentTypeError(f"{text} has {len(words)} times; it should be the end of training, and of validation")
    return tuple(words)


@dataclass(frozen=True, kw_only=True)
class Events(WriteCommand):
    """Write users and the items they like, split by users or by time.

    Some users are held out, as Liang et al. (2018) do, unless --split-by-time or
    --leave-last-out is given. Items of a user are in the order of time, if there
    is one. Ids are whole numbers or text, and predict.py answers in them.

    python convert.py events ml-20m.zip data/ml-20m.h5
    python convert.py events r.csv x.h5 --columns u,i,,t --split-by-time 0.9
    """

    source: str = argument(
        "a CSV, Parquet (or a quoted pattern), MovieLens as published, or a sparse matrix of ones (.npz)"
    )
    seed: int = flag("seed of the order; the split has the seed of the paper", type=natural, default=0, metavar="N")
    no_header: bool = flag("the first line is a row; columns are called 1, 2, ...", default=False)
    columns: str | None = flag(
        "USER,ITEM,RATING,TIME; default: userId,movieId,rating, and timestamp if there is one. USER,ITEM, or an empty "
        "RATING: each line counts",
        metavar="NAMES",
    )
    above: float | None = flag("count ratings above this; default: 3.5", metavar="RATING")
    unrated: Literal["refuse", "drop", "keep"] | None = flag(
        "events without a rating, or with one below 0 if --above is not: refuse them (default), leave them out, or "
        "count them as liked"
    )
    repeats: Literal["last", "first", "all"] | None = flag(
        "which event counts if a user has an item several times; default: last, by time"
    )
    min_items: int = flag(
        "leave out users with fewer items; default: 5, at least 3 with --leave-last-out",
        type=partial(natural, lowest=1),
        default=MIN_ITEMS,
        metavar="N",
    )
    held_out: int | None = flag(
        "users for val, and as many for test; default: 10,000", type=partial(natural, lowest=1), metavar="N"
    )
    split_by_time: tuple[float, ...] | tuple[str, ...] | None = flag(
        "share of the liked events for training, or the time at which training ends (a date, or a number as in the "
        "column); two times, or 0.8,0.1,0.1: also a test file",
        type=moments,
        metavar="TIME",
    )
    leave_last_out: bool = flag("test is the last item of each user, val the item before the last one", default=False)

    @property
    def is_matrix(self) -> bool:
        """Whether the source is a sparse matrix."""
        return self.source.endswith(".npz")

    @property
    def column_names(self) -> list[str]:
        """The columns that are read."""
        return (self.columns or ("1,2,3" if self.no_header else "userId,movieId,rating")).split(",")

    @property
    def has_ratings(self) -> bool:
        """Whether a column of ratings is read."""
        return len(self.column_names) > 2 and bool(self.column_names[2].strip())

    def __post_init__(self) -> None:
        super().__post_init__()
        of_tables = (self.columns, self.above, self.unrated, self.repeats, self.split_by_time)
        if self.is_matrix and (any(each is not None for each in of_tables) or self.no_header or self.leave_last_out):
            found = "has neither ratings nor times: only --held-out and --min-items choose what is written of it"
            raise UserError(f"{self.source} {found}; keep what counts: matrix = matrix > 3")
        if self.no_header and is_parquet(self.source):
            raise UserError(f"--no-header is for a CSV; the columns of {self.source} have names")
        if not self.has_ratings:
            for name, value in (("--above", self.above), ("--unrated", self.unrated)):
                if value is not None:
                    raise UserError(f"{name} is {value}, but --columns, {self.columns}, names no ratings; drop it")
        splits = {
            "--held-out": self.held_out is not None,
            "--split-by-time": self.split_by_time is not None,
            "--leave-last-out": self.leave_last_out,
        }
        if len(given := [name for name, is_given in splits.items() if is_given]) > 1:
            raise UserError(f"{' and '.join(given)} are different splits; drop one")
        check_exist(self.source)

    def run(self) -> None:
        from fastgpu.convert.broken import in_order
        from fastgpu.convert.program import write

        broken: dict[int, str] = {}
        split = self._split_matrix() if self.is_matrix else self._split_table(broken)
        print(*split.found, sep="\n")
        write(split.parts, self, left_out=in_order(broken))

    def _split_matrix(self) -> "Split":
        from fastgpu.convert.arrays import read_ones
        from fastgpu.convert.recsys.interactions import hold_out_users
        from fastgpu.convert.recsys.log import number

        log = number(self.source, *read_ones(self.source))
        return hold_out_users(log, self.held_out or HELD_OUT, min_items=self.min_items)

    def _split_table(self, broken: dict[int, str]) -> "Split":
        """broken: {row: reason}, to which broken rows are added."""
        from fastgpu.convert.broken import in_order, refuse_broken
        from fastgpu.convert.recsys.events import read_events  # polars is of the extra `convert`
        from fastgpu.convert.recsys.interactions import hold_out_users
        from fastgpu.convert.recsys.log import describe_repeats, settle
        from fastgpu.convert.recsys.splits import find_cuts, leave_last_out, split_by_time

        above = 3.5 if self.above is None else self.above
        unrated, repeats = self.unrated or "refuse", self.repeats or "last"
        how: dict[str, Any] = {"unrated": unrated, "has_header": not self.no_header, "broken": broken}
        log, clock, found, n_rows = read_events(self.source, self.column_names, above, **how)
        refuse_broken(in_order(broken), n_rows, self.on_error, None if self.dry_run else self.target)
        print(*found, sep="\n", flush=True)
        kind = "time" if self.split_by_time else "last" if self.leave_last_out else "users"
        if clock is None and kind != "users":
            name = "--split-by-time" if kind == "time" else "--leave-last-out"
            raise UserError(f"{name} needs times: name their column as the fourth of --columns")
        log = replace(log, facts={**log.facts, "repeats": repeats, "split": kind})
        if self.split_by_time and clock:
            cuts = find_cuts(log, clock, self.split_by_time)
            return split_by_time(log, cuts, clock, repeats=repeats, min_items=self.min_items)
        settled = settle(log, repeats)
        for line in describe_repeats([settled], repeats, clock.name if clock else ""):
            print(line)
        if self.leave_last_out:
            return leave_last_out(settled.log, min_items=self.min_items)
        return hold_out_users(settled.log, self.held_out or HELD_OUT, min_items=self.min_items)


COMMANDS = {"events": Events}
