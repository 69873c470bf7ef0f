"""Open files, groups and datasets of rows with h5py, and say in one line what is wrong with them.

`where` is the beginning of each message: the config key and the file.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.storage.file import not_found

OR_CONVERT = "or convert it once: python convert.py --help says how"
"""For images, tables and arrays."""
ELSEWHERE = "takes its bytes from other files; name those files, or write the rows into one file"


@contextmanager
def open_file(path: str, where: str) -> Iterator[h5py.File]:
    """Open a file for reading. Raises UserError for whatever h5py raises, also in the block."""
    if Path(path).is_dir():
        raise UserError(f"{where} is a folder; name the files in it, {path}/*.h5, {OR_CONVERT}")
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FileNotFoundError:
        raise not_found(where) from None
    except BlockingIOError:
        raise UserError(
            f"{where} is locked by a process that writes it; wait for that to end, or set "
            "HDF5_USE_FILE_LOCKING=FALSE if there is none"
        ) from None
    except Exception as error:
        if not _is_of_h5py(error):
            raise
        reason = " ".join(str(error).split())
        if "signature not found" in reason:
            raise UserError(f"{where} is not an HDF5 file; name one, {OR_CONVERT}") from None
        raise UserError(f"{where} cannot be read: {reason}: copy or write it again") from None


def _is_of_h5py(error: Exception) -> bool:
    """Whether h5py raised the error: an OSError, RuntimeError, KeyError or other. The rest are bugs of our own."""
    trace = error.__traceback__
    while trace and trace.tb_next:
        trace = trace.tb_next
    return trace is not None and str(trace.tb_frame.f_globals.get("__name__")).startswith("h5py")


def open_group(file: h5py.File, name: str, where: str) -> h5py.Group:
    """A group of a file. Raises UserError if it is missing, or lies in another file."""
    group = file.get(name)
    if not isinstance(group, h5py.Group):
        raise UserError(f"{where} has no group {name}; it has {list_contents(file)}")
    if group.file.filename != file.filename:
        raise UserError(f"{where}: {name} {ELSEWHERE}")
    return group


def open_dataset(root: h5py.Group, name: str, where: str) -> h5py.Dataset:
    """A dataset of numbers with a dimension of rows. Raises UserError if it is not one, or its bytes are elsewhere."""
    data = root.get(name)
    if not isinstance(data, h5py.Dataset):
        raise UserError(f"{where} has no dataset {name}; it has {list_contents(root)} (see data.fields)")
    if data.is_virtual or data.external or data.file.filename != root.file.filename:
        raise UserError(f"{where}: {name} {ELSEWHERE}")
    if data.ndim == 0:
        raise UserError(f"{where}: {name} is a single value; a field needs a first dimension of rows")
    if data.dtype.kind not in "buif":
        raise UserError(f"{where}: {name} is of type {data.dtype}; allowed are bool, integers and floats")
    return data


def attributes_of(item: h5py.Group, where: str) -> dict[str, Any]:
    """The attributes as plain Python values: str, int, float, bool, and lists of them."""
    return {name: _to_python(value) for name, value in item.attrs.items()}


def _to_python(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_to_python(element) for element in value.tolist()]
    if isinstance(value, str):  # h5py keeps damaged bytes as surrogates
        value = value.encode(errors="surrogateescape")
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, np.generic):
        return value.item()
    return value


def list_contents(group: h5py.Group) -> str:
    """The names in a group. h5py gives a name that is not UTF-8 as bytes."""
    return ", ".join(sorted(map(str, group))) or "nothing"
