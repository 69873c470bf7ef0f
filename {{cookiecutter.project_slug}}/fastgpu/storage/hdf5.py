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

ELSEWHERE = "takes its bytes from other files; write them into one file, or set data.trust_links=true if you trust them"


@contextmanager
def open_file(path: str, where: str) -> Iterator[h5py.File]:
    """Open a file for reading. Raises UserError for any OSError, also for those of the block."""
    if Path(path).is_dir():
        raise UserError(f"{where} is a folder; name the files in it: {path}/*.h5")
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
    except OSError as error:
        reason = f"cannot be opened: {error.strerror or error}"
        if "truncated" in str(error):
            reason = "is truncated: copy or write it again"
        if "signature not found" in str(error):
            reason = "is not an HDF5 file"
        raise UserError(f"{where} {reason}") from None


def open_group(file: h5py.File, name: str, where: str, *, trust_links: bool) -> h5py.Group:
    """A group of a file. Raises UserError if it is missing, or lies in another file and links are not trusted."""
    group = file.get(name)
    if not isinstance(group, h5py.Group):
        raise UserError(f"{where} has no group {name}; it has {_contents(file)}")
    if group.file.filename != file.filename and not trust_links:
        raise UserError(f"{where}: {name} {ELSEWHERE}")
    return group


def open_dataset(root: h5py.Group, name: str, where: str, *, trust_links: bool) -> h5py.Dataset:
    """A dataset of numbers with a dimension of rows. Raises UserError if it is not one, or its bytes are elsewhere."""
    data = root.get(name)
    if data is None:
        link = root.get(name, getlink=True)
        if isinstance(link, h5py.ExternalLink):
            raise UserError(f"{where}: {name} links to {link.filename}, which is not there")
    if not isinstance(data, h5py.Dataset):
        raise UserError(f"{where} has no dataset {name}; it has {_contents(root)} (see data.fields)")
    if data.is_virtual or data.external or data.file.filename != root.file.filename:
        if not trust_links:
            raise UserError(f"{where}: {name} {ELSEWHERE}")
        _check_other_files(data, f"{where}: {name}")
    if data.ndim == 0:
        raise UserError(f"{where}: {name} is a single value; a field needs a first dimension of rows")
    if data.dtype.kind not in "buif":
        raise UserError(f"{where}: {name} is of type {data.dtype}; allowed are bool, integers and floats")
    return data


def _check_other_files(data: h5py.Dataset, where: str) -> None:
    """Raise UserError if a file that a dataset takes its bytes from is missing: HDF5 itself would read zeros."""
    folder = Path(data.file.filename).parent
    paths = [path for path, _, _ in data.external or []]
    if data.is_virtual:
        paths += [part.file_name for part in data.virtual_sources()]
    for path in paths:
        if path != "." and not (folder / path).exists():  # ".": the file itself
            raise UserError(f"{where} takes its bytes from {path}, which is not there")


def attributes_of(item: h5py.Group | h5py.Dataset) -> dict[str, Any]:
    """The attributes as plain Python values: str, int, float, bool, and lists of them."""
    return {name: _to_python(value) for name, value in item.attrs.items()}


def _to_python(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_to_python(element) for element in value.tolist()]
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, np.generic):
        return value.item()
    return value


def _contents(group: h5py.Group) -> str:
    return ", ".join(sorted(group)) or "nothing"
