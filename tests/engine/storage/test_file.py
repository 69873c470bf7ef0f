import ctypes
import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from harness import PLAN, numbers_of, reads_of
from scattered import read_scattered

from fastgpu.process.launch import RankError
from fastgpu.storage import store as store_module
from fastgpu.storage.file import OpenFile, split_group
from fastgpu.storage.store import open_store

FIELDS = {"images": "images", "labels": "labels"}
BIG = (1, 96, 96)  # 9 KiB: rows that the kernel scatters


@pytest.fixture
def content() -> bytes:
    return np.random.default_rng(0).bytes(100_000)


@pytest.fixture
def file(tmp_path, content) -> OpenFile:
    path = tmp_path / "x.bin"
    path.write_bytes(content)
    return OpenFile(str(path))


def test_a_path_may_name_a_group():
    assert split_group("a/x.h5::/train") == ("a/x.h5", "/train")
    assert split_group("a/x.h5") == ("a/x.h5", "/")


# ---------------------------------------------------------------------------------------------- page cache


def answer_of_the_kernel(monkeypatch, answer: int | OSError) -> tuple[list[int], list[int]]:
    """Let preadv with flags answer so. Returns lists of the offsets of calls: with flags, and without."""
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

    monkeypatch.setattr(os, "RWF_NOWAIT", 8, raising=False)
    monkeypatch.setattr(os, "preadv", preadv)
    return asked_offsets, read_offsets


def test_each_time_another_byte_is_asked_about_because_the_answer_keeps_its_page_in_memory(file, monkeypatch):
    offsets, _ = answer_of_the_kernel(monkeypatch, 0)
    for _ in range(100):
        assert file.cached(100, 1000) is None
    assert 100 <= min(offsets) < 300
    assert 900 <= max(offsets) < 1100
    assert len(set(offsets)) > 50


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (1, True),
        (0, False),  # the file ends here
        (BlockingIOError(errno.EAGAIN, "would wait for the disk"), False),
        (OSError(errno.EOPNOTSUPP, "not supported"), False),  # as file systems on a network
    ],
)
def test_bytes_are_mapped_if_the_kernel_says_that_they_are_in_the_page_cache(
    file, content, monkeypatch, answer, expected
):
    answer_of_the_kernel(monkeypatch, answer)
    data = file.cached(1234, 500)
    assert (data is not None) == expected
    data = file.read(1234, 500) if data is None else data
    assert data.tobytes() == content[1234:1734]


@pytest.mark.parametrize("answer", [1, BlockingIOError(errno.EAGAIN, "would wait for the disk")])
def test_rows_are_copied_out_of_the_mapping_only_where_they_are_cached(write, monkeypatch, answer):
    store = open_store("data.train", write(40, BIG), FIELDS)
    _, read_offsets = answer_of_the_kernel(monkeypatch, answer)
    assert numbers_of(read_scattered(store)["images"]) == list(range(40))
    assert bool(read_offsets) == (answer != 1)


# ---------------------------------------------------------------------------------------------- around the page cache


