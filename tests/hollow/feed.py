"""Takes the pools of a PrefetchLoader, for tests of its events. Run it in the folder of a project.

Only the clones of the first epoch are kernels, so in the second one the loop is far ahead of the copies.
"""

from contextlib import closing

import numpy as np
import torch

from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.process.config import LoaderConfig
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.arrays import ArrayDataset

N_ROWS = 4096
source = ArrayDataset("numbers", {"number": np.arange(N_ROWS)})
sampler = BlockSampler(source.block_rows, 64, pool_batches=4, seed=0)
loader = LoaderConfig(num_readers=2, prefetch_pools=1)
feed = PrefetchLoader(source, sampler, torch.device("cuda"), loader, n_epochs=2)
with closing(feed):
    numbers = [pool.rows["number"].clone() for pool in feed.pools(0)]
    for _ in feed.pools(1):
        pass
assert sorted(torch.cat(numbers).tolist()) == list(range(N_ROWS))
