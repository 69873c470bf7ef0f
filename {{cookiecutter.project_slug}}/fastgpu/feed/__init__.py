"""Moves rows from a source to pools on the device, ahead of the training loop.

sources.py   opens the rows that the config names
tiers.py     rows that stay on the device, in host memory or on disk, with the same batches
sizes.py     chooses a value for each `auto` that decides how rows move
readers.py   the work of reader threads, and an account of their time
prefetch.py  the feeder, staging memory and the copy stream
loader.py    the interface to the training loop: the batches of an epoch
"""

from fastgpu.feed.loader import Loader, PoolLoader
from fastgpu.feed.prefetch import PrefetchLoader, bottleneck
from fastgpu.feed.sizes import describe, resolve_auto
from fastgpu.feed.sources import Splits, open_rows, open_splits
from fastgpu.feed.tiers import ResidentRows, open_loader
from fastgpu.storage.remote import counters

__all__ = [
    "Loader",
    "PrefetchLoader",
    "ResidentRows",
    "Splits",
    "bottleneck",
    "counters",
    "describe",
    "open_loader",
    "open_rows",
    "open_splits",
    "resolve_auto",
]
