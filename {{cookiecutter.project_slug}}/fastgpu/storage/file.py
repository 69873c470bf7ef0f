"""One HDF5 file that is open for reading: its bytes by system calls, by a mapping of the file, or through h5py."""

import mmap
import os
import random
import threading
from io import FileIO
from pathlib import Path

import h5py
import numpy as np

from fastgpu.process.launch import RankError, UserError

READ_AHEAD_BYTES = 128 << 10
"""Linux reads at most this many bytes ahead for one `posix_fadvise`."""
DIRECT_ALIGNMENT = 4096
"""Reads around the page cache begin and end at multiples of this. No common disk asks for more."""
HUGE_PAGE_BYTES = 2 << 20
RESTORE = "restore the file, then go on with run.resume=auto"

_thread_local = threading.local()


def split_group(path: str) -> tuple[str, str]:
    """(file, group) of `file.h5::/group`; the group of a plain `file.h5` is "/"."""
    file, _, group = path.partition("::")
    return file, group or "/"


def not_found(path: object) -> UserError:
    """The error for a file that does not exist."""
    return UserError(f"{path} does not exist (looked in {Path.cwd()})")


def is_in_page_cache(descriptor: int, offset: int) -> bool:
    """Whether the byte at `offset` of a file can be read without the disk, as far as the kernel tells.

    Linux does not tell for file systems on a network.
    """
    try:
        return os.preadv(descriptor, [bytearray(1)], offset, os.RWF_NOWAIT) == 1  # 0: the file was cut just now
    except OSError:
        return False


class OpenFile:
    """A file that is open for reading.

    Threads and forks may share its descriptor, because `preadv` does not use the position of the file.
    """

    def __init__(self, path: str, *, around_page_cache: bool = False):
        """around_page_cache: read directly from the disk (O_DIRECT), if the file system can."""
        self.path = path
        self._raw = FileIO(path)
        direct = _open_direct(path) if around_page_cache else None
        self.is_direct = direct is not None
        """Whether bytes are read around the page cache."""
        self._source = direct or self._raw
        self._alignment = DIRECT_ALIGNMENT if self.is_direct else 1
        self._stamp = self._current_stamp()
        self.size = self._stamp[0]
        self._mapped: np.ndarray | None = None
        self._rng = random.Random(0)
        self._h5: h5py.File | None = None

    def _current_stamp(self) -> tuple[int, int]:
        """(size, time of the last change in ns)"""
        status = os.fstat(self._raw.fileno())
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raise RankError if somebody has written to the file since it was opened."""
        if self._current_stamp() != self._stamp:
            raise RankError(f"{self.path} was changed while in use; {RESTORE}")

    def preadv(self, targets: list[memoryview], offset: int) -> None:
        """Fill the targets, one after the other, with the bytes from `offset` on.

        Raises RankError if the file ends before the targets are full.
        """
        missing = sum(target.nbytes for target in targets)
        while (n_read := os.preadv(self._raw.fileno(), targets, offset)) < missing:
            if n_read == 0:
                raise RankError(f"{self.path} ends at byte {offset}: it was cut while in use; {RESTORE}")
            offset += n_read
            missing -= n_read
            while n_read >= targets[0].nbytes:  # a signal or the limit of 2 GiB ended the call early
                n_read -= targets.pop(0).nbytes
            targets[0] = targets[0][n_read:]

    def read(self, offset: int, count: int) -> np.ndarray:
        """(count,) uint8 in scratch memory of this thread. They are valid until the thread calls `read` again."""
        begin = offset - offset % self._alignment
        needed = offset + count - begin
        size = -(-needed // self._alignment) * self._alignment
        memory = aligned_scratch(size) if self.is_direct else scratch(size)
        n_read = os.preadv(self._source.fileno(), [memory.data], begin)
        if n_read < needed:  # a signal or the limit of 2 GiB ended the call early, or the file was cut
            self.preadv([memory[n_read:needed].data], begin + n_read)
        return memory[offset - begin : needed]

    def will_need(self, offset: int, count: int) -> None:
        """Ask the kernel to start reading those bytes from the disk into the page cache, if they are to go there."""
        if not self.is_direct:
            for start in range(offset, offset + count, READ_AHEAD_BYTES):
                os.posix_fadvise(self._raw.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def cached(self, offset: int, count: int) -> np.ndarray | None:
        """(count,) uint8, a view of the mapped file, if those bytes are in the page cache; otherwise None.

        The kernel is asked about one page, another one each time. Bytes that are read together are evicted together,
        except for the page that was asked about: to ask is to use it, and to start to read it if it is missing. A wrong
        guess costs page faults.
        """
        if self.is_direct:
            return None
        is_cached = is_in_page_cache(self._raw.fileno(), offset + self._rng.randrange(max(1, count)))
        return self.mapped(offset, count) if is_cached else None

    def mapped(self, offset: int, count: int) -> np.ndarray:
        """(count,) uint8, a view of the mapped file. Each of its pages that is not in memory costs a page fault."""
        if self._mapped is None:
            self._mapped = np.frombuffer(mmap.mmap(self._raw.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return self._mapped[offset : offset + count]

    def read_h5(self, dataset: str, start: int, out: np.ndarray) -> None:
        """Read rows start, start + 1, ... through the HDF5 library, which decodes them under its one lock."""
        try:
            self._h5 = self._h5 or h5py.File(self.path, "r")
            self._h5[dataset].read_direct(out, np.s_[start : start + len(out)])
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            text = " ".join(str(error).split())
            raise RankError(f"{self.path}: {dataset} from row {start} on cannot be read ({text}); {RESTORE}") from None


def _open_direct(path: str) -> FileIO | None:
    """A file without the page cache. None if the file system has no such reads."""
    try:
        direct = FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT), "rb")
        os.preadv(direct.fileno(), [aligned_scratch(DIRECT_ALIGNMENT).data], 0)
    except OSError:
        return None
    return direct


def aligned_scratch(size: int) -> np.ndarray:
    """(size,) uint8 as of `scratch`, at the beginning of a huge page: a disk fills those in few requests."""
    memory = scratch(size + 2 * HUGE_PAGE_BYTES, "direct")  # so large that NumPy asks for huge pages
    start = -memory.ctypes.data % HUGE_PAGE_BYTES
    return memory[start : start + size]


def scratch(size: int, purpose: str = "file") -> np.ndarray:
    """(size,) uint8 that belong to this thread until it asks again for `purpose`. The steady loop allocates nothing."""
    memory = _thread_local.__dict__
    if purpose not in memory or len(memory[purpose]) < size:
        memory[purpose] = np.empty(size, np.uint8)
    return memory[purpose][:size]
