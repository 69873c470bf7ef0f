"""A file in a bucket or on a web server, which is read through a local copy.

Each byte range is fetched once, when a reader asks for it, and written to its place in the copy (local_copy.py). After
that it is read like any local file.
"""

import atexit
import glob
import hashlib
import io
import os
import re
import threading
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from fnmatch import filter as matching
from functools import cache, lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from urllib.parse import quote, unquote

import h5py
import numpy as np

from fastgpu.process.launch import LEFT_OUT, USER, UserError, warn, without_secrets
from fastgpu.process.machine import MIB
from fastgpu.process.project import install_command
from fastgpu.storage.file import PAGE_BYTES, RESTORE, OpenFile, side_by_side
from fastgpu.storage.local_copy import LocalCopy

CACHE = "data/cache"
"""The folder of the copies, unless data.cache names another folder."""
PIECE_BYTES = 1 << 20
"""Size of the pieces in which metadata is fetched. h5py reads metadata in much smaller reads."""
OPENING_RETRIES = 3
"""Number of retries of a request while a file is opened: few, so that a wrong name fails fast."""
PATIENCE = timedelta(minutes=3)
"""Time during which requests are retried, to survive a server that is overloaded or gone."""
PAUSES = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=15), "base": 2}
TIMES = {"connect_timeout": timedelta(seconds=10), "read_timeout": timedelta(seconds=30), "timeout": "10m"}
CURE = "check the URL, and the credentials and the region in the environment"
CURES = {
    "range request": "its server sends whole files only: download it, and name the file",
    "unable to recognise url": "use s3://, gs://, az:// or https://",
    "http error: error": "check the host, the network, and the certificate of the server",
}
"""{text in an error that does not come from the server: what to try}"""
N_LOCKS = 1021
"""Number of locks: a thread that fetches bytes takes the lock of their offset. It is large, so that 64 threads rarely
share a lock, and prime, because the offsets of blocks are often multiples of a power of two."""
CLOSE_S = 1.0
Fetched = list[tuple[int, np.ndarray]]
"""(number of the first byte, bytes) of each range that was fetched."""

_locks: defaultdict[int, threading.Lock] = defaultdict(threading.Lock)
os.register_at_fork(after_in_child=_locks.clear)  # a fork has no threads that could release locks
opened: dict[str, "RemoteFile"] = {}
"""{URL: the file}: what this process has opened."""
_held = threading.local()
"""`pages`: (file, first byte, bytes) that this thread has fetched for h5py, for the case that the copy lacks them."""


