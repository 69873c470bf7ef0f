"""Windows of long series: a row is `length` neighbouring steps of a recording, such as tokens, hours or frames.

The dataset below the windows has a row for each step. A recording is a file, a group, or a row of a ragged field; no
window crosses from one recording to the next. A recording has P = steps - length + 1 places where a window can begin,
and an epoch has n = ceil(P / stride) windows of each recording:

    in order of the file   at 0, stride, 2 * stride, ...
    shuffled               at (j * P + v) // n for j = 0 ... n - 1, with v drawn from 0 ... P - 1 for each epoch

So in training, windows begin at most a stride apart and never twice at the same place, and every place has the same
chance. Each step is read about length / stride times in an epoch, and over many epochs all possible windows occur.
"""

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from fastgpu.process.launch import UserError, warn
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import Field, Ragged, Rows, to_device
from fastgpu.rows.selection import Runs
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.file import scratch
from fastgpu.storage.layout import BLOCK_BYTES, MIN_BLOCKS
from fastgpu.storage.part import Recordings
from fastgpu.storage.store import HDF5Dataset, open_store

OVERLAP_BYTES = 128 << 10
"""Minimum size of a block of overlapping windows. Blocks get smaller as the overlap grows, since neighbours look alike:
a pool then has blocks from thousands of places."""
CHUNKS_PER_BLOCK = 4
"""A block has the windows of about this many compressed chunks. Reading it decodes one chunk more, at its end."""
MAX_BLOCKS = 10_000_000
"""Maximum number of blocks: planning them takes a second, and more would need gigabytes of memory."""
MAX_WINDOWS = 1 << 31
"""Maximum number of windows in an epoch: the squares of their numbers fit into 64 bits."""
LONG_WINDOW_BYTES = 16 << 10
"""Windows of this size or more are copied one by one. Shorter windows of a block are read together, then cut."""
Steps = HDF5Dataset | ArrayDataset
"""A dataset with steps as rows."""


