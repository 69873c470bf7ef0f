"""From a source of rows to pools on the device, ahead of the training loop.

sources.py   opens the source that the config names
sizes.py     a number for every `auto` that says how rows move
tiers.py     rows that are kept on the device, in host memory or on disk, with the same batches
prefetch.py  reader threads, staging memory and the copy stream
echo.py      the batches of a pool, once or several times
"""

from fastgpu.feed.echo import echo
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.feed.sizes import Sizes, choose_sizes
from fastgpu.feed.sources import open_splits
from fastgpu.feed.tiers import Feed, ResidentLoader, open_loaders

__all__ = ["Feed", "PrefetchLoader", "ResidentLoader", "Sizes", "choose_sizes", "echo", "open_loaders", "open_splits"]
