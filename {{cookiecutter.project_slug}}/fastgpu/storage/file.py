"""One open HDF5 file, read with system calls, through a mapping of the file, or through h5py."""

import mmap
import os
import random
import resource
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from functools import cached_property
from io import FileIO
from math import ceil
from typing import TypeVar

import h5py
import numpy as np

from fastgpu.process.launch import UserError

READ_AHEAD_BYTES = 128 << 10
"""Maximum number of bytes that Linux reads ahead for one `posix_fadvise`."""
PAGE_BYTES = 4096
"""Reads around the page cache begin and end at multiples of this. No common disk asks for more."""
HUGE_PAGE_BYTES = 2 << 20
FEW_FILES, OWN_FILES, MANY_FILES = 1 / 16, 1 / 4, 3 / 4
"""Fractions of the limit of open files. Up to the first fraction, a file may have several descriptors, for a mapping or
for h5py; up to the second fraction, each reader thread opens a file for itself. Files beyond the third fraction are
refused: the remaining descriptors are for checkpoints and for connections between ranks."""
O_DIRECT: int = getattr(os, "O_DIRECT", 0)
KNOWS_PAGE_CACHE = hasattr(os, "RWF_NOWAIT") and hasattr(os, "posix_fadvise")
"""Whether the system can tell if bytes are in the page cache, as Linux can. Otherwise system calls read everything."""
N_SEEN, SEEN_BYTES = 64, 64
"""The first bytes of the first reads of a file are kept, to notice changes: how many reads, and how many bytes."""
RESTORE = "restore the file, then continue with run.resume=auto"
SIDE_BY_SIDE, BELOW = 64, 4
"""Number of threads that wait for a network while a run starts, and number of threads that each of them may start.
After the start, the reader threads wait for the network."""
Item = TypeVar("Item")
Result = TypeVar("Result")

_thread_local = threading.local()


def split_group(path: str) -> tuple[str, str]:
    """(file, group) of `file.h5::/group`; the group of a plain `file.h5` is "/"."""
    file, _, group = path.partition("::")
    return file, group or "/"


def is_url(path: str) -> bool:
    """Whether a path is a URL, such as s3://bucket/file.h5."""
    return "://" in path


