"""One file open for reading."""

import mmap
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from fastgpu.process.launch import RankError, UserError

READ_AHEAD_BYTES = 128 << 10  # Linux fetches no more for one request
SURE_AFTER, ASK_EVERY = 64, 8  # blocks in the page cache one after the other: then one in so many is asked for
RESTORE = "restore the file, then go on with run.resume=auto"
_of_thread = threading.local()


def _scratch(size: int) -> np.ndarray:
    """This thread's own `size` bytes, valid until it asks again: no allocation in the steady loop."""
    if getattr(_of_thread, "scratch", None) is None or len(_of_thread.scratch) < size:
        _of_thread.scratch = np.empty(size, np.uint8)
    return _of_thread.scratch[:size]


def split_group(path: str) -> tuple[str, str]:
    """(file, group) of `file.h5::/group`; the group of a plain `file.h5` is "/"."""
    file, _, group = path.partition("::")
    return file, group or "/"


def not_found(path: object) -> UserError:
    """The error for a file that does not exist."""
    return UserError(f"{path} does not exist (looked in {Path.cwd()})")


class OpenFile:
    """A file open for reading: by descriptor, which fork may share since preadv has no position, and by h5py."""

    def __init__(self, path: str, chunk_cache: Mapping[str, float]):
        self.path, self._chunk_cache = path, chunk_cache
        self._open()
        self._stamp = self._stamp_now()

    def _open(self) -> None:
        self._raw = Path(self.path).open("rb", buffering=0)  # noqa: SIM115
        self._mapped: np.ndarray | None = None
        self._hits = self._asked = 0  # blocks in the page cache since the last that was not; and how often that counted
        self._can_ask = hasattr(os, "RWF_NOWAIT")  # what lies in the page cache: Linux
        self._h5: h5py.File | None = None
        self._h5_pid = 0

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_raw": None, "_h5": None, "_mapped": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        self._open()

    @property
    def size(self) -> int:
        return self._stamp[0]

    def _stamp_now(self) -> tuple[int, int]:
        status = os.fstat(self._raw.fileno())
        return status.st_size, status.st_mtime_ns

    def check_unchanged(self) -> None:
        """Raises RankError if somebody has written to the file since it was opened."""
        if self._stamp_now() != self._stamp:
            raise RankError(f"{self.path} was changed while in use; {RESTORE}")

    def preadv(self, targets: list[memoryview], offset: int) -> None:
        """Fill the targets, one after the other, with the bytes from `offset` on."""
        left = sum(target.nbytes for target in targets)
        while (n := os.preadv(self._raw.fileno(), targets, offset)) < left:
            if n == 0:
                raise RankError(f"{self.path} ends at byte {offset}: it was cut while in use; {RESTORE}")
            offset, left = offset + n, left - n
            while n >= targets[0].nbytes:  # a short read: a signal, or more than 2 GiB
                n -= targets.pop(0).nbytes
            targets[0] = targets[0][n:]

    def read(self, offset: int, count: int) -> np.ndarray:
        """(count,) uint8 in this thread's scratch memory, valid until it reads again."""
        scratch = _scratch(count)
        self.preadv([scratch.data], offset)
        return scratch

    def will_need(self, offset: int, count: int) -> None:
        """Have the kernel begin to fetch those bytes."""
        if hasattr(os, "posix_fadvise"):
            for start in range(offset, offset + count, READ_AHEAD_BYTES):
                os.posix_fadvise(self._raw.fileno(), start, READ_AHEAD_BYTES, os.POSIX_FADV_WILLNEED)

    def cached(self, offset: int, count: int) -> np.ndarray | None:
        """(count,) uint8, a view of the file, if its bytes are in memory; None where they are not, or nobody can tell.

        The last page is asked for: what is read together is evicted together, and reading ahead may have brought in the
        first ones only. After many blocks that were there, few are asked for: the answer costs a CPU 4 % of the copy,
        and a wrong guess a few page faults. File systems on a network do not tell, and are not mapped.
        """
        self._asked += 1
        if (self._hits < SURE_AFTER or self._asked % ASK_EVERY == 0) and not self._is_cached(offset + count - 1):
            self._hits = 0
            return None
        self._hits += 1
        if self._mapped is None:
            self._mapped = np.frombuffer(mmap.mmap(self._raw.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
        return self._mapped[offset : offset + count]

    def _is_cached(self, offset: int) -> bool:
        if not self._can_ask:
            return False
        try:
            return os.preadv(self._raw.fileno(), [bytearray(1)], offset, os.RWF_NOWAIT) == 1  # 0: cut just now
        except BlockingIOError:
            return False
        except OSError:
            self._can_ask = False
            return False

    def read_h5(self, dataset: str, start: int, out: np.ndarray) -> None:
        """Rows from `start` on through the HDF5 library, which decodes them under its lock."""
        if self._h5 is None or self._h5_pid != os.getpid():
            self._h5, self._h5_pid = h5py.File(self.path, "r", **self._chunk_cache), os.getpid()
        self._h5[dataset].read_direct(out, np.s_[start : start + len(out)])
