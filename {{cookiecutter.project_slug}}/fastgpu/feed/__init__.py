"""From a source of rows to pools on the device, ahead of the training loop.

sources.py   opens the rows that the config names
tiers.py     rows that are kept on the device, in host memory or on disk, with the same batches
sizes.py     a value for each `auto` that says how the rows move
readers.py   the work of reader threads, and where their time goes
prefetch.py  the feeder, staging memory and the copy stream
loader.py    what the training loop knows of all this: the batches of an epoch
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