def has_direct_reads(path: str) -> bool:
    """Whether the file system can read around the page cache: tried without the code under test."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        return False
    try:
        with mmap.mmap(-1, mmap.PAGESIZE) as page:  # begins at a page, as direct reads need
            return os.preadv(descriptor, [page], 0) > 0
    except OSError:
        return False
    finally:
        os.close(descriptor)


def pages_in_cache(path: str) -> set[int]:
    """The numbers of the pages of a file that are in the page cache. To ask the kernel would begin to read others."""
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        array = np.frombuffer(mapped, np.uint8)
        flags = np.zeros(-(-len(array) // mmap.PAGESIZE), np.uint8)
        c_library = ctypes.CDLL(None, use_errno=True)
        address, length, vector = ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(len(array)), flags.ctypes
        assert c_library.mincore(address, length, ctypes.c_void_p(vector.data)) == 0
        del array  # the mapping ends with its last view
        return set(np.flatnonzero(flags & 1).tolist())


def test_a_file_that_the_memory_cannot_hold_leaves_no_rows_in_the_page_cache(write, monkeypatch):
    path = write(1000, BIG)
    assert not open_store("data.train", path, FIELDS).file.is_direct
    if not has_direct_reads(path):
        pytest.skip("the file system of the tests has no direct reads")
    monkeypatch.setattr(store_module, "AROUND_PAGE_CACHE", 0.0)
    store = open_store("data.train", path, FIELDS)
    assert store.file.is_direct
    with Path(path).open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    before = pages_in_cache(path)  # those that the kernel was looking at
    assert numbers_of(read_scattered(store)["images"]) == list(range(1000))
    assert pages_in_cache(path) <= before < set(range(Path(path).stat().st_size // mmap.PAGESIZE + 1))


def test_a_file_system_without_direct_reads_is_read_as_usual(write, monkeypatch):
    real = os.open

    def refuse(path, flags, *arguments, **options):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(store_module, "AROUND_PAGE_CACHE", 0.0)
    store = open_store("data.train", write(40, BIG), FIELDS)
    assert not store.file.is_direct
    assert numbers_of(read_scattered(store)["images"]) == list(range(40))


# ---------------------------------------------------------------------------------------------- system calls


@pytest.mark.usefixtures("nothing_cached")
@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_all_that_is_not_cached_is_announced_before_the_first_read(write, monkeypatch, options):
    store = open_store("data.train", write(40, BIG, **options), FIELDS)
    calls = []
    real = os.preadv
    monkeypatch.setattr(os, "posix_fadvise", lambda *_: calls.append("announce"))
    monkeypatch.setattr(os, "preadv", lambda *arguments: (calls.append("read"), real(*arguments))[1])
    out = {name: np.zeros((40, *field.shape), field.dtype) for name, field in store.fields.items()}
    store.read(PLAN, reads_of(*[(8 * block, np.arange(8) + 8 * block) for block in range(5)]), out)
    assert numbers_of(out["images"]) == list(range(40))
    assert calls == ["announce"] * 5 + ["read"] * 5


@pytest.mark.usefixtures("nothing_cached")
def test_short_reads_are_continued(write, monkeypatch):
    store = open_store("data.train", write(40, BIG), FIELDS)
    real = os.preadv
    read_offsets = []

    def read_a_third(descriptor, buffers, offset):
        read_offsets.append(offset)
        first = buffers[0][: max(1, len(buffers[0]) // 3)]
        return real(descriptor, [first], offset)

    monkeypatch.setattr(os, "preadv", read_a_third)
    assert numbers_of(read_scattered(store)["images"]) == list(range(40))
    assert len(read_offsets) > 40


# ---------------------------------------------------------------------------------------------- changed files


def test_bytes_behind_the_end_of_a_file_are_an_error(file):
    with pytest.raises(RankError, match="x.bin ends at byte 100000: it was cut while in use; restore the file"):
        file.read(99_990, 20)


def cut(path: str) -> None:
    os.truncate(path, Path(path).stat().st_size // 2)


def grow(path: str) -> None:
    os.truncate(path, Path(path).stat().st_size + 1)


def overwrite(path: str) -> None:
    with Path(path).open("r+b") as raw:
        raw.write(b"x")


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("options", [{"chunk": 8}, {"chunk": None}, {"chunk": 8, "compression": "gzip"}])
@pytest.mark.parametrize("change", [cut, grow, overwrite])
def test_a_file_changed_while_in_use_is_an_error(write, options, change):
    path = write(40, BIG, **options)
    store = open_store("data.train", path, FIELDS)
    read_scattered(store)
    change(path)
    with pytest.raises(RankError, match="was changed while in use; restore the file"):
        read_scattered(store)


@pytest.mark.usefixtures("all_cached")
@pytest.mark.parametrize("change", [cut, grow])
def test_a_file_changed_after_its_rows_were_found_in_memory_is_an_error(write, change):
    path = write(40, BIG)
    store = open_store("data.train", path, FIELDS)
    out = {name: np.zeros((8, *field.shape), field.dtype) for name, field in store.fields.items()}
    (job,) = store.gathers(PLAN._replace(n_rows=8, reads=reads_of((16, np.arange(8)))), out, 8)
    change(path)
    with pytest.raises(RankError, match="was changed while in use"):
        job()
