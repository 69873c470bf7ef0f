"""NaN and infinity in the rows themselves, looked for once a loss is not finite: training pays nothing for it."""

from contextlib import closing, suppress

import torch

from fastgpu.dataset.source import DatasetSource
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Source
from fastgpu.rows.order import BlockSampler
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
    names = [name for name, field in source.fields.items() if field.dtype.kind == "f" and not field.is_ragged]
    if not names:
        return ""
    plans = order.pools(epoch, consumed.start)  # the reads in the plans of a Dataset are others
    with closing(make_feed(source, order, Placement("disk", torch.device("cpu"), 1), Loader(prefetch_pools=1))) as feed:
        for plan, rows in feed.pools(epoch, consumed.start):
            if not plan.is_last_pass:
                continue
            row_ids = order.row_ids(next(plans))[plan.n_skipped_rows :]
            for name in names:
                is_finite = rows[name].isfinite().reshape(len(rows), -1).all(1).numpy()
                if not is_finite.all():
                    return (
                        f"; {name} of {source.name} has NaN or infinity in {(~is_finite).sum():,} of {len(rows):,} "
                        f"rows around this step, such as row {_row_number(source, int(row_ids[~is_finite][0]))}: leave "
                        "such rows out, or replace the values"
                    )
            if plan.consumed > consumed.stop:  # it was in use
                break
    return ""


def _row_number(source: Source, row: int) -> int:
    """The number that a row has in the file or the Dataset of which `source` may be a part."""
    if isinstance(source, DatasetSource):
        return source.items.row_id(row)
    return int(source.row_ids[row]) if isinstance(source, Subset) else row
