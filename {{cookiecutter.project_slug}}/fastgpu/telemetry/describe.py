"""The decisions of a run as lines for a person."""

from fastgpu.feed.sizes import Sizes
from fastgpu.process.machine import format_bytes
from fastgpu.rows.contract import Source


def describe_feed(source: Source, sizes: Sizes, batch_size: int) -> str:
    """Where the rows are kept and in which portions they move. batch_size: over all ranks."""
    room = sizes.room
    free_device = format_bytes(room.free_device)
    free_host = format_bytes(room.free_host)
    readers = "worker processes" if sizes.uses_workers else "reader threads"
    return (
        f"rows: {source.name}, {format_bytes(room.need)} with the validation rows, kept on the {sizes.tier} tier "
        f"(each rank has {free_device} free on its device and {free_host} in RAM)\n"
        f"batches: {batch_size} rows over all ranks, {sizes.batch_size} on each; {sizes.pool_batches} batches in a "
        f"pool; {sizes.canonical_ranks} canonical ranks; {readers} on each rank: {sizes.n_readers}"
    )
