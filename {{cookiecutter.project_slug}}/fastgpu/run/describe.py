"""The decisions of a run as lines for a person."""

from collections.abc import Mapping

import numpy as np

from fastgpu.feed.sizes import Sizes
from fastgpu.process.machine import format_bytes
from fastgpu.rows.contract import Source
from fastgpu.rows.mixture import Mixture
from fastgpu.rows.order import BlockSampler

MAX_GROUPS_SHOWN = 5
"""Number of sources or classes that are listed one by one."""


def describe_feed(source: Source, sizes: Sizes, order: BlockSampler) -> str:
    """Where the rows are kept, in which portions they move, and how many of them an epoch has."""
    room = sizes.room
    free_device = format_bytes(room.free_device)
    free_host = format_bytes(room.free_host)
    readers = "worker processes" if sizes.uses_workers else "reader threads"
    text = (
        f"rows: {source.name}, {format_bytes(room.need)} with the validation rows, kept on the {sizes.tier} tier "
        f"(each rank has {free_device} free on its device and {free_host} in RAM)\n"
        f"batches: {order.global_batch_size} rows over all ranks, {sizes.batch_size} on each; "
        f"{sizes.pool_batches} batches in a pool; {sizes.canonical_ranks} canonical ranks; "
        f"{readers} on each rank: {sizes.n_readers}"
    )
    if source.around_page_cache and sizes.tier == "disk":
        text += "\nfiles: larger than the free memory, so they are read around the page cache (O_DIRECT)"
    if source.decoding:
        text += f"\nimages: {source.decoding}"
        if source.stored is not source and sizes.tier == "disk":
            text += "; pixels do not stay in memory, because epochs take other ones"
    if source.mixture:
        text += f"\neach epoch: {_describe_mixture(source.mixture, order.total_size)}"
    elif order.total_size < len(source):
        text += f"\neach epoch: {order.total_size:,} of {len(source):,} rows; the rest does not fill a batch"
    return text


def _describe_mixture(mixture: Mixture, epoch_rows: int) -> str:
    """How many rows of each group an epoch has."""
    turns = mixture.turns(epoch_rows)
    passes = turns / np.bincount(mixture.groups)
    if len(turns) > MAX_GROUPS_SHOWN:
        kind = "sources" if mixture.by_block else "classes"
        return (
            f"{epoch_rows:,} rows, {turns.min():,} to {turns.max():,} of each of {len(turns):,} {kind} "
            f"({passes.min():.3g} to {passes.max():.3g} passes)"
        )
    groups = zip(mixture.names, turns.tolist(), passes.tolist(), strict=True)
    return ", ".join(f"{n_turns:,} rows of {name} ({n_passes:.3g} passes)" for name, n_turns, n_passes in groups)


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """`val/top1_pct 97.5, val/loss 0.0812`"""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())
