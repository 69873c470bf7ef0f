"""The three tiers: rows stay on the device, stay in host memory, or are read from disk in each epoch.

All tiers give the same batches, bit for bit.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import torch

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed.loader import PoolLoader
from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.process.config import Config, Data, LoaderConfig, Tier
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import format_bytes, free_host_bytes
from fastgpu.rows.contract import Dataset, Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import MAX_VALUES, Rows
from fastgpu.storage.arrays import ArrayDataset

RESIDENT_SHARE = 0.5
"""Share of the free memory that data.tier=auto fills with rows. The rest is for the model and its gradients."""


MAX_BATCH_ROWS = 1 << 18
"""Maximum number of rows in a batch while resident rows are read. It limits batches of tiny rows, such as tokens."""


class Memory(NamedTuple):
    """The memory of a rank, in bytes: what all rows need, and what is free on its device and on the host."""

    need: int
    device: int
    host: int

    def describe(self, tier: str) -> str:
        """The memory that the rows need, where they are kept, and the free memory, in words."""
        kept = {"device": "kept on the device", "host": "kept in RAM", "disk": "read from disk"}[tier]
        text = f"{format_bytes(self.host)} in RAM"
        if self.device != self.host:  # the device is not the CPU
            text = f"{format_bytes(self.device)} on its device, {text}"
        return f"{format_bytes(self.need)} for all rows, {kept}; free for each rank: {text}"


def measure_memory(sources: Sequence[Dataset], device: torch.device, n_local: int) -> Memory:
    """The memory of this rank. n_local: number of ranks that share the memory of this machine."""
    host = free_host_bytes() // n_local
    on_device = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else host
    wholes = dict.fromkeys(source.whole or source for source in sources)
    need = sum(int(whole.block_rows.sum()) * whole.row_bytes for whole in wholes)
    return Memory(need, on_device, host)


def choose_tier(data: Data, sources: Sequence[Dataset], memory: Memory) -> Tier:
    """The tier of this rank. auto: the fastest tier with twice as much free memory as the rows need.

    Ranks may have different tiers, because all tiers give the same batches. sources: the training rows, then the
    validation rows. Raises UserError if the rows cannot be kept as asked.
    """
    tier, train = data.tier, sources[0]
    if tier == "disk":
        return tier
    reason = next(filter(None, (_why_not_kept(source, data) for source in sources)), "")
    free: Mapping[Tier, int] = {"device": memory.device, "host": memory.host}
    if tier == "auto":
        may_stay = not reason and not isinstance(train, ItemDataset)  # its items may be random in each epoch
        return next((each for each in free if may_stay and memory.need <= RESIDENT_SHARE * free[each]), "disk")
    if memory.need > free[tier]:
        reason = f"{train.name} needs {format_bytes(memory.need)} a rank and {format_bytes(free[tier])} are free"
    if reason:
        raise UserError(f"data.tier is {tier}, but {reason}; use data.tier=disk")
    if isinstance(train, ItemDataset):
        warn(
            f"data.tier is {tier}: the items of {train.name} are read once, so their random numbers are the same "
            "in each epoch; data.tier=disk reads them in each epoch"
        )
    return tier


def _why_not_kept(source: Dataset, data: Data) -> str:
    """The reason why the rows cannot stay on the device or the host. Empty: they can."""
    if source.decoding and data.min_crop_scale < 1:
        return f"each epoch decodes other parts of the images of {source.name} (data.min_crop_scale)"
    for name, field in source.fields.items():
        if field.is_ragged and name not in source.stored_lengths:
            return f"the lengths of {name} of {source.name} are unknown until they are read"
        if field.is_ragged and source.stored_lengths[name].sum(dtype=np.int64) > MAX_VALUES:
            return f"{source.name} has more than {MAX_VALUES:,} values of {name}"
    return ""


class ResidentRows:
    """All rows of a run, in memory that its loaders share: on the device or the host. Empty on the disk tier.

    The memory is allocated now, and filled when a loader is first asked for rows, so that run.check=true is quick.
    """

    def __init__(self, sources: Sequence[Dataset], cfg: Config, device: torch.device):
        """sources: of all loaders. Subsets of one Dataset share its rows. device: where the batches are needed."""
        self.device = device
        self._loader = one_ahead(cfg.loader)
        self._rows: dict[Dataset, Rows] = {}
        home = device if cfg.data.tier == "device" else torch.device("cpu")
        for whole in dict.fromkeys(source.whole or source for source in sources) if cfg.data.tier != "disk" else ():
            n_rows = int(whole.block_rows.sum())  # includes rows that are not selected
            self._rows[whole] = Rows.empty(whole.fields, n_rows, home, lengths=whole.stored_lengths)
        self._unread = list(self._rows)

    def rows(self, source: Dataset) -> Rows:
        """The stored rows of this Dataset, or of the full Dataset if it is a subset. They are filled by `load`."""
        return self._rows[source.whole or source]

    def load(self) -> None:
        """Read the rows of all sources that were not read yet."""
        while self._unread:
            _read_all(self._unread[0], self._rows[self._unread[0]], self._loader)
            del self._unread[0]


def one_ahead(loader: LoaderConfig) -> LoaderConfig:
    """The settings with one pool read ahead, which saves memory."""
    return loader.model_copy(update={"prefetch_pools": 1})


def _read_all(source: Dataset, rows: Rows, loader: LoaderConfig) -> None:
    """Read all rows of the files in their order. Two pools of host memory are enough."""
    # A batch of 4 MiB is one request to a worker of a Dataset. The plan of a pool has a number for each of its rows.
    batch_size = min(len(rows), max(1, (4 << 20) // source.row_bytes), MAX_BATCH_ROWS)
    sampler = BlockSampler(source.block_rows, batch_size, pool_batches=16, seed=None)
    start = 0
    with closing(PrefetchLoader(source, sampler, rows.device, loader, n_epochs=1)) as feed:
        for plan, part in feed.pools(0):
            rows.slice(start, start + plan.n_real_rows).copy_(part.slice(0, plan.n_real_rows))
            start += plan.n_real_rows


class ResidentLoader(PoolLoader):
    """A loader of rows that stay on the device. One gather makes a pool; no row is read from disk or host memory."""

    def __init__(self, memory: ResidentRows, source: Dataset, sampler: BlockSampler, echo: float):
        super().__init__(source, sampler, echo)
        self._memory = memory
        self._rows = memory.rows(source)
        # Memory for one pool is enough, because the kernels that fill and use it run in order.
        self._pool = Rows.empty(source.fields, sampler.max_pool_rows, self._rows.device)

    def prepare(self) -> None:
        self._memory.load()

    def pools(self, epoch: int, first_pool: int = 0) -> Iterator[Pool]:
        self.prepare()
        for plan in self.sampler.pools(epoch, first_pool):
            for name, lengths in self.source.stored_lengths.items():
                self._pool.make_room(name, int(lengths[plan.row_ids].sum(dtype=np.int64)))
            yield Pool(plan, self.source.gather(plan, self._rows, self._pool))

    def close(self) -> None:
        """There are no threads or processes to end."""


class HostLoader(PrefetchLoader):
    """A loader of rows that stay in host memory. Pools are copied from there to the device, ahead of the loop."""

    def __init__(
        self,
        memory: ResidentRows,
        source: Dataset,
        sampler: BlockSampler,
        loader: LoaderConfig,
        *,
        echo: float,
        n_epochs: int,
    ):
        whole = source.whole or source
        kept = ArrayDataset(source.name, memory.rows(source).numpy(), block_rows=whole.block_rows, fields=whole.fields)
        super().__init__(source.over(kept), sampler, memory.device, loader, echo=echo, n_epochs=n_epochs)
        self.source = source  # the fingerprint is of the rows in the files, not of the arrays
        self._memory = memory

    def prepare(self) -> None:
        self._memory.load()


def open_loader(source: Dataset, sampler: BlockSampler, memory: ResidentRows, cfg: Config) -> PoolLoader:
    """A loader of these rows on the tier of the config. cfg: without `auto`. memory: made with the same config."""
    echo, loader = cfg.data.echo, cfg.loader
    is_validation = not sampler.shuffle
    if is_validation:  # it takes each row once, and one pool ahead is enough
        echo, loader = 1.0, one_ahead(loader)
    if cfg.data.tier == "device":
        return ResidentLoader(memory, source, sampler, echo)
    # If steps decide when the run ends or validates, the last epoch or validation is not known in advance. The pools
    # that were read ahead of the end are then lost.
    by_steps = cfg.train.steps or (cfg.train.validate_every_steps and is_validation)
    n_epochs = sys.maxsize if by_steps else cfg.train.epochs
    if is_validation and len(cfg.data.val_sets) > 1:
        n_epochs = 0  # do not read ahead to the next validation, so that only the set in use has threads
    if cfg.data.tier == "host":
        return HostLoader(memory, source, sampler, loader, echo=echo, n_epochs=n_epochs)
    return PrefetchLoader(source, sampler, memory.device, loader, echo=echo, n_epochs=n_epochs)