class RemoteFile(OpenFile):
    """An object that is open for reading. A fork can read only local bytes."""

    has_warned = False
    """Whether a warning was printed that a copy cannot be written."""

    def __init__(self, url: str, where: str, folder: str):
        """where: the name of the file in messages. folder: of the copies. Raises UserError."""
        bucket, self._name, query = _split(where, url)
        self._bucket = bucket + query
        # Ask for one byte: a server refuses HEAD for a URL that is signed for GET.
        _, self._version = _request(where, partial(self._ask, 0, 1, is_opening=True))
        self.n_requests, self.n_fetched_bytes = 1, 0
        self._prepared: dict[int, int] = {}  # offset -> number of bytes
        self._lock = threading.Lock()
        self._expected = np.empty((0, 2), np.int64)
        self._n_local = 0  # number of expected chunks, from the first on, that are known to be local
        tag, _, modified = self._version
        if tag is None and not modified.timestamp():  # obstore has 1970 for none
            why = "its server says neither an ETag nor a date, so nobody would notice that it has changed"
            raise UserError(f"{where} cannot be read: {why}; download it")
        self._copy = _open_copy(folder, where, without_secrets(url), self._version)
        super().__init__(self._copy.descriptor, name=url)
        self.cure = f"if the file is whole there, its copy is damaged: rm {self._copy.path}*"
        # Runs after the reader threads have ended: loaders register later, and atexit runs in reverse order.
        atexit.register(self._close_h5)
        # The metadata is at both ends of a file. It is fetched now, because h5py reads one file at a time.
        for number in sorted({0, max(0, self.size - 1) // PIECE_BYTES}):
            self.read_piece(number)

    def check_unchanged(self) -> None:
        """Check the copy. The version of the object is checked by each request."""
        self._copy.check_unchanged()

    def open_h5(self) -> h5py.File:
        try:
            return h5py.File(_Metadata(self), "r")
        except OSError:
            if not self._copy.is_writable:
                raise
        self._copy.forget(min(PIECE_BYTES, self.size))  # perhaps a proxy has sent a web page instead
        return h5py.File(_Metadata(self), "r")

    def _close_h5(self) -> None:
        """Close the file before Python ends: HDF5 ends later, and would call `_Metadata`."""
        if self._h5:
            thread = threading.Thread(target=self._h5.close, daemon=True)
            thread.start()
            thread.join(CLOSE_S)  # a reader that hangs may hold the lock of the HDF5 library

    def is_prepared(self, offset: int) -> bool:
        return offset in self._prepared

    def expect(self, chunks: np.ndarray) -> None:
        with self._lock:  # the groups of a file are opened side by side
            self._expected = np.concatenate([self._expected, chunks])

    @property
    def is_local(self) -> bool:
        expected, n_local = self._expected, self._n_local
        while n_local < len(expected) and self._has(*expected[n_local].tolist()):
            n_local += 1
        self._n_local = n_local
        return n_local == len(expected)

    def _has(self, offset: int, count: int) -> bool:
        """Whether these bytes are in the copy."""
        return self._copy.has(*self._pages_of(offset, count))

    def prepare(self, offset: int, count: int, check: Callable[[np.ndarray], None] | None = None) -> np.ndarray | None:
        """See `OpenFile`. Each process checks bytes once, whichever process has fetched them. Raises UserError."""
        if self._prepared.get(offset, 0) >= count:
            return None
        fetched: Fetched = []
        with _locks[offset // PAGE_BYTES % N_LOCKS]:
            if check or not self._has(offset, count):
                begin, end = self._pages_of(offset, count)
                within = slice(offset - begin, offset - begin + count)
                pages, fetched = self._read_or_get(begin, end)
                _held.pages = self, begin, pages
                if check:
                    try:
                        check(pages[within])
                    except UserError:
                        if sum(len(each) for _, each in fetched) == len(pages):
                            raise
                        # The damage is in local bytes: fetch all of them again.
                        pages = self._get(begin, end)
                        fetched = [(begin, pages)]
                        _held.pages = self, begin, pages
                        check(pages[within])
            if self._keep(fetched, offset, count):
                self._prepared[offset] = count
                _held.pages = None
        return pages[within] if fetched else None

    def _pages_of(self, offset: int, count: int) -> tuple[int, int]:
        return offset - offset % PAGE_BYTES, min(self.size, -(-(offset + count) // PAGE_BYTES) * PAGE_BYTES)

    def _read_or_get(self, begin: int, end: int) -> tuple[np.ndarray, Fetched]:
        """The bytes from `begin` to `end`, and the ranges in them that had to be fetched."""
        pages = np.empty(end - begin, np.uint8)
        fetched: Fetched = []
        at = begin
        while at < end:
            first, last = self._copy.missing(at, end)
            if at < first:
                self.preadv([pages[at - begin : first - begin].data], at)
            if first < last:
                content = pages[first - begin : last - begin]
                content[:] = self._get(first, last)
                fetched.append((first, content))
            at = last
        return pages, fetched

    def _ask(self, begin: int, end: int, obstore: Any, *, is_opening: bool = False) -> tuple[Any, tuple[Any, ...]]:
        """These bytes, and the version of the object, which must not change while the object is in use."""
        client = client_of(self._bucket, is_opening=is_opening)
        found = obstore.get(client, self._name, options={"range": (begin, end)})
        return found.bytes(), (found.meta["e_tag"], found.meta["size"], found.meta["last_modified"])

    def _get(self, begin: int, end: int) -> np.ndarray:
        ask = partial(self._ask, begin, end)
        content, version = _request(self.path, ask, then=", then continue with run.resume=auto")
        if version != self._version:
            opened.pop(self.path, None)
            raise UserError(f"{self.path} was changed while in use; {RESTORE}")
        if len(content) != end - begin:
            raise UserError(f"{self.path}: {len(content)} bytes came instead of {end - begin}; {RESTORE}")
        self.n_requests += 1
        self.n_fetched_bytes += len(content)
        return np.frombuffer(content, np.uint8)

    def _keep(self, fetched: Fetched, offset: int, count: int) -> bool:
        """Write the fetched bytes to the copy; see `LocalCopy.write`. False: the copy cannot be written now."""
        try:
            for begin, pages in fetched:
                self._copy.write(pages, begin, offset, count)
        except OSError as error:
            if not RemoteFile.has_warned:
                warn(f"data.cache cannot be written ({error}): blocks that it lacks are fetched in each epoch")
            RemoteFile.has_warned = True
            return False
        return True

    def at_hand(self, offset: int, count: int) -> np.ndarray | None:
        """(count,) uint8 for h5py, valid until this thread reads again. None: the bytes have to be fetched."""
        file, begin, pages = getattr(_held, "pages", None) or (None, 0, np.empty(0, np.uint8))
        if file is self and begin <= offset and offset + count <= begin + len(pages):
            return pages[offset - begin : offset - begin + count]
        return self.read(offset, count) if self._has(offset, count) else None

    def read_piece(self, number: int) -> bytes:
        """A piece of the metadata, fetched if it is not local."""
        begin = number * PIECE_BYTES
        pages, fetched = self._read_or_get(begin, min(self.size, begin + PIECE_BYTES))
        self._keep(fetched, begin, len(pages))
        return pages.tobytes()


class _Metadata(io.RawIOBase):
    """The file object through which h5py reads a remote file."""

    def __init__(self, file: RemoteFile):
        self._file = file
        self._piece = lru_cache(64)(file.read_piece)
        self._at = 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._file.size)[whence]
        return self._at

    def readinto(self, out: Any) -> int:
        count = max(0, min(len(out), self._file.size - self._at))
        content = self._file.at_hand(self._at, count)
        if content is None:
            number, begin = divmod(self._at, PIECE_BYTES)
            pieces = map(self._piece, range(number, -(-(self._at + count) // PIECE_BYTES)))
            content = np.frombuffer(b"".join(pieces)[begin : begin + count], np.uint8)
        out[:count] = content
        self._at += count
        return count


def open_remote(url: str, where: str, folder: str) -> RemoteFile:
    """The file of a URL. A process opens each URL once. See `RemoteFile`."""
    with _locks[hash(url) % N_LOCKS]:
        if url not in opened:
            opened[url] = RemoteFile(url, where, folder or CACHE)
        return opened[url]


def expand(key: str, pattern: str) -> list[str]:
    """The URLs that a pattern such as s3://bucket/part-*.h5 matches. Raises UserError if there are none."""
    bucket, name, query = _split(f"{key}: {pattern}", pattern)
    if not name or glob.has_magic(bucket):
        raise UserError(f"{key}: {pattern} should end in the name of a file, or in a pattern such as part-*.h5")
    if query or not glob.has_magic(name):
        return [pattern]
    listed = _request(
        f"{key}: {bucket}", lambda obstore: obstore.list_with_delimiter(client_of(bucket, is_opening=True))
    )
    names = sorted(matching([each["path"].rpartition("/")[2] for each in listed["objects"]], name))
    if not names:
        raise UserError(f"{key}: no file matches {pattern}")
    return [f"{bucket}/{quote(name) if _is_http(bucket) else name}" for name in names]


def counters() -> dict[str, float]:
    """{tag: value}: requests and bytes of this process so far, and the share of its files that is on this machine."""
    files = list(opened.values())
    n_local = sum(512 * os.fstat(file._raw.fileno()).st_blocks for file in files)
    counts = {
        "storage/requests": float(sum(file.n_requests for file in files)),
        "storage/fetched_mib": sum(file.n_fetched_bytes for file in files) / MIB,
        "storage/local_pct": min(100.0, 100 * n_local / max(1, sum(file.size for file in files))),
    }
    return counts if files else {}


def _is_http(url: str) -> bool:
    return url.lower().startswith(("http://", "https://"))


def _split(where: str, url: str) -> tuple[str, str, str]:
    """(bucket, name, query) of a URL. A client is made for bucket and query. Raises UserError."""
    if USER.search(url):
        variables = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for example"
        raise UserError(f"{where}: a user and a password in a URL are not sent; set {variables}, in the environment")
    path, mark, query = url.partition("?") if _is_http(url) else (url, "", "")
    if query == LEFT_OUT:
        raise UserError(f"{where}: what follows the ? may be secret and was not recorded; give the whole URL again")
    bucket, _, name = path.rpartition("/")
    return bucket, unquote(name) if _is_http(url) else name, mark + query


def _open_copy(folder: str, where: str, url: str, version: tuple[Any, ...]) -> LocalCopy:
    of_url, of_version = (hashlib.sha256(f"{each}".encode()).hexdigest()[:16] for each in (url, version))
    path = f"{folder}/{of_url}-{of_version}.h5"
    try:
        copy = LocalCopy(path, version[1])
    except OSError as error:
        cure = "set data.cache to a folder on a disk of this machine"
        raise UserError(f"{where} needs a local copy, but {folder} cannot be written ({error}); {cure}") from None
    stale = {*glob.glob(f"{glob.escape(folder)}/{of_url}-*.h5")} - {path}  # noqa: PTH207 (these are texts)
    if stale:
        names = " ".join(f"{each}*" for each in sorted(stale))
        warn(f"{url} has changed since it was copied; if no run reads what it was: rm {names}")
    return copy


def _request(where: str, request: Callable[[Any], Any], then: str = "") -> Any:
    """The result of `request`, which is called with the module obstore. Raises UserError for its errors.

    then: the end of the message, after the cure.
    """
    if not find_spec("obstore"):
        raise UserError(f"{where} is read by obstore: {install_command('cloud')}")
    if _process() != os.getpid():  # the threads of obstore are not in a fork
        cure = "use loader.num_workers=0, or copy the file to a disk"
        raise UserError(f"{where} cannot be fetched by a fork of a process that has read URLs; {cure}")
    obstore = import_module("obstore")
    try:
        if threading.current_thread() is threading.main_thread():
            return side_by_side(request, [obstore])[0]  # Ctrl-C does not end a call of obstore
        return request(obstore)
    except UserError:
        raise
    except (obstore.exceptions.BaseError, ValueError, OSError) as error:
        text, _, source = str(error).partition("\n\nDebug source")
        if isinstance(error, FileNotFoundError) and "405" not in text:
            raise UserError(f"{where} does not exist") from None
        # The reason why a request was not sent is at the end of the data structures in obstore's message.
        if source := source.partition("HttpError")[2]:
            last = re.findall('"(.+?)"', source) or re.split("error: |source: ", source)
            text = f"{text} ({' '.join(re.findall('[^(){}, ]+', ' '.join(last[-1].split())))})"
        cure = next((cure for sign, cure in CURES.items() if sign in text.lower()), CURE)
        text = without_secrets(" ".join(text.split()))[:300]
        raise UserError(f"{where} cannot be read: {text}; {cure}{then}") from None


@cache
def _process() -> int:
    """The process that uses obstore: this process, or the process that it was forked from."""
    return os.getpid()


@cache
def client_of(bucket: str, *, is_opening: bool) -> Any:
    """The client of a bucket. It takes credentials, regions and endpoints from the environment."""
    retries = {"max_retries": OPENING_RETRIES if is_opening else 1000, "retry_timeout": PATIENCE}
    store = import_module("obstore.store")
    backoff = {} if is_opening else {"backoff": PAUSES}
    return store.from_url(bucket, client_options={"allow_http": True, **TIMES}, retry_config=retries | backoff)
