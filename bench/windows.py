"""The contenders of bench/run.py windows: samples that are neighbouring steps of a long array, as people read them.

Windows of 4 KiB are 2,048 tokens of uint16, those of 1 MiB are 16,384 steps of 16 floats. The steps are in one HDF5
dataset without chunks, and again in a flat file for `numpy.memmap`; the rows of one size are the same windows, written
one after the other. A baseline keeps the type of the file: what nanoGPT casts to int64 on the CPU, we cast on the GPU.
"""

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import h5py
import numpy as np
import ours
import torch
from data import DataSpec
from peers import Contender, Task
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

from fastgpu.feed import open_splits
from fastgpu.process.config import Data, LoaderConfig
from fastgpu.process.files import new_file

N_BYTES = {"4 KiB": 4 << 10, "1 MiB": 1 << 20}
"""{data set: bytes of a window}"""


def make(spec: DataSpec) -> None:
    """Write the files of a data set, as numbers that rise by one. They are kept if they exist."""
    length, *shape = spec.shape
    steps = _steps_of(spec.h5)
    if spec.h5.exists():
        return
    spec.folder.mkdir(parents=True, exist_ok=True)
    values = np.arange(spec.n_rows * math.prod(spec.shape)).astype(np.float32 if shape else np.uint16)
    values = values.reshape(-1, *shape)
    values.tofile(steps.with_suffix(".bin"))
    for path, rows in ((steps, values), (spec.h5, values.reshape(-1, length, *shape))):
        with new_file(path, replace=True) as partial_path, h5py.File(partial_path, "w") as file:
            file["x"] = rows


def _steps_of(h5: Path) -> Path:
    """The file of the steps, beside that of the rows."""
    return h5.with_name("steps.h5")


class Steps:
    """The steps of a task: their files, and the length of a window."""

    def __init__(self, task: Task):
        torch.set_num_threads(1)  # its idle threads would be counted as CPU time
        self.h5 = _steps_of(task.h5)
        self.flat = self.h5.with_suffix(".bin")
        with h5py.File(task.h5) as file:
            self.n_windows, self.length, *self.shape = file["x"].shape
            self.dtype = file["x"].dtype

    def open_h5(self) -> h5py.Dataset:
        """Each process opens the file for itself."""
        return h5py.File(self.h5)["x"]

    def open_flat(self) -> np.memmap:
        return np.memmap(self.flat, self.dtype, "r").reshape(-1, *self.shape)


def windows(task: Task, *, stride: int | None = None) -> Contender:
    """This project. stride: None for the length of a window."""
    steps = Steps(task)
    path = str(steps.h5)
    data = Data(train=path, val=path, fields={"x": "x"}, window=steps.length, stride=stride or steps.length)
    rows, _ = open_splits(data, LoaderConfig(), 0)
    feed = ours.open_feed(rows, task.batch_size)
    return Contender([steps.h5], lambda number: ((batch["x"],) for batch in ours.batches(feed, number)))


def rows_of_one_size(task: Task) -> Contender:
    """This project, with the same windows as rows of a file."""
    Steps(task)
    feed = ours.open_feed(ours.open_rows(task.h5, ("x",)), task.batch_size)
    return Contender([task.h5], lambda number: ((batch["x"],) for batch in ours.batches(feed, number)))


class Slices(Dataset):
    """A slice of h5py for each window, or those of a whole batch, read to their places in one array."""

    def __init__(self, steps: Steps):
        self.steps = steps
        self.data = cache(steps.open_h5)

    def __len__(self) -> int:
        return self.steps.n_windows

    def __getitem__(self, number: int | list[int]) -> Tensor:
        length = self.steps.length
        if isinstance(number, int):
            return torch.from_numpy(self.data()[number * length : (number + 1) * length])
        out = np.empty((len(number), length, *self.steps.shape), self.steps.dtype)
        for place, each in enumerate(number):
            self.data().read_direct(out[place], np.s_[each * length : (each + 1) * length])
        return torch.from_numpy(out)


def slices(task: Task, *, by_batch: bool = False) -> Contender:
    """A DataLoader of h5py slices. by_batch: a worker is asked for a batch, not for each of its windows."""
    dataset = Slices(Steps(task))
    batches = BatchSampler(RandomSampler(dataset), task.batch_size, drop_last=True)
    options = {"num_workers": task.n_workers, "persistent_workers": task.n_workers > 0}
    if by_batch:
        loader = DataLoader(dataset, sampler=batches, batch_size=None, **options)
    else:
        loader = DataLoader(dataset, batch_sampler=batches, **options)
    return Contender([dataset.steps.h5], lambda number: ((batch,) for batch in loader))


def memmap(task: Task, *, stays_open: bool) -> Contender:
    """Windows that begin anywhere, drawn with replacement and copied in the loop.

    As nanoGPT does it, the memmap is made again for each batch, because the memory of its process would grow. Or it
    stays open, and a batch is one copy.
    """
    steps = Steps(task)
    data = steps.open_flat().view(np.ndarray)

    def batch() -> Tensor:
        starts = torch.randint(len(data) - steps.length + 1, (task.batch_size,)).tolist()
        if stays_open:
            return torch.from_numpy(np.stack([data[start : start + steps.length] for start in starts]))
        again = steps.open_flat()
        return torch.stack([torch.from_numpy(again[start : start + steps.length].copy()) for start in starts])

    def epoch(number: int) -> Iterator[tuple[Tensor]]:
        for _ in range(steps.n_windows // task.batch_size):
            yield (batch(),)

    return Contender([steps.flat], epoch)


OURS = "windows, stride of a length"
OVERLAPPING = "windows, stride of 1"
ROWS = "rows of one size"
SLICES = "h5py slices, workers"
OPEN = "memmap that stays open"
CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    OURS: windows,
    OVERLAPPING: partial(windows, stride=1),
    ROWS: rows_of_one_size,
    SLICES: slices,
    "h5py slices, workers, by batch": partial(slices, by_batch=True),
    "memmap of each batch": partial(memmap, stays_open=False),
    OPEN: partial(memmap, stays_open=True),
}
