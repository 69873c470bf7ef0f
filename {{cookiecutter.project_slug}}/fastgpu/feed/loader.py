"""The interface between data and training loop: a loader yields the batches of an epoch, in order and on the device.

train.py uses the four members of `Loader`. Any object with these members can replace the loaders of this project, for
example a class around a torch DataLoader, FFCV or DALI.

The loaders of this project read pools. A pool is many batches, which are read, shuffled and copied to the device as a
whole, and then cut into views. `PoolLoader` cuts pools; its two subclasses read pools from files (prefetch.py), or
gather them from rows that stay on the device (tiers.py).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Protocol

import torch
from torch import Tensor

from fastgpu.process.seeds import make_seed
from fastgpu.rows.contract import Dataset, Pool, PoolPlan
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged, Rows


class Loader(Protocol):
    """The batches of one rank. As with a DistributedSampler, every rank has a loader and takes a part of each batch.

    A step, counted from 0 in each epoch, trains on one batch: the rows of all micro-batches of gradient accumulation.
    """

    @property
    def fingerprint(self) -> Mapping[str, object]:
        """All values that decide the rows of a batch: seed, batch size, a fingerprint of the rows, ...

        JSON values, the same on every rank, and for all world sizes that see the same global batches. A run that was
        saved inside an epoch is resumed only if these values have not changed.
        """

    def steps_per_epoch(self, epoch: int) -> int:
        """Number of batches in this epoch, the same on every rank, since each step averages the gradients of all ranks.

        `batches` has to yield exactly this number: the position of a run depends on it.
        """

    def batches(self, epoch: int, start: int = 0) -> Iterator[Rows]:
        """The batches of this epoch on the device, from step `start` on, where a run is resumed.

        A validation is an epoch of its loader. Validations are numbered over the run, inside epochs or not. A batch is
        valid until the next batch is asked for: clone tensors that you keep. Batches to train on have equal numbers of
        rows; the last batches of a validation may have fewer rows, or none.
        """

    def close(self) -> None:
        """End the threads and processes that read. It is safe to call this twice."""


class PoolLoader(Loader):
    """A `Loader` that reads pools, and cuts each into batches once or several times.

    Data echoing (Choi et al., arXiv:1907.05550): if reading a batch takes R times as long as training on it, training R
    times on each batch costs no time. In the paper, echoed batches were worth almost as much as fresh batches up to a
    factor of about 4 with random augmentation, and less without.
    """

    def __init__(self, source: Dataset, sampler: BlockSampler, echo: float = 1.0):
        """sampler: plans the pools. echo: passes over each pool; 2.5 means 2, 3, 2, 3, ...

        Raises ValueError if `echo` is above 1 and the sampler may give batches that are not full.
        """
        self.source = source
        self.sampler = sampler
        self._milli_echo = round(1000 * echo)
        if self._milli_echo > 1000 and not sampler.drop_last:
            raise ValueError("an echo above 1 needs full batches: use a sampler with drop_last=True")

    @property
    def fingerprint(self) -> Mapping[str, object]:
        return {
            **self.sampler.fingerprint,
            **self.source.cut,
            "echo": self._milli_echo / 1000,
            "content": self.source.fingerprint,
        }

    def prepare(self) -> None:
        """Read the rows that stay in memory, if there are any and they were not read yet. `pools` calls this, too."""

    @abstractmethod
    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        """The pools of an epoch from `first_pool` on. A pool is valid until the next pool is asked for."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Rows]:
        # Prepare now, and not in the first `next`: the loop would count that time as waiting.
        self.prepare()
        # Find the pool of step `start`, and the number of its steps that are done.
        number = 0
        while number < self.sampler.pools_per_epoch and start >= self.steps_on_pool(epoch, number):
            start -= self.steps_on_pool(epoch, number)
            number += 1
        return islice(chain.from_iterable(map(self.echo, self.pools(epoch, number))), start, None)

    def steps_per_epoch(self, epoch: int) -> int:
        sampler = self.sampler
        n_pools = sampler.pools_per_epoch
        # The last pool of an epoch may be smaller.
        n_missing = sampler.pool_batches - sampler.batches_in(n_pools - 1)
        return self._passes(epoch, 0, n_pools) * sampler.pool_batches - self._passes(epoch, n_pools - 1) * n_missing

    def steps_on_pool(self, epoch: int, number: int) -> int:
        """Number of batches that `echo` makes of this pool."""
        return self._passes(epoch, number) * self.sampler.batches_in(number)

    def echo(self, pool: Pool) -> Iterator[Rows]:
        """The batches of a pool. The first pass yields views; each further pass shuffles the pool and yields copies."""
        size, n_rows, n_real = self.sampler.batch_size, pool.plan.n_rows, pool.plan.n_real_rows
        for begin in range(0, n_rows, size):
            # Cut off the padding at the end of the pool.
            yield pool.rows.slice(min(begin, n_real), min(begin + size, n_real))
        # The sizes of ragged batches depend on the order, and the host has to know them.
        has_ragged = any(isinstance(column, Ragged) for column in pool.rows.columns.values())
        device = torch.device("cpu") if has_ragged else pool.rows.device
        for places in self._new_orders(pool.plan, device):
            yield from map(pool.rows.take, places.split(size))

    def _new_orders(self, plan: PoolPlan, device: torch.device) -> Iterator[Tensor]:
        """(n_rows,) places of a pool, shuffled again for each pass after the first pass.

        Each canonical rank shuffles its own places. So every batch keeps its number of rows of each canonical rank, and
        the global batches are the same for every number of ranks.
        """
        n_more = self._passes(plan.epoch, plan.number) - 1
        if not n_more:  # without an echo, batches may be short
            return
        n_ranks = self.sampler.canonical_ranks // self.sampler.num_replicas
        ranks = range(self.sampler.rank * n_ranks, (self.sampler.rank + 1) * n_ranks)
        # The 1 distinguishes these seeds from the seeds of steps.
        seeds = [make_seed(self.sampler.seed, plan.epoch, plan.number, rank, 1) for rank in ranks]
        rngs = [torch.Generator(device).manual_seed(seed) for seed in seeds]
        places = torch.arange(plan.n_rows, device=device).view(-1, n_ranks, self.sampler.batch_size // n_ranks)
        by_rank = places.transpose(0, 1)
        places_of_ranks = by_rank.reshape(n_ranks, -1)
        for _ in range(n_more):
            orders = [torch.randperm(places_of_ranks.shape[1], generator=rng, device=device) for rng in rngs]
            shuffled = places_of_ranks.gather(1, torch.stack(orders))
            yield shuffled.view_as(by_rank).transpose(0, 1).flatten()

    def _passes(self, epoch: int, number: int, n_pools: int = 1) -> int:
        """Passes over `n_pools` pools from this one on, which follow from its number in the run: no state is saved."""
        start = epoch * self.sampler.pools_per_epoch + number
        return (start + n_pools) * self._milli_echo // 1000 - start * self._milli_echo // 1000
