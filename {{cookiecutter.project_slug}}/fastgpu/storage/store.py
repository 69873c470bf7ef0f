"""HDF5 files as one dataset of rows in blocks, which any number of threads can read.

h5py reads the metadata once: type, shape and the place of each chunk in the file. The rows are read without h5py,
because its library holds one lock during each read, so only one thread at a time can read. `preadv` needs no lock.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Range, Reads
from fastgpu.rows.selection import Runs
from fastgpu.storage.columns import Codec, DecodedColumn, InMemory
from fastgpu.storage.file import OpenFile, is_url, side_by_side
from fastgpu.storage.hdf5 import ORIGINS, expand, find, look_up, open_file, refuse_large
from fastgpu.storage.layout import COLUMN_BYTES, Layout, PlainRows
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.part import Part, Recordings, Request, open_parts

__all__ = ["open_store"]

AROUND_PAGE_CACHE = 1.5
"""Files larger than this factor times the free memory are read around the page cache. The page cache could keep less
than a third of their blocks until the next epoch, if the blocks come in random order."""


class HDF5Dataset(Dataset):
    """The rows of one or more HDF5 files, file after file. Safe to use after a fork."""

    def __init__(self, parts: Sequence[Part], codecs: Mapping[str, Codec]):
        """codecs: {field: decoder of its rows, if they are encoded}. The attributes come from the first part."""
        first, *others = parts
        self.name = first.name + (f" and {len(others)} more" if others else "")
        self.part_rows = [part.n_rows for part in parts]
        self.first_rows = [0, *accumulate(self.part_rows[:-1])]
        self.block_rows = np.concatenate([part.block_rows for part in parts])
        used = {name: codec for name, codec in codecs.items() if first.columns[name].field.codec}
        self.parts = []
        for part, first_row in zip(parts, self.first_rows, strict=True):
            decoded = {
                name: DecodedColumn(codec, part.columns[name], self.name, first_row) for name, codec in used.items()
            }
            self.parts.append(part._replace(columns={**part.columns, **decoded}))
        self.decoding = ", ".join(sorted({str(codec) for codec in used.values()}))
        self.attributes = first.attributes | _pool_statistics(parts)
        for codec in used.values():
            self.attributes |= codec.attributes
        self.fields = {name: column.field for name, column in self.parts[0].columns.items()}
        self.stored_lengths = {}
        for name, field in self.fields.items():
            if field.is_ragged:
                lengths = np.concatenate([part.columns[name].lengths for part in parts])
                self.stored_lengths[name] = lengths
                self.fields[name] = field._replace(mean_values=float(lengths.mean()))

    @property
    def file(self) -> OpenFile:
        """The first file."""
        return self.parts[0].file

    @property
    def files(self) -> list[tuple[str, str]]:
        """(path, group) of each part."""
        return [(part.path, part.group) for part in self.parts]

    @property
    def is_local(self) -> bool:
        return all(part.file.is_local for part in self.parts)

    @property
    def n_requests(self) -> int:
        return sum(file.n_requests for file in {part.file for part in self.parts})

    @cached_property
    def stored_fingerprint(self) -> str:
        """A hash of all rows if the files have checksums, else of some rows. Raises UserError."""
        columns = [column for part in self.parts for column in part.columns.values()]
        fingerprints = side_by_side(lambda column: column.fingerprint(), columns)
        return hashlib.sha256(b"".join(fingerprints)).hexdigest()[:12]

    def stored_column(self, name: str) -> np.ndarray | None:
        columns: list[Any] = [part.columns.get(name) for part in self.parts]
        n_bytes = sum(len(each) * each.field.row_bytes for each in columns if isinstance(each, Layout))
        if n_bytes > COLUMN_BYTES or not all(isinstance(each, InMemory | Layout) for each in columns):
            return None
        return np.concatenate([each.rows if isinstance(each, InMemory) else each.read_all() for each in columns])

    def origins(self, row_ids: np.ndarray | slice = slice(None)) -> list[str]:
        """The origin of each row, such as an image file, as convert.py wrote it. Empty texts if the file has none."""
        found = []
        for part in self.parts:
            with open_file(part.path, part.path) as (_, h5):
                data = look_up(find(h5, part.group, h5py.Group, part.path), ORIGINS, part.path)
                is_known = isinstance(data, h5py.Dataset) and data.shape == (part.n_rows,) and data.dtype.kind in "SO"
                refuse_large(f"{part.path}: {ORIGINS}", part.n_rows * data.dtype.itemsize if is_known else 0)
                found.append(data[:] if is_known else np.zeros(part.n_rows, "S1"))
        return [text.decode(errors="backslashreplace") for text in np.concatenate(found)[row_ids].tolist()]

    @cached_property
    def recordings(self) -> Recordings:
        """If rows are steps: the recordings of all files, file after file."""
        each = [part.recordings for part in self.parts]
        starts = [part.runs.starts + first_row for part, first_row in zip(each, self.first_rows, strict=True)]
        runs = Runs(np.concatenate(starts), np.concatenate([part.runs.counts for part in each]))
        return Recordings(runs, {name: np.concatenate([part.values[name] for part in each]) for name in each[0].values})

    @cached_property
    def unit_rows(self) -> int:
        """Number of rows that are decompressed together: reading one of them costs as much as reading all."""
        columns = [column for part in self.parts for column in part.columns.values()]
        units = [each.chunk_rows for each in columns if isinstance(each, Layout) and not isinstance(each, PlainRows)]
        return max(units, default=1)

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        self.read_ranges(plan, reads.ranges(), out)

    def read_ranges(self, plan: PoolPlan, ranges: Iterable[Range], out: Mapping[str, Out]) -> None:
        """Like `read`, for ranges, each of one file. The places of a range may be neighbours."""
        by_part: dict[int, list[Range]] = {}
        for start, places in ranges:
            number = self._number_of(start)
            by_part.setdefault(number, []).append((start - self.first_rows[number], places))
        for number, ranges_of_part in by_part.items():
            for name, column in self.parts[number].columns.items():
                column.read(ranges_of_part, out[name], plan)

    def _number_of(self, row: int) -> int:
        """The number of the part that has a row."""
        return bisect_right(self.first_rows, row) - 1

    def view(self, start: int, n_rows: int) -> Sequence[np.ndarray] | None:
        """Views of the bytes of neighbouring rows of one file, one for each field; None if they are not in memory.

        Call `check_unchanged` before and after you use the views. Only for rows that are steps.
        """
        number = self._number_of(start)
        first = start - self.first_rows[number]
        views = [column.view(first, n_rows) for column in self.parts[number].columns.values()]
        return None if any(view is None for view in views) else views

    def check_unchanged(self, rows: np.ndarray) -> None:
        """Raise UserError if a file that has some of these rows was changed since it was opened. rows: (n,) int64."""
        for file in {self.parts[self._number_of(row)].file for row in rows.tolist()}:
            file.check_unchanged()

    def gathers(self, plan: PoolPlan, out: Mapping[str, Out], n_rows: int) -> list[Callable[[], None]]:
        """Jobs for any thread that copy a pool out of the page cache, `n_rows` rows each, in the order of the pool.

        Empty if a field has no `cached_rows`, or if there are several files. `read` would take 1.11 and 1.16 times the
        CPU time for rows of 116 kB, 1.02 and 1.05 times for 12 kB, but only 0.87 times for 3 kB (two readers of
        bench/run.py on a 2-core VM with other work, 2026-11-27; medians of 9 and of 15 rounds).
        """
        copies: list[tuple[np.ndarray, np.ndarray]] = []  # for each field: all rows, and the pool; both (rows, bytes)
        for name, column in self.parts[0].columns.items() if len(self.parts) == 1 else ():
            rows = column.cached_rows(plan.reads.ranges()) if isinstance(column, InMemory | PlainRows) else None
            if rows is None:
                return []
            copies.append((rows, np.asarray(out[name])[: plan.n_rows].reshape(plan.n_rows, -1).view(np.uint8)))
        row_ids = plan.row_ids

        def gather(places: slice) -> None:
            self.file.check_unchanged()
            for rows, pool in copies:
                # mode="clip": "raise" would copy the pool.
                np.take(rows, row_ids[places], axis=0, out=pool[places], mode="clip")
            self.file.check_unchanged()

        starts = range(0, plan.n_rows if copies else 0, n_rows)
        return [partial(gather, slice(start, start + n_rows)) for start in starts]


def open_store(
    key: str,
    paths: str | Sequence[str],
    fields: Mapping[str, str],
    codecs: Mapping[str, Codec] | None = None,
    *,
    by_step: bool = False,
    cache: str = "",
) -> HDF5Dataset:
    """Open HDF5 files as one dataset. Raises UserError if a person has to change something.

    key: the config key that names the files, for messages. paths: one or more of `file.h5`, `file.h5::/group`, URLs and
    globs such as `part-*.h5`. fields: {field: dataset or CSR group in the file}. codecs: {field: decoder of its rows,
    if they are encoded}. by_step: rows are steps of recordings, and a ragged row is a recording. cache: the folder for
    local copies of URLs; by default data/cache. The attributes come from the first file or group, except that `mean`
    and `std` are computed for all rows.
    """
    paths = [paths] if isinstance(paths, str) else paths
    files = [file for path in paths for file in expand(key, path, cache)]
    if not fields or not files:
        raise UserError(f"{key}: no file or no field is named; data.fields maps names in the code to datasets of files")
    first, *others = parts = _open_parts(key, files, fields, by_step=by_step, cache=cache)
    for other in others:
        check_meaning(key, first, other)
        _check_fields(key, first, other)
    return HDF5Dataset(parts, codecs or {})


def _check_fields(key: str, first: Part, other: Part) -> None:
    """Raise UserError if the fields of two files are not alike."""
    of_rows = (first.fields, other.fields, "recording")
    of_recordings = (first.recordings.fields, other.recordings.fields, "step")
    for expected, found, otherwise in (of_rows, of_recordings):
        for name, field in found.items():
            if name not in expected or not field.fits(expected[name]):
                as_what = expected.get(name, f"one value for each {otherwise}")
                raise UserError(
                    f"{key}: {other.name} holds {name} as {field}, {first.name} as {as_what}; files must agree"
                )


def _open_parts(
    key: str, files: Sequence[tuple[str, str]], fields: Mapping[str, str], *, by_step: bool, cache: str
) -> list[Part]:
    """Open the parts of a dataset. files: (path, group) of each part. URLs are opened in parallel, in threads."""
    groups: dict[str, list[str]] = {}
    for path, group in files:
        groups.setdefault(path, []).append(group)
    n_bytes = sum(Path(path).stat().st_size for path in groups if Path(path).is_file())
    is_large = n_bytes > AROUND_PAGE_CACHE * free_host_bytes()
    asked = Request(key, fields, by_step, is_large, cache)

    def open_one(path: str) -> list[Part]:
        return open_parts(asked, path, groups[path], is_first=path == files[0][0])

    opened = side_by_side(open_one, groups) if any(map(is_url, groups)) else [*map(open_one, groups)]
    parts = {path: iter(each) for path, each in zip(groups, opened, strict=True)}
    return [next(parts[path]) for path, _ in files]  # in the order of `files`


def _pool_statistics(parts: Sequence[Part]) -> dict[str, Any]:
    """The attributes `mean` and `std` over the rows of all files. Empty if the files agree, or if a file has none."""
    names = ("mean", "std")
    known = [[part.attributes[name] for name in names] for part in parts if {*names} <= part.attributes.keys()]
    if 0 < len(known) < len(parts):
        warn(f"{len(known)} of {len(parts)} files have attributes mean and std; the values of {parts[0].name} are used")
    if len(known) < len(parts) or all(each == known[0] for each in known):
        return {}
    means, stds = np.array(known, np.float64).swapaxes(0, 1)
    n_rows = [part.n_rows for part in parts]
    mean = np.average(means, 0, n_rows)
    variance = np.average(stds**2 + means**2, 0, n_rows) - mean**2
    return {"mean": mean.tolist(), "std": np.sqrt(np.maximum(variance, 0)).tolist()}
