"""Open HDF5 files with h5py, find their groups and datasets, and describe an error in one line."""

import glob
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import h5py
import numpy as np

from fastgpu.process.content import describe_content
from fastgpu.process.files import not_found
from fastgpu.process.launch import UserError, list_first
from fastgpu.process.machine import GIB, format_bytes, free_host_bytes
from fastgpu.storage import remote
from fastgpu.storage.file import OpenFile, is_url, split_group

OR_CONVERT = "or convert it once: python convert.py --help says how"
"""The cure for files of images, tables and arrays."""
ORIGINS = "fastgpu_source"
"""Dataset of texts beside the fields of a file: the origin of each row, such as an image file. Not read in training."""
MAX_LINKS = 16
"""Maximum number of soft links on the way to an item, as in the HDF5 library."""
Member = TypeVar("Member", h5py.Group, h5py.Dataset)


@contextmanager
def open_file(
    path: str, where: str, *, around_page_cache: bool = False, cache: str = ""
) -> Iterator[tuple[OpenFile, h5py.File]]:
    """Open a file or URL to read: yields its OpenFile and its h5py.File, which is closed after the block.

    around_page_cache: see `OpenFile`. cache: the folder for the local copy of a URL; by default data/cache. Raises
    UserError, beginning with `where`, for errors of h5py, also in the block.
    """
    file: OpenFile | None = None
    try:
        if is_url(path):
            file = remote.open_remote(path, where, cache)
        else:
            check_path(path, where)
            file = OpenFile(path, around_page_cache=around_page_cache)
        with file.open_h5() as h5:
            yield file, h5
    except FileNotFoundError:
        raise not_found(path, where) from None
    except IsADirectoryError:
        raise UserError(f"{where} is a folder; name the files in it, {path}/*.h5, {OR_CONVERT}") from None
    except BlockingIOError:
        cure = "wait for that to end, or set HDF5_USE_FILE_LOCKING=FALSE if there is none"
        raise UserError(f"{where} is locked by a process that writes it; {cure}") from None
    except (OSError, RuntimeError, KeyError, MemoryError) as error:  # all that h5py raised in 4,000 damaged files
        if not is_url(path) and not h5py.is_hdf5(path) and (content := describe_content(path)):
            raise UserError(f"{where} is no HDF5 file, but {content}") from None
        reason = " ".join(str(error).split())
        cure = (file and file.cure) or f"copy or write it again, {OR_CONVERT}"
        raise UserError(f"{where} cannot be read as HDF5: {reason}; {cure}") from None


def expand(key: str, path: str, cache: str = "") -> list[tuple[str, str]]:
    """[(file, group)] for `file.h5`, `file.h5::/group`, or patterns in the two names. Raises UserError if none exists.

    cache: see `open_file`.
    """
    pattern, group = split_group(path)
    if is_url(pattern):
        files = remote.expand(key, pattern)
    else:
        check_path(pattern, f"{key}: {pattern}")
        is_pattern = glob.has_magic(pattern) and not Path(pattern).exists()
        files = sorted(glob.glob(pattern)) if is_pattern else [pattern]  # noqa: PTH207 (pathlib globs no absolute ones)
    if not files:
        raise UserError(f"{key}: no file matches {pattern} (looked in {Path.cwd()})")
    if not glob.has_magic(group):
        return [(file, group) for file in files]
    return [(file, each) for file in files for each in _expand_group(file, group, f"{key}: {file}", cache)]


def _expand_group(path: str, pattern: str, where: str, cache: str) -> list[str]:
    """The groups of a file that a pattern such as /demo_* matches, or the group of this name. Raises UserError."""
    with open_file(path, where, cache=cache) as (_, h5):
        if isinstance(look_up(h5, pattern, where), h5py.Group):
            return [pattern]
        groups = [""]
        for step in pattern.strip("/").split("/"):
            names = ((group, name) for group in groups for name in h5[group or "/"] if isinstance(name, str))
            found = (f"{group}/{name}" for group, name in names if fnmatchcase(name, step))
            groups = sorted(each for each in found if isinstance(look_up(h5, each, where), h5py.Group))
        if not groups:
            raise UserError(f"{where} has no group {pattern}; it has {list_first(sorted(map(str, h5))) or 'nothing'}")
        return groups


