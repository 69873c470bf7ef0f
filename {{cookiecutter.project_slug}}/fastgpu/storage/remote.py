"""A file in a bucket or on a web server, which is read by way of a local copy with holes.

Each part of it is fetched once, when a reader asks for it, and written to its place in the copy. From there on it is
read like any local file. The file system keeps the account: what was never fetched is a hole (SEEK_HOLE). Whole pages
are written, so that after a kill, too, a page is either a hole or right. All processes of a machine share the copy.
"""

import glob
import hashlib
import io
import os
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from fnmatch import filter as matching
from functools import cache, lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import MIB, format_bytes
from fastgpu.storage.file import PAGE_BYTES, RESTORE, OpenFile

CACHE = "data/cache"
"""The folder of the copies, unless data.cache names another one."""
PIECE_BYTES = 1 << 20
"""h5py reads the metadata in small parts, which are fetched in pieces of this size."""
MAX_PAGE_BYTES = 4 << 20
KEEP_FREE_BYTES = 1 << 30
"""A copy leaves so much of its disk free."""
MAX_REQUESTS = 16
"""Requests at the same time while a run starts. Later, each reader thread sends one."""
OPENING_RETRIES, READING_RETRIES = 3, 10
"""How often a request is sent again: a wrong name is told soon, and a server that is overloaded is waited for."""
TIMES = {"connect_timeout": timedelta(seconds=10), "read_timeout": timedelta(seconds=30), "timeout": "10m"}
CURE = "check the URL, and the credentials and the region in the environment"

_opened: dict[str, "RemoteFile"] = {}


