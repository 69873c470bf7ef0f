"""What the training loop knows about data: a loader gives the batches of an epoch, on the device.

`Loader` is all that train.py asks for, so whatever has these four members can take its place: a torch DataLoader, FFCV,
DALI. `PoolLoader` is what the loaders of this package have in common: they read pools (many batches, which are shuffled
and copied together) and cut them into batches, once or several times.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple, Protocol

import torch

from fastgpu.process.seeds import make_seed
from fastgpu.rows.contract import Dataset, Pool, PoolPlan
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged, Rows


class Loader(Protocol):
    """The batches of one rank. Every rank has a loader, and calls it alike."""

    @property
    def fingerprint(self) -> Mapping[str, object]:
        """What decides which rows a step of an epoch trains on, as JSON values. A run that was saved inside an epoch is
        resumed only with the same. World sizes that see the same global batches have the same."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Rows]:
        """The batches of an epoch from step `start` on: on the device, in training order, each valid until the next.

        There are `steps_per_epoch` of them on every rank. The last ones of a validation may be short, or empty.
        """

    def steps_per_epoch(self, epoch: int) -> int:
        """The number of batches of that epoch, which is the same on every rank."""

    def close(self) -> None:
        """End threads and processes. It is safe to call this twice."""


class Passes(NamedTuple):
    """How often a loader gives its rows."""

    echo: float = 1.0
    """Passes over each pool; 2.5 means 2, 3, 2, 3, ..."""
    n_epochs: int = sys.maxsize
    """Number of epochs of the run. Nothing is read ahead for an epoch after the last."""


ONE_PASS = Passes()


class PoolLoader(ABC):
    """A `Loader` that reads pools.

    Data echoing (Choi et al., arXiv:1907.05550) trains on each pool several times, reshuffled each time. If reading a
    batch takes R times as long as training on it, training on each batch R times costs no time. In the paper echoed
    batches were worth almost as much as fresh ones up to a factor of about 4 with random augmentation, less without.
    """

    def __init__(self, order: BlockSampler, passes: Passes, rows: Dataset):
        """rows: those that `fingerprint` names."""
        self.order = order
        self.rows = rows
        self._milli_echo = round(1000 * passes.echo)
        self._n_epochs = passes.n_epochs

    @property
    def fingerprint(self) -> Mapping[str, object]:
        """See `Loader`. A digest of the rows is read, so only what needs it asks for it."""
        return {**self.order.fingerprint, "echo": self._milli_echo / 1000, "content": self.rows.fingerprint}

    @abstractmethod
    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        """The pools of an epoch, beginning with that number. Rows are valid until the next pool is asked for."""

    @abstractmethod
    def close(self) -> None:
        """See `Loader`."""

    def batches(self, epoch: int, start: int = 0) -> Iterator[Rows]:
        """See `Loader`."""
        number = 0  # of the pool that has step `start`
        while number < self.order.pools_per_epoch and start >= self.steps_on_pool(epoch, number):
            start -= self.steps_on_pool(epoch, number)
            number += 1
        for pool in self.pools(epoch, number):
            yield from islice(self.echo(pool), start, None)
            start = 0

    def steps_per_epoch(self, epoch: int) -> int:
        """See `Loader`."""
        n_pools = self.order.pools_per_epoch
        n_passes = self._passes_before((epoch + 1) * n_pools) - self._passes_before(epoch * n_pools)
        n_missing = self.order.pool_batches - self.order.batches_in(n_pools - 1)  # from the last pool
        return n_passes * self.order.pool_batches - self._passes(epoch, n_pools - 1) * n_missing

    def steps_on_pool(self, epoch: int, number: int) -> int:
        """The number of batches that `echo` gives for that pool."""
        return self._passes(epoch, number) * self.order.batches_in(number)

    def echo(self, pool: Pool) -> Iterator[Rows]:
        """The batches of a pool: first views of it, in order; then copies, reshuffled for each further pass."""
        size, n_rows, n_real = self.order.batch_size, pool.plan.n_rows, pool.plan.n_real_rows
        for begin in range(0, n_rows, size):  # padding, which lies at the end of a pool, is cut off
            yield pool.rows.slice(min(begin, n_real), min(begin + size, n_real))
        has_ragged = any(isinstance(column, Ragged) for column in pool.rows.columns.values())
        device = torch.device("cpu") if has_ragged else pool.rows.device  # the host has to know the sizes of batches
        # The 1 keeps this seed apart from that of the step with the same number.
        seed = make_seed(self.order.seed, pool.plan.epoch, pool.plan.number, self.order.rank, 1)
        rng = torch.Generator(device).manual_seed(seed)
        for _ in range(self._passes(pool.plan.epoch, pool.plan.number) - 1):
            order = torch.randperm(n_rows, generator=rng, device=device)
            yield from map(pool.rows.take, order.split(size))

    def _plans(self, epoch: int, first_pool: int) -> Iterator[PoolPlan]:
        """The pools to read: those of an epoch, beginning with that number, and of all epochs after it."""
        yield from self.order.pools(epoch, first_pool)
        for later in range(epoch + 1, self._n_epochs):
            yield from self.order.pools(later)

    def _passes(self, epoch: int, number: int) -> int:
        """How many times that pool is trained on."""
        number += epoch * self.order.pools_per_epoch
        return self._passes_before(number + 1) - self._passes_before(number)

    def _passes_before(self, number: int) -> int:
        """Passes over all pools of a run before that one: exact in the mean, and no state that has to be saved."""
        return number * self._milli_echo // 1000
