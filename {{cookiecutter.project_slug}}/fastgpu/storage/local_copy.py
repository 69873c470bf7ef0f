"""The local copy of a remote file, and the account beside it, which records the pages that the copy has.

The account has a byte for each page, which is set after the page was written. Holes in the copy are not enough, because
a program that copies the copy may fill them. The account also has the inode of the copy and the time of our last write,
so a file in place of the copy starts empty, and a write by another program is noticed. A page is local if its byte is
set and the page is no hole: after a power cut, the account may have bytes of pages that were never written. All
processes of a machine share both files.
"""

import errno
import fcntl
import os
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

import numpy as np

from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import format_bytes
from fastgpu.storage.file import PAGE_BYTES

KEEP_FREE_BYTES, KEEP_FREE_SHARE = 1 << 30, 0.1
"""A copy leaves this many bytes of its disk free, and this share: checkpoints are often on the same disk."""
HEADER = struct.Struct("<Qq")
"""The inode of the copy, and the time of our last write."""
HEADER_BYTES = 64
WRITING = -1
"""Replaces the time while a process writes to the copy, and stays if the process is killed meanwhile."""
TRIES, PAUSE_S = 100, 0.005
"""Number of times, and the pause between them, that a changed time is compared with the time in the account: another
process may be about to note it."""
OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class LocalCopy:
    """A file with the size of the remote file. Its pages are written when they are fetched."""

    def __init__(self, path: str, size: int):
        """Open the copy, or create an empty copy.

        Raises OSError if that is not possible, and UserError if other users could change or replace the file.
        """
        self.path = path
        self.size = size
        self._lock = threading.Lock()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        while not self._open():
            pass

    def _open(self) -> bool:
        account_path = f"{self.path}.pages"
        self._account = FileIO(_open_own(account_path), "r")
        with self._locked():
            if not os.fstat(self._account.fileno()).st_nlink:
                return False  # another process has replaced the files meanwhile
            self.descriptor = _open_own(self.path)
            files = (self._account.fileno(), self.descriptor)
            self.is_writable = all(fcntl.fcntl(each, fcntl.F_GETFL) & os.O_RDWR for each in files)
            status, (inode, written_ns) = os.fstat(self.descriptor), self._header()
            if not status.st_size and not inode:  # both are new
                os.truncate(self.descriptor, self.size)
                os.truncate(self._account.fileno(), HEADER_BYTES + -(-self.size // PAGE_BYTES))
            elif inode != status.st_ino or not self._is_ours(status):
                os.close(self.descriptor)
                for each in (account_path, self.path):
                    Path(each).unlink()
                warn(f"{self.path} was changed, copied or removed since it was written here; it is fetched again")
                return False
            # A process that writes has the lock. So a process that has not noted the end of its write was killed.
            if written_ns in (0, WRITING) and self.is_writable:
                self._note()
            return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._lock:
            fcntl.flock(self._account, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._account, fcntl.LOCK_UN)

    def _header(self) -> tuple[int, int]:
        inode, written_ns = HEADER.unpack(os.pread(self._account.fileno(), HEADER.size, 0).ljust(HEADER.size, b"\0"))
        return inode, written_ns

    def _note(self) -> None:
        """Note that nobody is writing. The time has whole seconds, which the time of a foreign write hardly has."""
        os.utime(self.descriptor, (now := int(time.time()), now))
        status = os.fstat(self.descriptor)
        os.pwrite(self._account.fileno(), HEADER.pack(status.st_ino, status.st_mtime_ns), 0)

    def _is_ours(self, status: os.stat_result) -> bool:
        """Whether no other program has written to the copy."""
        return status.st_size == self.size and self._header()[1] in (WRITING, status.st_mtime_ns)

    def check_unchanged(self) -> None:
        """Raise UserError if another program has written to the copy."""
        for _ in range(TRIES):
            if self._is_ours(os.fstat(self.descriptor)):
                return
            time.sleep(PAUSE_S)
        raise self._changed()

    def _changed(self) -> UserError:
        return UserError(
            f"{self.path} was changed while in use; continue with run.resume=auto, which fetches it again: only this "
            "project, and only one machine, should write to data.cache"
        )

    def missing(self, begin: int, end: int) -> tuple[int, int]:
        """(begin, end) of the first run of pages that are not local. If all pages are local, both are `end`."""
        n_pages = -(-(end - begin) // PAGE_BYTES)
        marks = os.pread(self._account.fileno(), n_pages, HEADER_BYTES + begin // PAGE_BYTES).ljust(n_pages, b"\0")
        n_local = len(marks.partition(b"\0")[0])
        n_missing = len(marks[n_local:].partition(b"\1")[0])
        first, last = (min(end, begin + count * PAGE_BYTES) for count in (n_local, n_local + n_missing))
        return (first, last) if self._has_no_hole(begin, first) else (begin, first)

    def has(self, begin: int, end: int) -> bool:
        """Whether all of these whole pages are local."""
        return self.missing(begin, end) == (end, end)

    def _has_no_hole(self, begin: int, end: int) -> bool:
        with suppress(OSError):  # the file was cut
            return begin == end or os.lseek(self.descriptor, begin, os.SEEK_HOLE) >= end
        return False

    def write(self, pages: np.ndarray, begin: int, offset: int, count: int) -> None:
        """Write whole pages, from `begin` on, that were fetched for `count` bytes from `offset` on.

        If the first or last page is local already, only the `count` bytes in it are written: the other bytes of the
        page belong to neighbours, and may have been checked. Raises OSError if the disk refuses or is almost full, and
        UserError if another program has written to the copy.
        """
        if not self.is_writable:
            raise OSError("the copy can only be read")
        disk = os.fstatvfs(self.descriptor)
        free_bytes = disk.f_bavail * disk.f_frsize
        if free_bytes < max(KEEP_FREE_BYTES, KEEP_FREE_SHARE * disk.f_blocks * disk.f_frsize) + len(pages):
            raise OSError(f"{format_bytes(free_bytes)} of its disk are free")
        end = begin + len(pages)
        with self._locked():
            status = os.fstat(self.descriptor)
            if not self._is_ours(status):
                raise self._changed()
            last_page = end - 1 - (end - 1) % PAGE_BYTES
            first = max(begin, offset) if self.has(begin, min(end, begin + PAGE_BYTES)) else begin
            last = min(end, offset + count) if self.has(last_page, end) else end
            os.pwrite(self._account.fileno(), HEADER.pack(status.st_ino, WRITING), 0)
            try:
                _write_all(self.descriptor, pages[first - begin : last - begin], first)
                marks = np.ones(-(-len(pages) // PAGE_BYTES), np.uint8)
                _write_all(self._account.fileno(), marks, HEADER_BYTES + begin // PAGE_BYTES)
            finally:
                self._note()

    def forget(self, end: int) -> None:
        """Forget the pages up to `end`: they are fetched again when they are needed."""
        os.pwrite(self._account.fileno(), bytes(-(-end // PAGE_BYTES)), HEADER_BYTES)


def _open_own(path: str) -> int:
    """The descriptor of a file, which is created if it does not exist; read-only if it cannot be written.

    Raises UserError for a link, which might lead anywhere, and for a file that other users can write to.
    """
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # O_NONBLOCK: do not wait at a FIFO
    refusal = UserError(f"{path} is a link, or not of this user alone; rm {path}, or use another data.cache")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o644)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise refusal from None
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not Path(path).exists():
            raise
        descriptor = os.open(path, os.O_RDONLY | flags)
    status = os.fstat(descriptor)
    is_own = status.st_uid in (0, os.geteuid()) and not status.st_mode & OTHERS_MAY_WRITE and status.st_nlink <= 1
    if not (stat.S_ISREG(status.st_mode) and is_own):
        os.close(descriptor)
        raise refusal
    return descriptor


def _write_all(descriptor: int, data: np.ndarray, offset: int) -> None:
    n_written = 0
    while n_written < len(data):
        n_written += os.pwrite(descriptor, data[n_written:].data, offset + n_written)
