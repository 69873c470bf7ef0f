"""HDF5 file(s) as blocks of rows, read by os.preadv from any number of threads.

h5py is used for the metadata, once: dtype, shape and where each chunk lies. The bytes come by `preadv`, because the
HDF5 library holds one lock over all its reads: two threads read as fast as one through h5py, 1.8x through `preadv`.
Layouts that are not plain bytes (filters, foreign byte order, chunks that split rows) go through h5py, under that lock.
"""

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from .launch import UserError
from .rows import Field

BLOCK_BYTES = 2 << 20  # of a contiguous dataset; random 2 MiB pieces read as fast as a cold disk can
SCATTER_BYTES = 8192  # rows from here on are scattered by the kernel; smaller ones by one indexed copy
COLUMN_BYTES = 1 << 30  # a field beside the largest one is held in memory up to this size
IOV_MAX = 1024  # Linux: destinations of one preadv


class Store:
    """The rows of one or more HDF5 files, one after the other, as blocks that are cheap to read whole.

    block_rows: (blocks,) int64, rows of each block; fields: dtype and shape of a row; attributes: those of the first
    file or group. Picklable; holds no h5py object and no file that a fork would share.
    """

    def __init__(self, parts: Sequence["_Part"]):
        self._parts = parts
        self.fields: dict[str, Field] = parts[0].fields
        self.attributes: dict[str, Any] = parts[0].attributes
        self.name = parts[0].name if len(parts) == 1 else f"{parts[0].name} and {len(parts) - 1} more"
        self.block_rows = np.concatenate([part.block_rows for part in parts])
        self._first_block = np.cumsum([0] + [len(part.block_rows) for part in parts])

    def __len__(self) -> int:
        return int(self.block_rows.sum())

    @property
    def row_bytes(self) -> int:
        return sum(field.row_bytes for field in self.fields.values())

    @property
    def nbytes(self) -> int:
        return len(self) * self.row_bytes

    def read(self, block: int, first: int, places: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Rows first, first + 1, ... of a block -> out[field][places]. Thread-safe.

        places: (n,) int64, all different. out: C-contiguous arrays of shape (rows, *field.shape).
        Raises OSError or EOFError when the file cannot give the bytes.
        """
        part = int(np.searchsorted(self._first_block, block, "right")) - 1
        start = self._parts[part].block_start[block - self._first_block[part]]
        self._parts[part].read(int(start) + first, places, out)

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows, (rows, *shape); raises KeyError if it is not held in memory."""
        return np.concatenate([part.columns[name] for part in self._parts])


def open_store(key: str, paths: str | Sequence[str], fields: Mapping[str, str]) -> Store:
    """Open files, lists and globs of `file.h5` or `file.h5::/group`; `fields` maps names to datasets.

    key: the config key that named them, for messages. Raises UserError for whatever a person can mend.
    """
    files = [found for path in ([paths] if isinstance(paths, str) else paths) for found in _expand(key, path)]
    parts = [_Part(key, path, group, fields) for path, group in files]
    for part in parts[1:]:
        for name, field in part.fields.items():
            if field != parts[0].fields[name]:
                raise UserError(f"{key}: {part.name} holds {name} as {_say(field)}, {parts[0].name} as "
                                f"{_say(parts[0].fields[name])}; shards must agree")  # fmt: skip
    return Store(parts)


def _expand(key: str, path: str) -> list[tuple[str, str]]:
    file, _, group = path.partition("::")
    found = [file] if Path(file).exists() or not glob.has_magic(file) else sorted(glob.glob(file))  # noqa: PTH207
    if not found:
        raise UserError(f"{key}: no file matches {file} (looked in {Path.cwd()})")
    return [(each, group or "/") for each in found]


def _say(field: Field) -> str:
    return f"{field.dtype} (N{''.join(f', {n}' for n in field.shape)})"


class _Part:
    """One file: where the rows of each field lie."""

    def __init__(self, key: str, path: str, group: str, fields: Mapping[str, str]):
        self.name = path if group == "/" else f"{path}::{group}"
        if Path(path).is_dir():
            raise UserError(f"{key}: {path} is a folder; name the files in it: {path}/*.h5")
        try:
            with h5py.File(path, "r") as file:
                self._layouts = self._read_metadata(key, file, path, group, fields)
        except FileNotFoundError:
            raise UserError(f"{key}: {path} does not exist (looked in {Path.cwd()})") from None
        except BlockingIOError:
            raise UserError(
                f"{key}: {path} is locked by a process that writes it; wait for that to end, "
                "or set HDF5_USE_FILE_LOCKING=FALSE if there is none"
            ) from None
        except OSError as error:
            reason = str(error).lower()
            if "truncated" in reason:
                cure = "is truncated: copy or write it again"
            elif "signature not found" in reason:
                cure = "is not an HDF5 file"
            else:
                cure = f"cannot be opened: {error.strerror or error}"
            raise UserError(f"{key}: {path} {cure}") from None

    def _read_metadata(
        self, key: str, file: h5py.File, path: str, group: str, names: Mapping[str, str]
    ) -> "dict[str, _Layout]":
        root = _open_group(key, file, group)
        self.attributes = {name: _plain(value) for name, value in root.attrs.items()}
        datasets = {name: _open_dataset(key, file, root, self.name, source) for name, source in names.items()}
        lengths = {name: len(data) for name, data in datasets.items()}
        if len(set(lengths.values())) != 1:
            raise UserError(f"{key}: {self.name} has fields of unequal length {lengths}; give each as many rows")
        (rows,) = set(lengths.values())
        if not rows:
            raise UserError(f"{key}: {self.name} has no rows")
        layouts = {name: _Layout(key, data, path) for name, data in datasets.items()}
        self.fields = {name: layout.field for name, layout in layouts.items()}
        widest = max(self.fields, key=lambda name: self.fields[name].row_bytes)
        self.columns = {
            name: data[:].astype(self.fields[name].dtype, copy=False)
            for name, data in datasets.items()
            if name != widest and rows * self.fields[name].row_bytes <= COLUMN_BYTES
        }
        self.block_start = np.arange(0, rows, layouts[widest].chunk_rows)
        self.block_rows = np.diff(self.block_start, append=rows)
        return layouts

    def read(self, start: int, places: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        for name, layout in self._layouts.items():
            if name in self.columns:
                out[name][places] = self.columns[name][start : start + len(places)]
            else:
                layout.read(start, places, out[name])


class _Layout:
    """Where the rows of one dataset lie in the file: chunk after chunk, or unknown to us and left to h5py."""

    def __init__(self, key: str, data: h5py.Dataset, path: str):
        self.path, self.dataset = path, data.name
        self.field = Field(data.dtype.newbyteorder("="), data.shape[1:])
        self._file = _OpenFile(path)
        row_bytes = self.field.row_bytes
        self.chunk_rows = data.chunks[0] if data.chunks else max(1, BLOCK_BYTES // max(1, row_bytes))
        plain = data.dtype.isnative and row_bytes and not data.id.get_create_plist().get_nfilters()
        starts = np.arange(0, len(data), self.chunk_rows)
        self._offsets: np.ndarray | None = None  # (chunks,) int64: first byte of each; None: read through h5py
        if plain and data.chunks and data.chunks[1:] == data.shape[1:]:
            self._offsets = np.full(len(starts), -1)
            offsets, chunk_rows = self._offsets, self.chunk_rows
            data.id.chunk_iter(lambda c: offsets.__setitem__(c.chunk_offset[0] // chunk_rows, c.byte_offset))
            missing = int((offsets < 0).sum())
            if missing:
                raise UserError(f"{key}: {path}{data.name}: {missing} of {len(starts)} chunks were never written")
        elif plain and not data.chunks:
            offset = data.id.get_offset()
            if offset is None:
                raise UserError(f"{key}: {path}{data.name} was never written")
            self._offsets = offset + starts * row_bytes
        if self._offsets is not None:
            last = self._offsets + np.minimum(self.chunk_rows, len(data) - starts) * row_bytes
            if int(last.max()) > Path(path).stat().st_size:
                raise UserError(f"{key}: {path} is truncated: copy or write it again")

    def read(self, start: int, places: np.ndarray, out: np.ndarray) -> None:
        """Rows start, start + 1, ... -> out[places]."""
        if self._offsets is None:
            scratch = np.empty((len(places), *self.field.shape), self.field.dtype)
            self._file.read_h5(self.dataset, start, scratch)
            out[places] = scratch
            return
        while len(places):
            chunk, row = divmod(start, self.chunk_rows)
            count = min(len(places), self.chunk_rows - row)
            self._read_bytes(int(self._offsets[chunk]) + row * self.field.row_bytes, places[:count], out)
            start, places = start + count, places[count:]

    def _read_bytes(self, offset: int, places: np.ndarray, out: np.ndarray) -> None:
        size = self.field.row_bytes
        if size < SCATTER_BYTES:
            scratch = np.empty((len(places), *self.field.shape), self.field.dtype)
            self._file.preadv([scratch.reshape(-1).view(np.uint8).data], offset)
            out[places] = scratch
            return
        flat = out.reshape(-1).view(np.uint8).data
        targets = [flat[place : place + size] for place in (places * size).tolist()]
        for i in range(0, len(targets), IOV_MAX):
            self._file.preadv(targets[i : i + IOV_MAX], offset + i * size)


class _OpenFile:
    """A file open for reading: by descriptor, which fork may share since preadv has no position, and by h5py."""

    def __init__(self, path: str):
        self.path = path
        self._raw = Path(path).open("rb", buffering=0)  # noqa: SIM115
        self._h5: h5py.File | None = None
        self._h5_pid = 0

    def __getstate__(self) -> str:
        return self.path

    def __setstate__(self, path: str) -> None:
        self.__init__(path)  # type: ignore[misc]

    def preadv(self, targets: list[memoryview], offset: int) -> None:
        """Fill the targets, one after the other, with the bytes from `offset` on."""
        left = sum(target.nbytes for target in targets)
        while (n := os.preadv(self._raw.fileno(), targets, offset)) < left:
            if n == 0:
                raise EOFError(f"{self.path} ends at byte {offset}: it was cut while in use")
            offset, left = offset + n, left - n
            while n >= targets[0].nbytes:  # a short read: a signal, or more than 2 GiB
                n -= targets.pop(0).nbytes
            targets[0] = targets[0][n:]

    def read_h5(self, dataset: str, start: int, out: np.ndarray) -> None:
        """Rows from `start` on through the HDF5 library, which converts and decodes them under its lock."""
        if self._h5 is None or self._h5_pid != os.getpid():
            self._h5, self._h5_pid = h5py.File(self.path, "r"), os.getpid()
        self._h5[dataset].read_direct(out, np.s_[start : start + len(out)])


def _open_group(key: str, file: h5py.File, group: str) -> h5py.Group:
    found = file.get(group)
    if not isinstance(found, h5py.Group):
        raise UserError(f"{key}: {file.filename} has no group {group}; it has {_contents(file)}")
    return found


def _open_dataset(key: str, file: h5py.File, root: h5py.Group, name: str, source: str) -> h5py.Dataset:
    data = root.get(source)
    if not isinstance(data, h5py.Dataset):
        raise UserError(f"{key}: {name} has no dataset {source}; it has {_contents(root)} (see data.fields)")
    where = f"{key}: {name}: {source}"
    if data.is_virtual or data.external or data.file.filename != file.filename:  # the last: an external link on the way
        raise UserError(f"{where} takes its bytes from other files; write them into one file")
    if data.ndim == 0:
        raise UserError(f"{where} is a single value; a field needs a first dimension of rows")
    if data.dtype.kind not in "buif":
        raise UserError(f"{where} is of type {data.dtype}; allowed are bool, integers and floats")
    return data


def _contents(group: h5py.Group) -> str:
    return ", ".join(sorted(group)) or "nothing"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_plain(each) for each in value.tolist()]
    return value.decode() if isinstance(value, bytes) else value.item() if isinstance(value, np.generic) else value
