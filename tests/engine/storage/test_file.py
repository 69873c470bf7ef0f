import _thread
import errno
import fcntl
import gc
import math
import mmap
import os
import resource
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import FileIO
from pathlib import Path
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from fastgpu.process.launch import UserError
from fastgpu.storage import file as module
from fastgpu.storage import store as store_module
from fastgpu.storage.file import OpenFile
from fastgpu.storage.store import HDF5Dataset, open_store
from support.ranks import wait_until
from support.rows import DENSE_FIELDS, numbers_of, read_by_jobs, read_rows

BIG = (1, 96, 96)  # 9 KiB: rows that the kernel scatters
NOT_CACHED = [0, OSError(errno.EOPNOTSUPP, "not supported")]
"""What the kernel says of a byte behind the end of the file, and of all on a network."""


def rows_are_in_order(store: HDF5Dataset) -> bool:
    return numbers_of(read_rows(store)["images"]) == list(range(len(store)))


@pytest.mark.parametrize("answer", [1, *NOT_CACHED], ids=str)
def test_file_cached_rows_are_copied_from_the_mapping(store, monkeypatch, answer):
    real = os.preadv
    asked_offsets, read_offsets = [], []

    def preadv(descriptor, buffers, offset, flags=0):
        if not flags:
            read_offsets.append(offset)
            return real(descriptor, buffers, offset)
        asked_offsets.append(offset)
        if isinstance(answer, OSError):
            raise answer
        return answer

    opened = store(40, BIG)
    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    monkeypatch.setattr(os, "preadv", preadv)
    for _ in range(20):
        assert rows_are_in_order(opened)
    assert bool(read_offsets) == (answer in NOT_CACHED)
    assert len(set(asked_offsets)) > 60  # another byte each time, because the answer keeps its page in memory


def has_direct_reads(path: Path) -> bool:
    """Whether the file system can read around the page cache: tried without the code under test."""
    try:
        with FileIO(os.open(path, os.O_RDONLY | os.O_DIRECT)) as raw:
            return raw.readinto(mmap.mmap(-1, mmap.PAGESIZE)) > 0  # begins at a page, as direct reads need
    except OSError:
        return False


def test_file_larger_than_memory_uses_direct_reads(store, tmp_path, monkeypatch):
    assert not store(100, BIG).file.is_direct
    if not has_direct_reads(tmp_path / "rows.h5"):
        pytest.skip("the file system of the tests has no direct reads")
    monkeypatch.setattr(store_module, "AROUND_PAGE_CACHE", 0.0)
    opened = store(100, BIG)
    assert opened.file.is_direct
    real = os.preadv

    def preadv(descriptor, buffers, offset, flags=0):
        assert fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT
        return real(descriptor, buffers, offset, flags)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: pytest.fail("asked for bytes in the page cache"))
    monkeypatch.setattr(OpenFile, "mapped", property(lambda _: pytest.fail("mapped the file")))
    assert rows_are_in_order(opened)


