import errno
import os
import subprocess
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from fastgpu.process.launch import UserError
from fastgpu.storage import local_copy
from fastgpu.storage.file import PAGE_BYTES
from fastgpu.storage.local_copy import HEADER, LocalCopy
from support.ranks import fork

SIZE = 10 * PAGE_BYTES - 100


def open_copy(size: int = SIZE) -> LocalCopy:
    return LocalCopy("cache/x.h5", size)


def write_pages(copy: LocalCopy, *numbers: int) -> None:
    """Write pages that hold their number + 1."""
    for number in numbers:
        begin = number * PAGE_BYTES
        count = min(PAGE_BYTES, copy.size - begin)
        copy.write(np.full(count, number + 1, np.uint8), begin, begin, count)


def local_pages(copy: LocalCopy) -> list[int]:
    return [n for n in range(10) if len(set(copy.missing(n * PAGE_BYTES, min(copy.size, (n + 1) * PAGE_BYTES)))) == 1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_copy_has_the_pages_that_were_written():
    copy = open_copy()
    write_pages(copy, 2, 3, 9)
    assert local_pages(copy) == [2, 3, 9] == local_pages(open_copy())
    assert copy.missing(0, 5 * PAGE_BYTES) == (0, 2 * PAGE_BYTES)
    assert copy.missing(2 * PAGE_BYTES, 6 * PAGE_BYTES) == (4 * PAGE_BYTES, 6 * PAGE_BYTES)
    assert copy.missing(0, 4 * PAGE_BYTES) == (0, 2 * PAGE_BYTES)
    content = Path("cache/x.h5").read_bytes()
    assert len(content) == SIZE
    assert content[2 * PAGE_BYTES] == 3
    assert content[-1] == 10
    copy.forget(3 * PAGE_BYTES)
    assert local_pages(copy) == [3, 9]


def test_copy_keeps_the_bytes_of_neighbours():
    copy = open_copy()
    write_pages(copy, 1, 3)
    pages = np.full(3 * PAGE_BYTES, 77, np.uint8)
    copy.write(pages, PAGE_BYTES, PAGE_BYTES + 10, 2 * PAGE_BYTES)  # its first and last page are there
    content = Path("cache/x.h5").read_bytes()[PAGE_BYTES : 4 * PAGE_BYTES]
    assert content == b"\2" * 10 + b"M" * 2 * PAGE_BYTES + b"\4" * (PAGE_BYTES - 10)


def fill_holes(path: str) -> None:
    content = Path(path).read_bytes()
    Path(path).unlink()
    Path(path).write_bytes(content)


COPYING: dict[str, Callable[[], object]] = {
    "cp -a of all": lambda: subprocess.run("cp -a cache b; mv cache old; mv b cache", shell=True, check=True),
    "tar": lambda: subprocess.run("tar cf t cache; mv cache old; tar xf t", shell=True, check=True),
    "holes are filled": lambda: fill_holes("cache/x.h5"),
    "without its account": lambda: Path("cache/x.h5.pages").unlink(),
    "an account alone": lambda: Path("cache/x.h5").unlink(),
}


@pytest.mark.parametrize("way", COPYING)
def test_copy_of_a_copy_starts_empty(capfd, way):
    write_pages(open_copy(), 2, 3)
    COPYING[way]()
    copy = open_copy()
    assert local_pages(copy) == []
    assert "it is fetched again" in capfd.readouterr().out
    write_pages(copy, 5)
    assert local_pages(open_copy()) == [5]


def test_copy_that_is_moved_is_the_same():
    write_pages(open_copy(), 2)
    Path("cache").rename("b")
    assert local_pages(LocalCopy("b/x.h5", SIZE)) == [2]


def cut(size: int) -> Callable[[], object]:
    return lambda: os.truncate("cache/x.h5", size)


def overwrite(begin: int, data: bytes) -> None:
    with Path("cache/x.h5").open("r+b") as file:
        file.seek(begin)
        file.write(data)


CHANGES: dict[str, Callable[[], object]] = {
    "cut": cut(100),
    "grown": cut(SIZE + 1),
    "cut and grown again": lambda: (cut(100)(), cut(SIZE)()),
    "written over": lambda: overwrite(2 * PAGE_BYTES, b"x"),
    "written over by what was there": lambda: overwrite(2 * PAGE_BYTES, b"\3"),
    "punched": lambda: subprocess.run("fallocate -p -o 8192 -l 4096 cache/x.h5", shell=True, check=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_copy_that_is_changed_in_use_is_noticed(capfd, change):
    copy = open_copy()
    write_pages(copy, 2, 3)
    copy.check_unchanged()
    CHANGES[change]()
    with pytest.raises(UserError, match=r"cache/x.h5 was changed while in use; continue with run.resume=auto"):
        copy.check_unchanged()
    with pytest.raises(UserError, match="was changed while in use"):
        write_pages(copy, 4)
    assert local_pages(open_copy()) == []
    assert "it is fetched again" in capfd.readouterr().out


def test_copy_that_others_write_is_unchanged():
    """Other processes and other threads."""
    copy, other = open_copy(), open_copy()
    for number in range(5):
        write_pages(other, number)
        copy.check_unchanged()
        write_pages(copy, number + 5)
        other.check_unchanged()
    assert local_pages(copy) == list(range(10))


def test_copy_is_unchanged_for_a_process_that_sleeps(monkeypatch):
    """Another one notes a write between two looks, and seconds pass between them on a busy machine."""
    _, copy = open_copy(), open_copy()
    account = Path("cache/x.h5.pages")
    noted = account.read_bytes()
    inode, written_ns = HEADER.unpack(noted[: HEADER.size])
    account.write_bytes(HEADER.pack(inode, written_ns - 1) + noted[HEADER.size :])
    sleep = Mock(side_effect=lambda _: account.write_bytes(noted))
    monkeypatch.setattr(local_copy.time, "sleep", sleep)
    monkeypatch.setattr(local_copy.time, "monotonic", count(0, 10).__next__)
    copy.check_unchanged()
    sleep.assert_called_once()


@pytest.mark.parametrize("n_calls", [1, 2])
def test_copy_whose_writer_is_killed_lacks_the_page(monkeypatch, n_calls):
    """Before or after the bytes were written, but before that was noted. The first call says that it writes."""
    write_pages(open_copy(), 2)
    write, left = os.pwrite, [n_calls]

    def write_or_die(*arguments) -> int:
        if not left[0]:
            os._exit(0)
        left[0] -= 1
        return write(*arguments)

    def die(pipe) -> None:
        copy = open_copy()
        monkeypatch.setattr(os, "pwrite", write_or_die)
        write_pages(copy, 4)

    process, _ = fork(die)
    process.join()
    assert local_pages(open_copy()) == [2]
    write_pages(open_copy(), 4)
    assert local_pages(open_copy()) == [2, 4]


def test_copy_with_holes_lacks_pages_that_the_account_has():
    """As after a power cut, if the account was written and the pages were not."""
    copy = open_copy()
    write_pages(copy, 2, 3)
    status = Path("cache/x.h5").stat()
    os.truncate("cache/x.h5", 3 * PAGE_BYTES)
    os.truncate("cache/x.h5", SIZE)
    os.utime("cache/x.h5", ns=(status.st_atime_ns, status.st_mtime_ns))
    copy = open_copy()
    assert local_pages(copy) == [2]
    page = np.full(PAGE_BYTES, 77, np.uint8)
    copy.write(page, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 10, PAGE_BYTES - 20)
    assert Path("cache/x.h5").read_bytes()[3 * PAGE_BYTES : 4 * PAGE_BYTES] == page.tobytes()


def precious() -> None:
    Path("precious.txt").write_text("x" * 26)
    Path("precious.txt").chmod(0o600)


STRANGERS: dict[str, Callable[[str], object]] = {
    "a symbolic link": lambda path: Path(path).symlink_to(Path("precious.txt").absolute()),
    "a link to nothing": lambda path: Path(path).symlink_to("new"),
    "a hard link": lambda path: os.link("precious.txt", path),
    "a FIFO": os.mkfifo,
    "a file that all may write": lambda path: (Path(path).touch(), Path(path).chmod(0o666)),
    "a file of the group": lambda path: (Path(path).touch(), Path(path).chmod(0o664)),
}


@pytest.mark.parametrize("name", ["x.h5", "x.h5.pages"])
@pytest.mark.parametrize("stranger", STRANGERS)
def test_copy_refuses_a_file_that_is_not_its_own(stranger, name):
    precious()
    Path("cache").mkdir()
    STRANGERS[stranger](f"cache/{name}")
    with pytest.raises(UserError, match=f"cache/{name} is a link, or not of this user alone; rm cache/{name}, or use"):
        open_copy()
    assert Path("precious.txt").read_text() == "x" * 26
    assert not Path("cache/new").exists()


def test_copy_refuses_a_file_of_another_user(monkeypatch):
    write_pages(open_copy(), 2)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if Path("cache/x.h5").stat().st_uid == 0:  # whom everybody has to trust
        assert local_pages(open_copy()) == [2]
        os.chown("cache/x.h5", 777, 777)
    with pytest.raises(UserError, match="is a link, or not of this user alone"):
        open_copy()


@pytest.fixture
def read_only(monkeypatch) -> None:
    """A file system that cannot be written to."""
    os_open = os.open

    def refuse(path, flags, *mode):
        if flags & (os.O_RDWR | os.O_WRONLY):
            raise OSError(errno.EROFS, "Read-only file system")
        return os_open(path, flags, *mode)

    monkeypatch.setattr(os, "open", refuse)


def test_copy_that_can_only_be_read_is_used(request):
    write_pages(open_copy(), 2)
    request.getfixturevalue("read_only")
    copy = open_copy()
    assert local_pages(copy) == [2]
    copy.check_unchanged()
    with pytest.raises(OSError, match="can only be read"):
        write_pages(copy, 3)
    with pytest.raises(OSError, match="Read-only file system"):
        LocalCopy("cache/y.h5", SIZE)


def test_copy_leaves_room_on_its_disk_at_each_moment(monkeypatch):
    copy = open_copy()

    def leave(n_free: int) -> None:
        disk = SimpleNamespace(f_frsize=4096, f_blocks=1 << 30, f_bavail=n_free)  # 4 TiB, of which a tenth is kept free
        monkeypatch.setattr(os, "fstatvfs", lambda _: disk)

    leave(100 << 20)
    with pytest.raises(OSError, match="GiB of its disk are free"):
        write_pages(copy, 1)
    leave(110 << 20)
    write_pages(copy, 1)
    assert local_pages(copy) == [1]
