"""Open HDF5 files with h5py, find what they should have, and say in one line what is wrong with them."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from fastgpu.process.content import describe_content
from fastgpu.process.launch import UserError
from fastgpu.storage import remote
from fastgpu.storage.file import OpenFile

OR_CONVERT = "or convert it once: python convert.py --help says how"
"""The cure for files of images, tables and arrays."""
SOURCES = "fastgpu_source"
"""Dataset of texts beside the fields of a file: where each of its rows came from. Training does not read it."""
Member = TypeVar("Member", h5py.Group, h5py.Dataset)


@contextmanager
def open_file(path: str, where: str, *, around_page_cache: bool = False) -> Iterator[tuple[OpenFile, h5py.File]]:
    """Open a file or URL to read: its bytes, and what h5py makes of them, which is closed after the block.

    around_page_cache: see `OpenFile`. Raises UserError, beginning with `where`, for what h5py raises, also in the
    block.
    """
    try:
        is_remote = remote.is_url(path)
        file = remote.open_remote(path, where) if is_remote else OpenFile(path, around_page_cache=around_page_cache)
        with file.open_h5() as h5:
            yield file, h5
    except FileNotFoundError:
        raise UserError(f"{where} does not exist (looked in {Path.cwd()})") from None
    except IsADirectoryError:
        raise UserError(f"{where} is a folder; name the files in it, {path}/*.h5, {OR_CONVERT}") from None
    except BlockingIOError:
        cure = "wait for that to end, or set HDF5_USE_FILE_LOCKING=FALSE if there is none"
        raise UserError(f"{where} is locked by a process that writes it; {cure}") from None
    except (OSError, RuntimeError, KeyError) as error:  # all that h5py raised in 4,000 damaged files
        if not is_remote and not h5py.is_hdf5(path) and (content := describe_content(path)):
            raise UserError(f"{where} is no HDF5 file, but {content}") from None
        reason = " ".join(str(error).split())
        raise UserError(f"{where} cannot be read as HDF5: {reason}; copy or write it again, {OR_CONVERT}") from None


def find(root: h5py.Group, name: str, kind: type[Member], where: str) -> Member:
    """A group or a dataset of a file. Raises UserError if there is none, or if its bytes are in another file."""
    item = root.get(name)
    if not isinstance(item, kind):
        names = ", ".join(sorted(map(str, root))) or "nothing"  # one that is not UTF-8 is bytes
        raise UserError(f"{where} has no {kind.__name__.lower()} {name}; it has {names}")
    refuse_other_files(item, root.file.filename, f"{where}: {name}")
    return item


def refuse_other_files(item: h5py.Group | h5py.Dataset, path: str, where: str) -> None:
    """Raise UserError if the bytes of an item of the file `path` are in other files."""
    is_elsewhere = isinstance(item, h5py.Dataset) and (item.is_virtual or item.external)
    if is_elsewhere or item.file.filename != path:
        raise UserError(f"{where} takes its bytes from other files; name those files")


def dtype_of(data: h5py.Dataset) -> np.dtype:
    """The type as h5py shows it. Numbers for which NumPy or torch have no type are opaque bytes."""
    with suppress(TypeError):
        if data.dtype.kind not in "buif" or data.dtype.itemsize <= 8:
            return data.dtype
    return np.dtype((np.void, data.id.get_type().get_size()))


def attributes_of(item: h5py.Group) -> dict[str, Any]:
    """The attributes as plain Python values: str, int, float, bool, and lists of them.

    Others, such as references and lists of unequal length, are left out: no model needs them.
    """
    attributes = {}
    for name in item.attrs:
        with suppress(TypeError, ValueError):  # of h5py, JSON and NumPy, for types that they do not have
            value = _to_python(item.attrs[name])
            json.dumps(np.asarray(value).tolist())
            attributes[_to_python(name)] = value
    return attributes


def _to_python(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_to_python(element) for element in value]
    if isinstance(value, str):  # h5py keeps damaged bytes as surrogates
        value = value.encode(errors="surrogateescape")
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else value
