"""NaN and infinity in the rows themselves, looked for once a loss is not finite: training pays nothing for it."""

from contextlib import closing, suppress

import torch
from torch import Tensor

from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import PoolPlan, Source
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged
from fastgpu.storage.dataset import DatasetSource
from fastgpu.storage.subset import Subset


def explain_not_finite(source: Source, order: BlockSampler, epoch: int, consumed: range, *, world: World) -> str:
    """Which rows of a part of an epoch have values that are not finite, and what to do about it; empty if none has.

    consumed: where the part begins and ends, as in `PoolPlan.consumed`. The pool behind it, which is in use, belongs to
    it, too. Each rank reads its own rows again. Every rank calls this together, and gets the same text.
    """
    own = ""
    with suppress(OSError, UserError):  # the loss is what is to be told, not a file that cannot be read again
        own = _find(source, order, epoch, consumed)
    is_found = world.all_gather(float(bool(own)))
    return world.broadcast(own, source=is_found.index(1.0)) if any(is_found) else ""


def _find(source: Source, order: BlockSampler, epoch: int, consumed: range) -> str:
    names = [name for name, field in source.fields.items() if field.dtype.kind == "f"]
    if not names:
        return ""
    placement = Placement("disk", torch.device("cpu"), 1)
    with closing(make_feed(source, order, placement, Loader(prefetch_pools=1))) as feed:
        for pool in feed.pools(epoch, consumed.start):
            for name in names:
                rows = _rows_not_finite(pool.rows[name])
                if len(rows):
                    row = _row_number(source, order, pool.plan, int(rows[0]))
                    return (
                        f"; {name} of {source.name} has NaN or infinity in {len(rows):,} of {len(pool.rows):,} rows "
                        f"around this step, such as row {row}: leave such rows out, or replace the values"
                    )
            if pool.plan.consumed > consumed.stop:  # it was in use
                break
    return ""


def _rows_not_finite(column: Tensor | Ragged) -> Tensor:
    """(n,) the rows that have a value that is not finite."""
    if isinstance(column, Ragged):
        return column.rows[~column.values.isfinite()].unique()
    return (~column.isfinite()).reshape(len(column), -1).any(1).nonzero().flatten()


def _row_number(source: Source, order: BlockSampler, plan: PoolPlan, place: int) -> int:
    """The number that a person knows: the row of the file or of the Dataset at a place of a pool."""
    start = plan.number * order.pool_batches * order.global_batch_size
    whole_plan = next(order.pools(plan.epoch, start))  # the plan of a Dataset has other reads
    row = int(order.row_ids(whole_plan)[plan.n_skipped_rows + place])
    if isinstance(source, DatasetSource):
        return source.items.row_id(row)
    return int(source.row_ids[row]) if isinstance(source, Subset) else row
