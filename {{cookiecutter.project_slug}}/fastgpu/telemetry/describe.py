"""Decisions of a run as lines for a person."""

from fastgpu.feed.sizes import Sizes
from fastgpu.process.machine import format_bytes
from fastgpu.rows.contract import Source


def describe_feed(source: Source, sizes: Sizes, batch_size: int) -> str:
    """Where the rows are kept and in which portions they move. batch_size: over all ranks."""
    room = sizes.room
    readers = "worker processes" if sizes.uses_workers else "reader threads"
    return (
        f"{source.name}: {format_bytes(room.need)} with validation, on the {sizes.tier} tier (free for each rank: "
        f"{format_bytes(room.free_device)} on the device, {format_bytes(room.free_host)} in RAM)\n"
        f"batch size {batch_size} ({sizes.batch_size} on each rank), {sizes.pool_batches} batches in a pool, "
        f"{sizes.canonical_ranks} canonical ranks, {sizes.n_readers} {readers}"
    )
