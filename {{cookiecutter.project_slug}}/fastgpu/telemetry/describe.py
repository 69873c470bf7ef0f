"""The decisions of a run as lines for a person."""

from collections.abc import Mapping
from pathlib import Path

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


def describe_metrics(metrics: Mapping[str, float]) -> str:
    """`val/top1_pct 97.5, val/loss 0.0812`"""
    return ", ".join(f"{name} {value:.4g}" for name, value in metrics.items())


def describe_validation(folder: Path, step: int, metrics: Mapping[str, float]) -> str:
    """The result of a run that only validates. step: that of the checkpoint; 0: nothing was trained."""
    subject = f"{folder} at step {step}" if step else "a new, untrained model (run.resume=auto validates a trained one)"
    return f"{subject}: {describe_metrics(metrics)}"
