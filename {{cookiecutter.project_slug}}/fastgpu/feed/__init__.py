"""From a source of rows to pools on the device, ahead of the training loop.

sources.py   opens the source that the config names
sizes.py     a number for every `auto` that says how rows move
tiers.py     rows that are kept on the device, in host memory or on disk, with the same batches
prefetch.py  reader threads, staging memory and the copy stream
data.py      the rows of a training, in words
loader.py    what the training loop knows of all this: the batches of an epoch
"""

from fastgpu.feed.data import Data
from fastgpu.feed.loader import Loader, Passes, PoolLoader
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.feed.sizes import Sizes, choose_sizes
from fastgpu.feed.sources import open_splits
from fastgpu.feed.tiers import ResidentLoader, open_loaders

__all__ = [
    "Data",
    "Loader",
    "Passes",
    "PoolLoader",
    "PrefetchLoader",
    "ResidentLoader",
    "Sizes",
    "choose_sizes",
    "open_loaders",
    "open_splits",
]