class RemoteFile(OpenFile):
    """An object that is open for reading. A fork cannot use it: the threads of the client are those of this process."""

    is_full = False
    """Whether nothing more is written to any copy, because a disk is full."""

    def __init__(self, url: str, where: str, folder: str):
        """where: names it in messages. folder: of the copies. Raises UserError."""
        self._bucket, _, self._name = url.rpartition("/")
        head = _request(where, CURE, lambda obstore: obstore.head(_client(self._bucket, OPENING_RETRIES), self._name))
        self._version = _version_of(head)
        self._process = os.getpid()
        self.n_requests, self.n_fetched_bytes = 1, 0
        copy = f"{folder}/{hashlib.sha256(f'{url} {self._version}'.encode()).hexdigest()[:16]}.h5"
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self._page_bytes = find_page_bytes(folder)
            if not self._page_bytes:
                warn(f"the file system of {folder} (data.cache) has no holes, so {url} is fetched in each epoch")
                copy = os.devnull
            self._writer = io.FileIO(os.open(copy, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+")
            if self._page_bytes:
                self._writer.truncate(head["size"])
        except OSError as error:
            cure = "set data.cache to a folder on a disk of this machine"
            raise UserError(f"{where} needs a local copy, but {folder} cannot be written ({error}); {cure}") from None
        super().__init__(copy)
        self.path = url
        self.size = head["size"]

    def check_unchanged(self) -> None:
        """Each request does."""

    def open_h5(self) -> h5py.File:
        return h5py.File(_Metadata(self), "r")

    def local_until(self, offset: int) -> int:
        """The first byte from `offset` on that the copy does not have."""
        return os.lseek(self._writer.fileno(), offset, os.SEEK_HOLE) if self._page_bytes else offset

    def fetch(self, offset: int, count: int, check: Callable[[np.ndarray], None] | None = None) -> np.ndarray:
        """(count,) uint8: the bytes from `offset` on, which are written to the copy, too.

        check: raises an error if they are damaged, so that they are not written. Raises UserError if they cannot be
        had.
        """
        if os.getpid() != self._process:
            raise UserError(f"{self.path} was opened before a fork, which cannot read it; open it in the fork")
        page_bytes = self._page_bytes or PAGE_BYTES
        begin = offset - offset % page_bytes
        end = min(self.size, -(-(offset + count) // page_bytes) * page_bytes)
        cure = f"{CURE}, then go on with run.resume=auto"
        pages = _request(self.path, cure, lambda obstore: self._get(obstore, begin, end))
        self.n_requests += 1
        self.n_fetched_bytes += len(pages)
        content = pages[offset - begin : offset - begin + count]
        if check:
            check(content)
        if self._page_bytes and not RemoteFile.is_full:
            self._write(pages, begin)
        return content

    def _get(self, obstore: Any, begin: int, end: int) -> np.ndarray:
        tag = self._version[0]
        match = {"if_match": tag} if tag and not tag.startswith("W/") else {}  # a weak one matches nothing
        client = _client(self._bucket, READING_RETRIES)
        found = None
        with suppress(obstore.exceptions.PreconditionError):
            found = obstore.get(client, self._name, options={"range": (begin, end), **match})
        if found is None or _version_of(found.meta) != self._version:  # some servers do not know If-Match
            _opened.pop(self.path, None)
            raise UserError(f"{self.path} was changed while in use; {RESTORE}")
        pages = np.frombuffer(found.bytes(), np.uint8)
        if len(pages) != end - begin:
            raise UserError(f"{self.path}: {len(pages)} bytes came instead of {end - begin}; {RESTORE}")
        return pages

    def _write(self, pages: np.ndarray, begin: int) -> None:
        try:
            disk = os.fstatvfs(self._writer.fileno())
            free_bytes = disk.f_bavail * disk.f_frsize
            if free_bytes < KEEP_FREE_BYTES + len(pages):
                raise OSError(f"{format_bytes(free_bytes)} of its disk are free")
            n_written = 0
            while n_written < len(pages):
                n_written += os.pwrite(self._writer.fileno(), pages[n_written:].data, begin + n_written)
        except OSError as error:
            RemoteFile.is_full = True
            warn(f"data.cache stays as it is ({error}): what it does not have is fetched in each epoch")

    def read_piece(self, number: int) -> bytes:
        """A piece of the metadata."""
        begin = number * PIECE_BYTES
        count = min(PIECE_BYTES, self.size - begin)
        is_local = self.local_until(begin) >= begin + count
        return (self.read if is_local else self.fetch)(begin, count).tobytes()


class _Metadata(io.RawIOBase):
    """A remote file as h5py reads it."""

    def __init__(self, file: RemoteFile):
        self._size = file.size
        self._piece = lru_cache(64)(file.read_piece)
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, out: Any) -> int:
        n_read = 0
        while n_read < len(out) and self._at < self._size:
            number, begin = divmod(self._at, PIECE_BYTES)
            part = self._piece(number)[begin : begin + len(out) - n_read]
            out[n_read : n_read + len(part)] = part
            self._at += len(part)
            n_read += len(part)
        return n_read


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as s3://bucket/file.h5."""
    return "://" in path


def open_remote(url: str, where: str, folder: str = CACHE) -> RemoteFile:
    """The file of a URL, which a process opens once. See `RemoteFile`."""
    if url not in _opened:
        _opened[url] = RemoteFile(url, where, folder)
    return _opened[url]


def open_ahead(key: str, urls: Iterable[str], folder: str) -> None:
    """Open files side by side and fetch the beginning of each, since h5py reads one file after the other."""
    with ThreadPoolExecutor(MAX_REQUESTS) as threads:
        for _ in threads.map(lambda url: open_remote(url, f"{key}: {url}", folder).read_piece(0), urls):
            pass


def expand(key: str, pattern: str) -> list[str]:
    """The URLs that a pattern such as s3://bucket/part-*.h5 matches. Raises UserError for none."""
    bucket, _, name = pattern.rpartition("/")
    if not name or glob.has_magic(bucket):
        raise UserError(f"{key}: {pattern} should end in the name of a file, or in a pattern such as part-*.h5")
    if not glob.has_magic(name):
        return [pattern]
    listed = _request(
        f"{key}: {bucket}", CURE, lambda obstore: obstore.list_with_delimiter(_client(bucket, OPENING_RETRIES))
    )
    names = sorted(matching([each["path"].rpartition("/")[2] for each in listed["objects"]], name))
    if not names:
        raise UserError(f"{key}: no file matches {pattern}")
    return [f"{bucket}/{name}" for name in names]


def n_requests() -> int:
    """How many requests this process has sent until now."""
    return sum(file.n_requests for file in _opened.values())


def counters() -> dict[str, float]:
    """{tag: value}: what this process has fetched until now, and how much of its files is on this machine."""
    files = list(_opened.values())
    n_local = sum(512 * os.fstat(file._writer.fileno()).st_blocks for file in files)
    counts = {
        "storage/requests": float(n_requests()),
        "storage/fetched_mib": sum(file.n_fetched_bytes for file in files) / MIB,
        "storage/local_pct": 100 * n_local / max(1, sum(file.size for file in files)),
    }
    return counts if files else {}


def find_page_bytes(folder: str) -> int:
    """The unit in which the file system of a folder keeps account of holes. 0: it does not."""
    with tempfile.TemporaryFile(dir=folder) as file:
        descriptor, at = file.fileno(), 2 * MAX_PAGE_BYTES
        os.truncate(descriptor, 2 * at)
        os.pwrite(descriptor, bytes(1), at)
        begin, end = os.lseek(descriptor, 0, os.SEEK_DATA), os.lseek(descriptor, at, os.SEEK_HOLE)
    return max(PAGE_BYTES, end - at) if begin == at and end - at <= MAX_PAGE_BYTES else 0


def _request(where: str, cure: str, request: Callable[[Any], Any]) -> Any:
    """What a request gives, called with obstore. Raises UserError for what it raises."""
    if not find_spec("obstore"):
        raise UserError(f"{where} is read by obstore: pip install -c constraints.txt obstore")
    obstore = import_module("obstore")
    try:
        return request(obstore)
    except UserError:
        raise
    except FileNotFoundError:
        raise UserError(f"{where} does not exist") from None
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        reason = " ".join(str(error).partition("\n\nDebug source")[0].split())[:300]
        raise UserError(f"{where} cannot be read: {reason}; {cure}") from None


@cache
def _client(bucket: str, max_retries: int) -> Any:
    """It takes credentials, regions and endpoints from the environment."""
    retries = {"max_retries": max_retries, "retry_timeout": timedelta(minutes=3)}
    store = import_module("obstore.store")
    return store.from_url(bucket, client_options={"allow_http": True, **TIMES}, retry_config=retries)


def _version_of(meta: Any) -> tuple[Any, ...]:
    """What must not change while an object is in use."""
    return meta["e_tag"], meta["size"], meta["last_modified"]