def test_file_without_direct_reads_is_read_as_usual(store, monkeypatch):
    real = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(store_module, "AROUND_PAGE_CACHE", 0.0)
    opened = store(40, BIG)
    assert not opened.file.is_direct
    assert rows_are_in_order(opened)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_file_reads_are_announced_and_short_ones_continued(store, monkeypatch, options):
    opened = store(40, BIG, **options)
    calls = []
    real = os.preadv

    def read_a_third(descriptor, buffers, offset, flags=0):
        if flags:
            raise BlockingIOError(errno.EAGAIN, "would wait for the disk")
        calls.append("read")
        return real(descriptor, [buffers[0][: max(1, len(buffers[0]) // 3)]], offset)

    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: calls.append("announce"))
    monkeypatch.setattr(os, "preadv", read_a_third)
    assert numbers_of(read_by_jobs(opened, np.arange(40), 40)["images"]) == list(range(40))
    assert calls == sorted(calls)
    assert {*calls} == {"announce", "read"}


def cut(path: str) -> None:
    os.truncate(path, Path(path).stat().st_size // 2)


def moves_ctime(change: Callable[[Path], object]) -> Callable[[str | Path], None]:
    """A function that changes a file, again if need be: st_ctime is that of the last tick of the kernel."""

    def call(path: str | Path) -> None:
        old = Path(path).stat()
        while Path(path).stat().st_ctime_ns == old.st_ctime_ns:
            change(Path(path))
        new = Path(path).stat()
        assert (new.st_mtime_ns, new.st_size) == (old.st_mtime_ns, old.st_size)

    return call


def overwrite(path: Path, offset: int) -> None:
    """Write to a file, and set st_mtime back."""
    old = path.stat()
    with path.open("r+b") as raw:
        raw.seek(offset)
        raw.write(b"x" * (old.st_size - offset))
    os.utime(path, ns=(old.st_mtime_ns, old.st_mtime_ns))


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("options", [{"chunk": 8}, {"chunk": None}, {"compression": "gzip"}])
@pytest.mark.parametrize("change", [cut, moves_ctime(lambda path: overwrite(path, 0))])
@pytest.mark.parametrize("n_checks_before", [0, 1])
def test_file_changed_while_in_use_is_an_error(dense_file, monkeypatch, options, change, n_checks_before):
    path = dense_file(40, BIG, **options)
    os.utime(path, (0, 0))  # written long ago
    opened = open_store("data.train", path, {"images": "images"})
    real = OpenFile.check_unchanged
    checks = []

    def check(file: OpenFile) -> None:
        if len(checks) == n_checks_before:
            change(file.path)
        checks.append(file)
        real(file)

    monkeypatch.setattr(OpenFile, "check_unchanged", check)
    with pytest.raises(UserError, match="was changed while in use; restore the file"):
        read_by_jobs(opened, np.arange(8))


@pytest.mark.parametrize("options", [{"chunk": 8}, {"compression": "gzip"}])
@pytest.mark.parametrize("is_direct", [True, False])
def test_file_written_anew_with_its_old_time(dense_file, monkeypatch, options, is_direct):
    monkeypatch.setattr(store_module, "AROUND_PAGE_CACHE", 0.0 if is_direct else math.inf)
    path = Path(dense_file(40, BIG, **options))
    opened = open_store("data.train", str(path), {"images": "images"})
    assert rows_are_in_order(opened)
    with h5py.File(path) as file:
        first_row = file["images"].id.get_chunk_info(0).byte_offset
    moves_ctime(lambda path: overwrite(path, first_row))(path)
    with pytest.raises(UserError, match="was changed while in use"):
        read_by_jobs(opened, np.arange(8))


def link_and_unlink(path: Path) -> None:
    path.with_name("link").hardlink_to(path)
    path.with_name("link").unlink()


UNWRITTEN = {
    "same mode": lambda path: path.chmod(path.stat().st_mode),
    "other mode": lambda path: path.chmod(0o600),
    "same owner": lambda path: os.chown(path, os.getuid(), os.getgid()),
    "access time": lambda path: os.utime(path, ns=(7, path.stat().st_mtime_ns)),
    "link made and removed": link_and_unlink,
    "moved and back": lambda path: path.rename(path.with_name("moved")).rename(path),
}


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("name", UNWRITTEN)
def test_file_with_the_same_bytes_is_read_on(dense_file, name):
    path = Path(dense_file(40, BIG))
    opened = open_store("data.train", str(path), {"images": "images"})
    for _ in range(2):
        moves_ctime(UNWRITTEN[name])(path)
        assert rows_are_in_order(opened)


@pytest.mark.parametrize(
    "change",
    [lambda path: path.with_name("link").hardlink_to(path), lambda path: path.rename(path.with_name("moved"))],
    ids=["link", "moved"],
)
def test_file_renamed_is_read_to_its_end(dense_file, change):
    path = Path(dense_file(40, BIG))
    os.utime(path, (0, 0))  # written long ago
    opened = open_store("data.train", str(path), {"images": "images"})
    change(path)
    assert rows_are_in_order(opened)
    with next(path.parent.iterdir()).open("r+b") as file:  # by any name that it has now
        file.write(b"x")
    with pytest.raises(UserError, match="was changed while in use"):
        rows_are_in_order(opened)


@pytest.fixture
def n_open() -> Callable[[], int]:
    gc.collect()  # files of other tests
    descriptors = Path("/proc/self/fd")
    before = len([*descriptors.iterdir()])
    return lambda: len([*descriptors.iterdir()]) - before


@pytest.mark.parametrize("options", [{}, {"compression": "gzip", "fletcher32": True}])
def test_file_descriptors_of_many_files(dense_file, tmp_path, monkeypatch, n_open, options):
    for number in range(100):
        dense_file(4, name=f"{number:03d}.h5", start=4 * number, **options)
    limits = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (32, 256))
    opened = open_store("data.train", str(tmp_path / "*.h5"), DENSE_FIELDS)
    assert {*limits} == {(256, 256)}
    assert opened.name == f"{tmp_path}/000.h5 and 99 more"
    assert rows_are_in_order(opened)
    assert 100 <= n_open() <= 100 + 2 * 256 / 16
    monkeypatch.setattr(resource, "getrlimit", lambda _: (128, 128))
    with pytest.raises(
        UserError, match="h5 is one file too many for the limit of 128 open files; raise it with ulimit"
    ):
        open_store("data.train", str(tmp_path / "*.h5"), {"images": "images"})


@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize(("limit", "n_descriptors"), [(10**6, 6), (4, 1)])
def test_file_descriptor_of_each_reader_thread(dense_file, monkeypatch, n_open, limit, n_descriptors):
    """All threads share one if there are too many open files."""
    path = Path(dense_file(40, BIG))
    opened = open_store("data.train", str(path), DENSE_FIELDS)
    path.rename(path.with_name("moved.h5"))
    dense_file(40, BIG, start=1000)  # another file has the name now
    n_before = n_open()
    monkeypatch.setattr(resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    preadv = Mock(side_effect=os.preadv)
    monkeypatch.setattr(os, "preadv", preadv)
    barrier = threading.Barrier(6)

    def read(_: int) -> bool:
        barrier.wait()  # all threads live at the same time
        is_right = rows_are_in_order(opened)
        barrier.wait()
        return is_right

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(6)))
    assert len({descriptor for (descriptor, *_), _ in preadv.call_args_list}) == n_descriptors
    assert n_open() == n_before  # those of threads that have ended are closed


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("options", [{}, {"fletcher32": True}])
def test_file_on_a_file_system_without_locks(dense_file, monkeypatch, number, options):
    path = dense_file(40, **options)
    real = h5py.File

    def open_file(*arguments, locking=None, **more):
        if locking is not False:
            raise OSError(number, "unable to lock file")
        return real(*arguments, locking=locking, **more)

    monkeypatch.setattr(h5py, "File", open_file)
    assert rows_are_in_order(open_store("data.train", path, DENSE_FIELDS))


def test_file_limit_that_cannot_be_raised(monkeypatch, dense_file):
    def refuse(*_):
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 2**63 - 1))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    monkeypatch.setattr(module, "FEW_FILES", 0)
    assert rows_are_in_order(open_store("data.train", dense_file(40), DENSE_FIELDS))
    monkeypatch.setattr(module, "MANY_FILES", 0)
    with pytest.raises(UserError, match="one file too many for the limit of 256 open files"):
        open_store("data.train", dense_file(40), DENSE_FIELDS)


def test_file_read_past_the_end_is_an_error(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(100))
    with pytest.raises(UserError, match="x.bin ends at byte 100: it was cut while in use; restore the file"):
        OpenFile(f"{tmp_path}/x.bin").read(90, 20)


def test_file_side_by_side_leaves_the_rest_after_ctrl_c():
    """Somebody who catches KeyboardInterrupt may go on."""
    started, n_threads, network = [], threading.active_count(), threading.Event()

    def wait_for_network(number: int) -> None:
        started.append(number)
        if number == module.SIDE_BY_SIDE - 1:
            _thread.interrupt_main()
        network.wait()

    with pytest.raises(KeyboardInterrupt):
        module.side_by_side(wait_for_network, range(1000))
    network.set()
    wait_until(lambda: threading.active_count() == n_threads)
    assert len(started) == module.SIDE_BY_SIDE