class OpenFile:
    """A file that is open for reading.

    Threads and forks may share its descriptor, because `preadv` does not use the position of the file. But a bucket
    that is mounted as a folder serves the reads of one descriptor sequentially, so each thread has its own descriptor.
    """

    cure = ""
    """The cure in the message if the HDF5 library cannot read the file. Empty: to write the file again."""
    n_requests = 0
    """Number of network requests so far."""

    def __init__(self, path: str | int, *, name: str = "", around_page_cache: bool = False):
        """path: of a file, or the descriptor of one. name: to show instead of the path. around_page_cache: read
        directly from the disk (O_DIRECT), if the file system can."""
        self.path = name or str(path)
        self._raw = FileIO(path)
        self._source = self._raw
        # Descriptors are numbered from 0. If there are many files, the later files have only one descriptor each.
        number = self._raw.fileno()
        if number > (limit := _limit_of_files(number)) * MANY_FILES:
            cure = "raise it with ulimit -n, or merge some hundred files into each new file: python convert.py repack"
            raise UserError(f"{self.path} is one file too many for the limit of {limit} open files; {cure}")
        self._is_among_few = number <= limit * FEW_FILES
        if around_page_cache and O_DIRECT and self._is_among_few:
            with suppress(OSError):  # raised by a file system without direct reads
                direct = FileIO(os.open(self.path, os.O_RDONLY | os.O_CLOEXEC | O_DIRECT), "rb")
                os.preadv(direct.fileno(), [mmap.mmap(-1, PAGE_BYTES)], 0)
                self._source = direct
        self.is_direct = self._source is not self._raw
        self._own = threading.local()
        self._own.file = self._source
        self._status = os.fstat(self._raw.fileno())
        self.size = self._status.st_size
        self._seen = {0: os.pread(self._raw.fileno(), SEEN_BYTES, 0)}
        """{offset: bytes of the file at this offset when it was first read}"""
        self._rng = random.Random(0)
        self._h5: h5py.File | None = None

    def check_unchanged(self) -> None:
        """Raise UserError if the file was written to since it was opened.

        A write changes st_mtime, which the writing program can set back, and st_ctime, which it cannot set back. But
        st_ctime also changes with mode, owner, attributes, links, names and a new atime. If only st_ctime has changed,
        the bytes that were read first are read again. This detects a file that was rewritten as a whole, but not a file
        in which a few rows were written and st_mtime was set back. A file that is moved, removed or replaced is read to
        its end.
        """
        old, new = self._status, os.fstat(self._raw.fileno())
        is_written = (new.st_mtime_ns, new.st_size) != (old.st_mtime_ns, old.st_size)
        if new.st_ctime_ns != old.st_ctime_ns and not is_written:
            seen = self._seen.copy().items()
            is_written = any(os.pread(self._raw.fileno(), len(content), at) != content for at, content in seen)
        if is_written:
            raise UserError(f"{self.path} was changed while in use; {RESTORE}")
        self._status = new

    def _note(self, offset: int, content: np.ndarray | memoryview) -> None:
        """Keep the first bytes of a read, for `check_unchanged`."""
        if len(self._seen) < N_SEEN:
            self._seen[offset] = content[:SEEN_BYTES].tobytes()

    def expect(self, chunks: np.ndarray) -> None:
        """Announce the bytes that readers may ask for. chunks: (chunks, 2) int64, first byte and number of bytes."""

    @property
    def is_local(self) -> bool:
        """Whether all expected bytes are on this machine, whichever process fetched them."""
        return True

    def prepare(self, offset: int, count: int, check: Callable[[np.ndarray], None] | None = None) -> np.ndarray | None:
        """Make sure that these bytes are on this machine, so that the other methods can read them. Thread-safe.

        Returns the bytes, (count,) uint8, if they were fetched by this call. check: a function that raises UserError if
        the bytes are damaged. A local file needs no preparation.
        """
        return None

    def is_prepared(self, offset: int) -> bool:
        """Whether this process has prepared the bytes from this offset on."""
        return True

    def _descriptor(self) -> int:
        """The descriptor of this thread, which is closed when the thread ends; a shared one if there are many files."""
        if not hasattr(self._own, "file"):
            self._own.file = self._source
            with suppress(OSError):  # the limit of open files is reached
                flags = os.O_RDONLY | os.O_CLOEXEC | (O_DIRECT if self.is_direct else 0)
                # This path leads to the file that was opened, even if another file has its name now.
                own = FileIO(os.open(f"/proc/self/fd/{self._source.fileno()}", flags))
                if own.fileno() <= _limit_of_files(own.fileno()) * OWN_FILES:
                    self._own.file = own
        return self._own.file.fileno()

    def preadv(self, targets: list[memoryview], offset: int) -> None:
        """Fill the targets, in their order, with the bytes from `offset` on.

        Raises UserError if the file ends before the targets are full.
        """
        descriptor = self._raw.fileno() if self.is_direct else self._descriptor()
        start, first = offset, targets[0]
        missing = sum(target.nbytes for target in targets)
        while (n_read := os.preadv(descriptor, targets, offset)) < missing:
            if n_read == 0:
                raise UserError(f"{self.path} ends at byte {offset}: it was cut while in use; {RESTORE}")
            offset += n_read
            missing -= n_read
            while n_read >= targets[0].nbytes:  # a signal or the limit of 2 GiB ended the call early
                n_read -= targets.pop(0).nbytes
            targets[0] = targets[0][n_read:]
        self._note(start, first)

    def read(self, offset: int, count: int) -> np.ndarray:
        """(count,) uint8 in scratch memory of this thread, valid until the thread calls `read` again."""
        begin = offset - offset % PAGE_BYTES if self.is_direct else offset
        needed = offset + count - begin
        if self.is_direct:
            size = ceil(needed / PAGE_BYTES) * PAGE_BYTES
            memory = scratch(size + 2 * HUGE_PAGE_BYTES, "direct")  # large enough for NumPy to ask for huge pages
            start = -memory.ctypes.data % HUGE_PAGE_BYTES  # a disk fills huge pages with few requests
            memory = memory[start : start + size]
        else:  # not aligned: a copy is slow if its target is, within a page, slightly behind its source
            memory = scratch(needed, "file")
        n_read = os.preadv(self._descriptor(), [memory.data], begin)
        if n_read < needed:  # a signal or the limit of 2 GiB ended the call early, or the file was cut
            self.preadv([memory[n_read:needed].data], begin + n_read)
        content = memory[offset - begin : needed]
        self._note(offset, content)
        return content

    def cached(self, offset: int, count: int) -> np.ndarray | None:
        """(count,) uint8, a view of the mapped file, if these bytes are in the page cache.

        Otherwise None, and the kernel begins to read the bytes from the disk, unless the file is read around the page
        cache. The kernel is asked about one page, a random one each time. Bytes that are read together are evicted
        together, except for a page that was asked about: asking counts as a use of the page, and starts to read it if
        it is missing. A wrong guess costs page faults.
        """
        if self.is_direct or not count or not KNOWS_PAGE_CACHE:
            return None
        byte = offset + self._rng.randrange(count)
        descriptor = self._descriptor()
        try:
            is_cached = os.preadv(descriptor, [bytearray(1)], byte, os.RWF_NOWAIT)  # 0: it was cut just now
            if not is_cached or not self._is_among_few:
                return None
            content = self.mapped[offset : offset + count]
            self._note(offset, content)
            return content
        except OSError:  # not in memory, or on a network file system, for which Linux cannot tell
            for start in range(offset, offset + count, READ_AHEAD_BYTES):
                os.posix_fadvise(descriptor, start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)
            return None

    @cached_property
    def mapped(self) -> np.ndarray:
        """(bytes,) uint8: the mapped file. Each page that is not in memory costs a page fault."""
        return np.frombuffer(mmap.mmap(self._raw.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)

    def open_h5(self) -> h5py.File:
        """The file as h5py reads it, with a descriptor of its own. Raises what h5py raises."""
        return open_to_read(self.path)

    def read_h5(self, dataset: str, start: int, n_rows: int) -> np.ndarray:
        """Up to `n_rows` rows from `start` on, read by the HDF5 library under its one lock."""
        try:
            h5 = self._h5 or self.open_h5()
            self._h5 = h5 if self._is_among_few else None
            return np.asarray(h5[dataset][start : start + n_rows])
        except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            text = " ".join(str(error).split())
            raise UserError(f"{self.path}: {dataset} from row {start} on cannot be read ({text}); {RESTORE}") from None


def open_to_read(path: str) -> h5py.File:
    """The file as h5py reads it. Raises what h5py raises: BlockingIOError if a process that writes has locked it."""
    try:
        return h5py.File(path, "r")
    except BlockingIOError:
        raise
    except OSError:  # perhaps a file system without locks, such as NFS without a lock daemon: reading needs no lock
        return h5py.File(path, "r", locking=False)


def _limit_of_files(number: int) -> int:
    """Maximum number of files that this process may open. The limit is raised before files run out.

    number: the descriptor of the newest file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if number > soft * FEW_FILES:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        except (OSError, ValueError):  # macOS has a lower limit than the one that it reports
            return soft
    return hard


def side_by_side(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """Call a function that waits for a network, in threads. Returns its results in the order of the items.

    Raises the first error. The threads are daemons, so that Ctrl-C ends the wait, and the process, immediately.
    """
    todo = deque((item, Future[Result]()) for item in items)
    outcomes = [outcome for _, outcome in todo]

    def work() -> None:
        with suppress(IndexError):  # nothing is left to do
            while True:
                item, outcome = todo.popleft()
                try:
                    outcome.set_result(function(item))
                except BaseException as error:
                    outcome.set_exception(error)

    is_first = threading.current_thread() is threading.main_thread()
    n_threads = min(SIDE_BY_SIDE if is_first else BELOW, len(todo))
    threads = [threading.Thread(target=work, daemon=True) for _ in range(n_threads)]
    try:
        for thread in threads:
            thread.start()
        wait(outcomes, return_when=FIRST_EXCEPTION)
    finally:
        todo.clear()
    for thread in threads:  # a thread that runs compiled code while Python ends would abort the process
        thread.join()
    return [outcome.result() for outcome in outcomes if outcome.done()]


def scratch(size: int, purpose: str) -> np.ndarray:
    """(size,) uint8 that belong to this thread until its next call for `purpose`. The steady loop allocates nothing."""
    memory = _thread_local.__dict__
    if purpose not in memory or len(memory[purpose]) < size:
        memory[purpose] = np.empty(size, np.uint8)
    return memory[purpose][:size]
