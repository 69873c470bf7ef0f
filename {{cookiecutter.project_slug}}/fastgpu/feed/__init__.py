"""From a source of rows to pools on the device, ahead of the training loop.

sources.py   opens the source that the config names
sizes.py     the rows of a training, and a number for every `auto` that says how they move
tiers.py     rows that are kept on the device, in host memory or on disk, with the same batches
prefetch.py  reader threads, staging memory and the copy stream
loader.py    what the training loop knows of all this: the batches of an epoch
"""

from fastgpu.feed.loader import Loader, Passes, PoolLoader
from fastgpu.feed.prefetch import PrefetchLoader, bottleneck
from fastgpu.feed.sizes import Data, Sizes, choose_sizes
from fastgpu.feed.sources import Splits, open_splits
from fastgpu.feed.tiers import open_loaders
from fastgpu.storage.remote import counters