class WindowDataset(Dataset):
    """Windows of a dataset with steps as rows."""

    def __init__(self, steps: Steps, recordings: Recordings, length: int, stride: int):
        """recordings: of the steps. Recordings that are shorter than a window have no windows.

        Raises UserError if all recordings are shorter, or if there are too many windows.
        """
        n_places = recordings.runs.counts - length + 1
        if not (n_places > 0).any():
            raise UserError(
                f"{steps.name}: data.window is {length}, but its longest recording has "
                f"{recordings.runs.counts.max(initial=0):,} steps; use longer ones, or a smaller window"
            )
        n_steps = int(recordings.runs.counts.sum())
        self.recordings = recordings.part(recordings.runs.starts, np.where(n_places > 0, recordings.runs.counts, 0))
        """The recordings that have room for a window."""
        self.steps = self.whole = steps
        self.length, self.stride = length, stride
        self.cut = {"window": length, "stride": stride}
        self.attributes = steps.attributes
        self.fields = {name: _window_of(field, length) for name, field in steps.fields.items()} | recordings.fields
        self._n_places = n_places[n_places > 0]
        self._n_windows = -(-self._n_places // stride)
        self._whole, self._rest = np.divmod(self._n_places, self._n_windows)
        self._first_rows = np.cumsum(self._n_windows) - self._n_windows
        n_windows = int(self._n_windows.sum())
        self._shifts = lru_cache(2)(self._draw_shifts)
        self.name = f"{steps.name} ({n_windows:,} windows of {n_steps:,} steps)"
        size = self._windows_per_block(n_windows)
        n_blocks = int((-(-self._n_windows // size)).sum())
        if n_windows > MAX_WINDOWS or n_blocks > MAX_BLOCKS:
            raise UserError(
                f"{self.name}: data.stride is {stride}, which makes {n_blocks:,} blocks of windows; an epoch has at "
                f"most {MAX_WINDOWS:,} windows in {MAX_BLOCKS:,} blocks: use a larger data.stride, as each epoch "
                "begins its windows elsewhere"
            )
        self.block_rows = _cut_blocks(self._n_windows, size)

    def _windows_per_block(self, n_windows: int) -> int:
        unit_rows = self.steps.unit_rows
        chunk_bytes = unit_rows * self.steps.row_bytes
        read_bytes = max(BLOCK_BYTES, CHUNKS_PER_BLOCK * chunk_bytes if unit_rows > 1 else 0)
        share = min(1, self.stride / self.length)  # bytes that are read, as a share of the bytes of the windows
        n_bytes = max(OVERLAP_BYTES, chunk_bytes, int(read_bytes * share))
        return max(1, min(n_bytes // self.row_bytes, n_windows // MIN_BLOCKS))

    @property
    def part_rows(self) -> list[int]:
        """The number of windows of each file."""
        assert isinstance(self.steps, HDF5Dataset)
        file = np.searchsorted(self.steps.first_rows, self.recordings.runs.starts, "right") - 1
        return np.bincount(file, self._n_windows, len(self.steps.parts)).astype(np.int64).tolist()

    @property
    def is_local(self) -> bool:
        return self.steps.is_local

    @property
    def n_requests(self) -> int:
        return self.steps.n_requests

    @cached_property
    def stored_fingerprint(self) -> str:
        """A hash of the steps, and of the settings that cut them. Raises UserError."""
        content = hashlib.sha256(f"{self.steps.stored_fingerprint} {self.length} {self.stride}".encode())
        for array in (*self.recordings.runs, *self.recordings.values.values()):
            content.update(np.ascontiguousarray(array).data)
        return content.hexdigest()[:12]

    def stored_column(self, name: str) -> np.ndarray | None:
        """A field of one value for each recording, repeated for its windows. None for other fields."""
        values = self.recordings.values.get(name)
        return None if values is None else values.repeat(self._n_windows, axis=0)

    def first_steps(self) -> np.ndarray:
        """(rows,) int64: the first step of each window, in the order of the file, as in `column`."""
        recordings = Runs(self._first_rows, self._n_windows)
        return self._selected(self._find(None, recordings)[1])

    def _draw_shifts(self, seed: int, epoch: int) -> np.ndarray:
        """(recordings,) the shift v of each recording in this epoch."""
        rng = np.random.default_rng(np.random.SeedSequence((seed, epoch), spawn_key=(0, 0, 0)))
        return rng.integers(self._n_places)

    def _find(self, plan: PoolPlan | None, runs: Runs) -> tuple[np.ndarray, np.ndarray]:
        """(n,) the recording, and the first step, of each window. plan: None for the order of the file.

        runs: runs of neighbouring windows, each in one recording.
        """
        numbers = np.searchsorted(self._first_rows, runs.starts, "right") - 1
        j = Runs(runs.starts - self._first_rows[numbers], runs.counts).numbers()
        numbers = numbers.repeat(runs.counts)
        starts = self.recordings.runs.starts[numbers]
        if plan is None or not plan.is_shuffled:
            return numbers, starts + j * self.stride
        shifts = self._shifts(plan.seed, plan.epoch)[numbers]
        # The result is (j * P + v) // n, but without j * P, which might overflow.
        moved = (j * self._rest[numbers] + shifts) // self._n_windows[numbers]
        return numbers, starts + j * self._whole[numbers] + moved

    def over(self, stored: Dataset) -> "WindowDataset":
        assert isinstance(stored, ArrayDataset)
        other = copy(self)
        other.steps = stored
        return other

    def gather(self, plan: PoolPlan, stored: Rows, out: Rows) -> Rows:
        """The windows of a pool. stored: all steps, each step once, for any stride."""
        recordings, first_steps = np.empty((2, plan.n_rows), np.int64)
        recordings[plan.reads.places], first_steps[plan.reads.places] = self._find(plan, plan.reads.runs)
        windows: dict[str, Tensor | Ragged] = {
            name: _windows_in(column, self.length) for name, column in stored.columns.items()
        }
        rows = Rows(windows).take(torch.from_numpy(first_steps), out=out).columns
        for name, values in self.recordings.values.items():
            column = out[name][: plan.n_rows]
            rows[name] = column.copy_(to_device(torch.from_numpy(values[recordings]), column.device), non_blocking=True)
        return Rows(rows)

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        recordings, first_steps = self._find(plan, reads.runs)
        for name, values in self.recordings.values.items():
            np.asarray(out[name])[reads.places] = values[recordings]
        if self.row_bytes >= LONG_WINDOW_BYTES or self.stride > 2 * self.length:
            steps = {name: _steps_of(out[name]) for name in self.steps.fields}
            places = (range(place * self.length, (place + 1) * self.length) for place in reads.places.tolist())
            self.steps.read_ranges(plan, zip(first_steps.tolist(), places, strict=True), steps)
            return
        rows = [_bytes_of(out[name]) for name in self.steps.fields]
        last_steps = first_steps[np.cumsum(reads.runs.counts) - 1]  # one step of each run identifies its file
        self.steps.check_unchanged(last_steps)
        done = 0
        for some in reads.split(max(1, BLOCK_BYTES // self.row_bytes)):
            n_rows = len(some.places)
            self._read_together(plan, some, first_steps[done : done + n_rows], out=rows)
            done += n_rows
        self.steps.check_unchanged(last_steps)

    def _read_together(
        self, plan: PoolPlan, reads: Reads, first_steps: np.ndarray, *, out: Sequence[np.ndarray]
    ) -> None:
        """Read the steps of each run of windows once, and cut the windows out of them. out: (rows, bytes) per field."""
        ends = np.cumsum(reads.runs.counts)
        starts = first_steps[ends - reads.runs.counts]
        n_steps = first_steps[ends - 1] + self.length - starts
        contents = self._look_at(plan, starts.tolist(), n_steps.tolist())

        # Windows of a run that are a stride apart are copied together.
        is_cut = np.diff(first_steps) != self.stride
        is_cut[ends[:-1] - 1] = True
        begins = np.append(0, np.flatnonzero(is_cut) + 1)
        runs = np.searchsorted(ends, begins, "right")
        pieces = (begins, np.append(begins[1:], len(first_steps)), runs, first_steps[begins] - starts[runs])
        step_bytes = [field.row_bytes for field in self.steps.fields.values()]
        for begin, end, run, step in zip(*map(np.ndarray.tolist, pieces), strict=True):
            places = reads.places[begin:end]
            for rows, content, n_bytes in zip(out, contents[run], step_bytes, strict=True):
                shape, strides = (end - begin, rows.shape[1]), (self.stride * n_bytes, 1)
                rows[places] = np.ndarray(shape, np.uint8, content, step * n_bytes, strides)

    def _look_at(self, plan: PoolPlan, starts: Sequence[int], n_steps: Sequence[int]) -> list[Sequence[np.ndarray]]:
        """The bytes of each field in each run of steps: a view of the mapped file, or a copy in scratch memory."""
        contents = [view or () for view in map(self.steps.view, starts, n_steps)]
        missing = [run for run, content in enumerate(contents) if not content]
        if missing:
            ends = list(accumulate(n_steps[run] for run in missing))
            places = [range(end - n_steps[run], end) for run, end in zip(missing, ends, strict=True)]
            memory = {}
            for name, field in self.steps.fields.items():
                content = scratch(ends[-1] * field.row_bytes, f"steps of {name}").view(field.dtype)
                memory[name] = content.reshape(-1, *field.shape)
            self.steps.read_ranges(plan, zip((starts[run] for run in missing), places, strict=True), memory)
            for run, place in zip(missing, places, strict=True):
                contents[run] = [each[place.start : place.stop] for each in memory.values()]
        return contents


def open_windows(
    key: str, paths: str | Sequence[str], fields: Mapping[str, str], length: int, *, stride: int = 0, cache: str = ""
) -> WindowDataset:
    """Open HDF5 files with steps as rows, as a dataset of windows. stride: 0 means the length. See `open_store`."""
    steps = open_store(key, paths, fields, by_step=True, cache=cache)
    windows = WindowDataset(steps, steps.recordings, length, stride or length)
    n_recordings = len(steps.recordings.runs.counts)
    if n_short := n_recordings - len(windows.recordings.runs.counts):
        warn(
            f"{key}: {n_short:,} of {n_recordings:,} recordings of {steps.name} have less than {length} steps "
            "(data.window) and are left out"
        )
    return windows


def hold_out_steps(recordings: Recordings, share: float) -> tuple[Recordings, Recordings]:
    """(steps to train on, steps to validate on): no step is in both, for any windows.

    The steps depend on the arguments only. Whole recordings, chosen at random, are held out, and the end of one more
    recording. If there is a single recording, its end is held out.
    """
    starts, counts = recordings.runs
    order = np.random.default_rng(0).permutation(len(counts))
    ends = np.cumsum(counts[order])
    n_train = np.empty_like(counts)
    n_train[order] = np.clip(round((1 - share) * int(ends[-1])) - (ends - counts[order]), 0, counts[order])
    return recordings.part(starts, n_train), recordings.part(starts + n_train, counts - n_train)


def _window_of(field: Field, length: int) -> Field:
    return field._replace(shape=(length, *field.shape))


def _windows_in(column: Tensor | Ragged, length: int) -> Tensor:
    """(steps - L + 1, L, *shape): the windows that begin at each step, as a view."""
    assert isinstance(column, Tensor)
    shape = (len(column) - length + 1, length, *column.shape[1:])
    return column.as_strided(shape, (column.stride(0), *column.stride()))


def _steps_of(windows: Out) -> np.ndarray:
    """(rows * L, *shape): the steps of windows, (rows, L, *shape), in their order."""
    array = np.asarray(windows)
    return array.reshape(-1, *array.shape[2:])


def _bytes_of(windows: Out) -> np.ndarray:
    """(rows, bytes) uint8: windows, (rows, L, *shape)."""
    array = np.asarray(windows)
    return array.reshape(len(array), -1).view(np.uint8)


def _cut_blocks(n_rows: np.ndarray, size: int) -> np.ndarray:
    """(blocks,) int32: number of rows in each block. Each recording is cut separately into blocks of `size` rows."""
    n_blocks = -(-n_rows // size)
    blocks = np.full(int(n_blocks.sum()), size, np.int32)
    blocks[np.cumsum(n_blocks) - 1] = n_rows - (n_blocks - 1) * size
    return blocks