def check_path(path: str, where: str) -> None:
    """Raise UserError for pipes and devices, which may never end, and for names that no file can have."""
    try:
        mode = Path(path).stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:  # the name is too long, or has a zero byte or an incomplete character
        raise UserError(f"{where[:200]!r} cannot be opened: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise UserError(f"{where} is a pipe, a socket or a device, which is not read; name a file")


def find(root: h5py.Group, name: str, kind: type[Member], where: str) -> Member:
    """A group or a dataset of a file. Raises UserError if it does not exist, or if its bytes are in another file."""
    item = look_up(root, name, where)
    if not isinstance(item, kind):
        names = list_first(sorted(map(str, root))) or "nothing"  # a name that is not UTF-8 is bytes
        groups = [f"{where.rpartition(': ')[2]}::/{group}" for group in _groups_with(root, name, kind, where)]
        cure = f"; name a group: {list_first(groups, ' or ')}" if groups else ""
        raise UserError(f"{where} has no {kind.__name__.lower()} {name}; it has {names}{cure}")
    return item


def _groups_with(root: h5py.Group, name: str, kind: type[Member], where: str) -> Iterator[str]:
    """The top-level groups of a file that have a member of this name and kind. Empty if `root` is a group itself."""
    for group in root if root.name == "/" and not name.startswith("/") else ():
        with suppress(UserError):  # the bytes of the member are in another file
            if isinstance(group, str) and isinstance(look_up(root, f"{group}/{name}", where), kind):
                yield group


def look_up(root: h5py.Group, name: str, where: str) -> Any:
    """The group or dataset that a path leads to, or None. Raises UserError if its bytes are in another file.

    The other file is not opened: it may be private, or a pipe that never ends.
    """
    elsewhere = UserError(f"{where}: {name} takes its bytes from other files; name those files")
    item = _follow(root, name, elsewhere)
    for source in item.virtual_sources() if isinstance(item, h5py.Dataset) and item.is_virtual else ():
        is_here = source.file_name == "." and "%" not in source.dset_name  # with a %, the name is a pattern
        part = _follow(root["/"], source.dset_name, elsewhere) if is_here else None
        if not isinstance(part, h5py.Dataset) or part.is_virtual:
            raise elsewhere
    return item


def _follow(root: h5py.Group, name: str, elsewhere: UserError) -> Any:
    """The item that a path leads to, found step by step. HDF5 itself would follow links into other files."""
    item: Any = root["/"] if name.startswith("/") else root
    steps = name.split("/")[::-1]
    n_links = 0
    while steps and n_links <= MAX_LINKS:
        if (step := steps.pop()) in ("", "."):
            continue
        try:
            link = item.get(step, getlink=True) if isinstance(item, h5py.Group) else None
        except (TypeError, ValueError):  # a kind of link that h5py does not know; a name that is no text
            link = None
        if isinstance(link, h5py.ExternalLink):
            raise elsewhere
        if isinstance(link, h5py.SoftLink):
            n_links += 1
            item = root["/"] if link.path.startswith("/") else item
            steps += link.path.split("/")[::-1]
        else:
            item = item[step] if link else None
    if isinstance(item, h5py.Dataset) and item.external:
        raise elsewhere
    return None if steps else item


def refuse_large(name: str, n_bytes: int) -> None:
    """Raise UserError if `n_bytes` are more than the free memory."""
    if n_bytes > GIB and n_bytes > (free := free_host_bytes()):
        raise UserError(f"{name} takes {format_bytes(n_bytes)} of memory, and {format_bytes(free)} are free")


def dtype_of(data: h5py.Dataset) -> np.dtype:
    """The type as h5py shows it; for elements that are arrays, the type of their numbers. Numbers without a type in
    NumPy or torch are opaque bytes."""
    with suppress(TypeError):
        dtype = data.dtype.base
        if dtype.kind not in "buif" or dtype.itemsize <= 8:
            return dtype
    return np.dtype((np.void, data.id.get_type().get_size()))


def attributes_of(item: h5py.Group) -> dict[str, Any]:
    """The attributes as plain Python values: str, int, float, bool, and lists.

    Other attributes, such as references and lists of unequal length, are left out: no model needs them.
    """
    attributes = {}
    for name in item.attrs:
        with suppress(TypeError, ValueError):  # h5py, JSON and NumPy raise them for unknown types
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
