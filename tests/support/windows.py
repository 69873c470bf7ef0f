"""Files of steps that carry their numbers, the windows that a feed gives, and plain slices of h5py to compare with."""

import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
from numpy.typing import DTypeLike

from fastgpu.feed.sources import open_splits
from fastgpu.process.config import Data, LoaderConfig, Tier
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from support.rows import open_feed

SEED = 5
Columns = dict[str, np.ndarray]


class Series(NamedTuple):
    """Recordings in files."""

    train: str | list[str] | dict[str, float]
    """What data.train names."""
    recordings: list[Columns]
    """{field: (steps, *shape)} of each recording, in the order of the files, as h5py reads them."""

    @property
    def fields(self) -> dict[str, str]:
        return {name: name for name in self.recordings[0]}


def steps_of(numbers: Sequence[int] | range, dtype: DTypeLike = "u4", shape: tuple[int, ...] = ()) -> np.ndarray:
    """(steps, *shape): the first value of a step is a function of its number, which rises, and the others follow it."""
    n_values = math.prod(shape)
    values = np.asarray(numbers)[:, None] * n_values + np.arange(n_values)
    return values.astype(dtype).reshape(-1, *shape)


def write_series(path: Path, lengths: Sequence[int], *, start: int = 0, **options: Any) -> Series:
    """A file with a group g0, g1, ... for each recording; of one recording, the datasets are not in a group.

    `x` is uint32 (steps,), and `y`, which is kept in memory, uint8 (steps, 2). start: the number of the first step.
    options: of h5py, for x.
    """
    names = [f"g{number}" for number in range(len(lengths))] if len(lengths) > 1 else ["/"]
    with h5py.File(path, "w") as file:
        for name, length in zip(names, lengths, strict=True):
            group = file.require_group(name)
            chunks = {"chunks": (min(options["chunks"][0], length),)} if "chunks" in options else {}
            group.create_dataset("x", data=steps_of(range(start, start + length)), **options | chunks)
            group["y"] = steps_of(range(start, start + length), "u1", (2,))
            start += length
    return read_series([f"{path}::/{name}" for name in names] if len(names) > 1 else str(path))


def write_ragged_series(path: Path, lengths: Sequence[int], dtype: DTypeLike = "u4", **options: Any) -> Series:
    """A file with the ragged field `x`, whose rows are the recordings. options: of h5py, for its values."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x/values", data=steps_of(range(sum(lengths)), dtype), **options)
        file["x/indptr"] = indptr = np.cumsum([0, *lengths])
    with h5py.File(path) as file:
        return Series(str(path), [{"x": values} for values in np.split(file["x/values"][:], indptr[1:-1])])


def read_series(train: str | list[str] | dict[str, float], names: Sequence[str] = ("x", "y")) -> Series:
    """The recordings of files, or of groups of files, read by h5py."""
    recordings = []
    for each in [train] if isinstance(train, str) else train:
        path, _, group = each.partition("::")
        with h5py.File(path) as file:
            recordings.append({name: file[group or "/"][name][:] for name in names})
    return Series(train, recordings)


def open_windows(series: Series, length: int, stride: int = 0, **data: Any) -> tuple[Dataset, Dataset]:
    """The windows to train on and those to validate on, by default of the same files. data: of that section."""
    settings = {"train": series.train, "val": series.train, "fields": series.fields} | data
    if isinstance(settings["val"], dict):
        settings["val"] = list(settings["val"])  # weights are those of training
    train, sets = open_splits(Data(window=length, stride=stride, **settings), LoaderConfig(num_readers=2), SEED)
    return train, sets["val"]


def read_epochs(
    source: Dataset, epochs: Sequence[int], tier: Tier = "disk", *, seed: int | None = SEED, batch_size: int = 8
) -> list[Columns]:
    """All windows of each epoch, {field: (windows, length, *shape)}: none is left out. seed: None for validation."""
    sampler = BlockSampler(source, batch_size, pool_batches=5, seed=seed, drop_last=False)
    windows = []
    with closing(open_feed(source, sampler, tier, n_epochs=max(epochs) + 1)) as feed:  # none is read ahead
        for epoch in epochs:
            parts = []
            for pool in feed.pools(epoch):
                rows = pool.rows.slice(0, pool.plan.n_real_rows)
                parts.append({name: column.clone().numpy() for name, column in rows.columns.items()})
            windows.append({name: np.concatenate([part[name] for part in parts]) for name in source.fields})
    return windows


def read_windows(source: Dataset, epoch: int = 0, tier: Tier = "disk", *, seed: int | None = SEED) -> Columns:
    """The windows of one epoch, see `read_epochs`."""
    return read_epochs(source, [epoch], tier, seed=seed)[0]


def global_batches(
    source: Dataset,
    n_ranks: int = 1,
    tier: Tier = "disk",
    *,
    at: tuple[int, int] = (0, 0),
    sizes: tuple[int, int] = (16, 8),
    echo: float = 1.0,
) -> list[Columns]:
    """The batches of an epoch, joined over the ranks, each of which reads for itself.

    at: the epoch, and the step to begin with. sizes: windows of a global batch, and canonical ranks.
    """
    batch_size, canonical_ranks = sizes
    of_ranks = []
    for rank in range(n_ranks):
        sampler = BlockSampler(source, batch_size // n_ranks, Shard(rank, n_ranks, canonical_ranks), 3, seed=SEED)
        with closing(open_feed(source, sampler, tier, echo=echo)) as feed:
            of_ranks.append(
                [{name: batch[name].clone().numpy() for name in source.fields} for batch in feed.batches(*at)]
            )
    return [
        {name: np.concatenate([part[name] for part in parts]) for name in source.fields}
        for parts in zip(*of_ranks, strict=True)
    ]


def same(some: Sequence[Columns], others: Sequence[Columns]) -> bool:
    """Whether batches are equal, bit for bit."""
    pairs = list(zip(some, others, strict=True))
    return all(a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a) for a, b in pairs)


def places_of(windows: Mapping[str, np.ndarray], series: Series) -> np.ndarray:
    """(windows, 2): the number of the recording of each window, and the step of the recording at which it begins.

    The place is read from the first value of x. Fails if a window is not, in each field, the slice of h5py of this
    recording that begins there: so no window crosses from one recording to the next.
    """
    firsts = [each["x"].reshape(len(each["x"]), math.prod(each["x"].shape[1:]))[:, 0] for each in series.recordings]
    numbers = np.concatenate(firsts)
    ends = np.cumsum([*map(len, firsts)])
    n_windows, length = windows["x"].shape[:2]
    begins = np.searchsorted(numbers, windows["x"].reshape(n_windows, -1)[:, 0])
    recordings = np.searchsorted(ends, begins, "right")
    assert (begins + length <= ends[recordings]).all(), "a window crosses from one recording to the next"
    for name, rows in windows.items():
        steps = np.concatenate([each[name] for each in series.recordings])
        assert rows.dtype == steps.dtype.newbyteorder("=")
        np.testing.assert_array_equal(rows, steps[begins[:, None] + np.arange(length)], f"{name} is no slice of h5py")
    before = ends - [*map(len, firsts)]
    return np.stack([recordings, begins - before[recordings]], axis=1)


def used_steps(windows: Mapping[str, np.ndarray]) -> set[int]:
    """The numbers of all steps of these windows, if `x` has one value for each step."""
    return set(np.unique(windows["x"]).tolist())
