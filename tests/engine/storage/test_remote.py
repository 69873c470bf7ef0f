import errno
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from urllib.request import Request, urlopen

import h5py
import numpy as np
import obstore.store
import pytest
import torch

from fastgpu.convert.command import parse, run
from fastgpu.feed import readers
from fastgpu.process import machine
from fastgpu.process.launch import UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import local_copy, remote
from fastgpu.storage.file import side_by_side
from fastgpu.storage.store import open_store
from support import PROJECT
from support.object_store import Store, serve
from support.ranks import fork, free_port, printed_by, run_to_end, train_command, wait_for_port, wait_until
from support.rows import DENSE_FIELDS, open_feed, read_rows
from support.runs import metrics_of, same_weights, train, wait_for_step
from support.windows import open_windows, places_of, read_epochs, read_windows, write_series
from support.windows import same as same_windows


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch) -> Iterator[Store]:
    """An object store with the bucket `b`, from which this process and its children read with short patience."""
    store = Store()
    server, address = serve(store)
    environment = {"AWS_ENDPOINT_URL": address, "AWS_REGION": "us-east-1", "AWS_SKIP_SIGNATURE": "true"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote, "OPENING_RETRIES", 2)
    monkeypatch.setattr(remote, "PATIENCE", timedelta(seconds=3))
    monkeypatch.setitem(remote.PAUSES, "init_backoff", timedelta(seconds=0.1))
    monkeypatch.setitem(remote.TIMES, "read_timeout", timedelta(seconds=1))
    forget()
    yield store
    server.shutdown()
    forget()
    remote.RemoteFile.has_warned = False


def forget() -> None:
    """As a new process, which has opened nothing."""
    remote.opened.clear()
    remote.client_of.cache_clear()


def put(store: Store, path: str | Path) -> str:
    """Put a file into the bucket. Returns its URL."""
    store.objects[f"/b/{Path(path).name}"] = Path(path).read_bytes()
    return f"s3://b/{Path(path).name}"


def same(rows: dict, others: dict) -> bool:
    def parts(column):
        return (column.values, column.offsets) if isinstance(column, RaggedArray) else (column,)

    pairs = [(one, other) for name in others for one, other in zip(parts(rows[name]), parts(others[name]), strict=True)]
    return rows.keys() == others.keys() and all(np.array_equal(one, other) for one, other in pairs)


def with_checksums(path: str, name: str = "images") -> str:
    """Write the checksums of the images, or of another dataset, as convert.py does."""
    with h5py.File(path, "r+") as file:
        blocks = [file[name][chunk] for chunk in file[name].iter_chunks()]
        checksums = [np.frombuffer(sha256(block.tobytes()).digest(), np.uint8) for block in blocks]
        file[f"fastgpu_sha256/{name}"] = np.stack(checksums)
    return path


@pytest.mark.parametrize("options", [{}, {"chunk": None}, {"compression": "gzip"}, {"fletcher32": True}], ids=str)
def test_remote_rows_are_fetched_once_and_equal_local_ones(bucket, dense_file, options):
    local = open_store("data.train", path := dense_file(3000, (3, 16, 16), **{"chunk": 64} | options), DENSE_FIELDS)
    rows = open_store("data.train", put(bucket, path), DENSE_FIELDS)
    assert rows.fingerprint == local.fingerprint
    assert same(read_rows(rows), read_rows(local))
    ranges = bucket.gets.copy()
    assert fetched_twice(bucket) == 0
    assert same(read_rows(rows), read_rows(local))
    forget()
    assert same(read_rows(open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)), read_rows(local))
    assert bucket.gets == ranges


def fetched_twice(store: Store) -> int:
    """Bytes that came more than once."""
    counts = np.zeros(max(map(len, store.objects.values())) + 1, np.int64)
    for _, part in store.gets:
        begin, _, last = part.partition("-")
        counts[int(begin) : int(last) + 1] += 1
    return int((counts - 1).clip(0).sum())


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"fletcher32": True}], ids=str)
def test_remote_rows_without_a_copy_are_fetched_once_an_epoch(bucket, dense_file, monkeypatch, options):
    path = dense_file(3000, (3, 32, 32), **{"chunk": 64} | options)
    monkeypatch.setattr(local_copy, "KEEP_FREE_BYTES", 1 << 60)
    rows = open_store("data.train", put(bucket, path), DENSE_FIELDS)
    bucket.gets.clear()
    local = open_store("data.train", path, DENSE_FIELDS)
    one, other = (np.zeros((64, 3, 32, 32), np.uint8) for _ in range(2))
    for start in range(0, 2944, 64):
        for source, out in ((rows, one), (local, other)):
            source.parts[0].columns["images"].read([(start, range(64))], out)
        assert np.array_equal(one, other)
    assert fetched_twice(bucket) <= 47 * 2 * 4096 + (1 << 20)  # pages of two blocks, and metadata


def test_remote_batches_equal_local_ones(bucket, dense_file):
    epochs = []
    path = dense_file(1000, (3, 16, 16), 32)
    for url in (path, put(bucket, path)):
        rows = open_store("data.train", url, DENSE_FIELDS)
        feed = open_feed(rows, BlockSampler(rows, 50, pool_batches=4, seed=1), n_readers=8)
        epochs.append([batch["images"].clone() for epoch in (0, 1) for batch in feed.batches(epoch)])
        feed.close()
    assert all(map(torch.equal, *epochs))
    assert len(set(bucket.gets)) == len(bucket.gets)


@pytest.mark.parametrize("options", [{}, {"chunks": (9000,)}, {"chunks": (9000,), "compression": "gzip"}], ids=str)
@pytest.mark.parametrize(("length", "stride"), [(16, 40), (64, 64), (15000, 4000)])
def test_remote_windows_equal_local_ones(bucket, tmp_path, options, length, stride):
    """Each step is fetched once, whatever the windows."""
    local = write_series(tmp_path / "x.h5", [800_000], **options)
    expected = read_epochs(open_windows(local, length, stride)[0], range(2), batch_size=500)
    train, val = open_windows(local._replace(train=put(bucket, tmp_path / "x.h5")), length, stride)
    assert train.is_local == val.is_local == ("compression" in options)  # the whole file was fetched when it was opened
    assert same_windows(read_epochs(train, range(2), batch_size=500), expected)
    n_gets = len(bucket.gets)
    places_of(read_epochs(val, [0], seed=None, batch_size=500)[0], local)
    assert len(bucket.gets) == n_gets
    assert val.is_local
    assert train.n_requests == val.n_requests > 0


def test_remote_windows_of_groups_by_a_pattern(bucket, tmp_path):
    local = write_series(tmp_path / "x.h5", [300, 500, 400], chunks=(100,))
    series = local._replace(train=f"{put(bucket, tmp_path / 'x.h5')}::/g*")
    for source, seed in zip(open_windows(series, 16, 5, val="20%"), (5, None), strict=True):
        places_of(read_windows(source, seed=seed), local)
    weights = {f"{put(bucket, tmp_path / 'x.h5')}::/g{pattern}": 1.0 for pattern in ("[01]", "2")}
    train, _ = open_windows(series._replace(train=weights), 16, 5, val=series.train, batch_size=16)
    places = places_of(read_windows(train), local)
    assert (places[:, 0] == 2).sum() * 2 == len(places)


@pytest.mark.parametrize("length", [16, 20_000])
@pytest.mark.parametrize("fault", ["flipped", "replaced"])
def test_remote_windows_have_no_damaged_bytes(bucket, tmp_path, fault, length):
    local = write_series(tmp_path / "x.h5", [800_000], chunks=(9000,))
    with_checksums(local.train, "x")
    train, _ = open_windows(local._replace(train=put(bucket, local.train)), length)
    setattr(bucket, fault, 2)
    with suppress(UserError):  # a block of which all bytes came at once is damaged
        places_of(read_epochs(train, [0], batch_size=500)[0], local)
    places_of(read_epochs(train, [1], batch_size=500)[0], local)
    assert not getattr(bucket, fault)


@pytest.mark.parametrize("fault", ["refused", "cut", "hanging"])
def test_remote_windows_survive_a_fault(bucket, tmp_path, fault):
    local = write_series(tmp_path / "x.h5", [3000], chunks=(100,))
    train, _ = open_windows(local._replace(train=put(bucket, tmp_path / "x.h5")), 16, 16)
    setattr(bucket, fault, 2)
    places_of(read_windows(train), local)


def test_remote_rows_are_local_once_all_were_fetched(bucket, dense_file):
    url = put(bucket, dense_file(4000, (3, 32, 32), 100))
    rows = open_store("data.train", url, DENSE_FIELDS)
    rows[:3000]
    assert not rows.is_local
    n_requests = rows.n_requests
    rows[3000:]
    assert rows.is_local
    assert rows.n_requests > n_requests
    forget()
    assert open_store("data.train", url, DENSE_FIELDS).is_local  # whoever has fetched them


def test_remote_groups_of_a_file_wait_for_the_rows_of_all(bucket, dense_file, monkeypatch):
    rows = open_store("data.train", put(bucket, dense_file(500, (3, 16, 16))), DENSE_FIELDS)
    concatenate, n_chunks = np.concatenate, []

    def concatenate_slowly(arrays: list[np.ndarray]) -> np.ndarray:
        time.sleep(0.01)
        joined = concatenate(arrays)
        n_chunks.append(len(joined))
        return joined

    monkeypatch.setattr("fastgpu.storage.remote.np.concatenate", concatenate_slowly)
    side_by_side(rows.file.expect, [np.zeros((1, 2), np.int64)] * 4)  # as their layouts do while they are opened
    assert n_chunks == [*range(n_chunks[0], n_chunks[0] + 4)]


def test_remote_readers_that_waited_for_the_network_end(bucket, dense_file, monkeypatch):
    monkeypatch.setattr(machine, "available_cpus", lambda: 2)
    monkeypatch.setattr(readers, "NETWORK_READERS", 24)
    rows = open_store("data.train", put(bucket, dense_file(4000, (3, 32, 32), 50)), DENSE_FIELDS)
    for start in range(0, 1600, 50):  # pools at the beginning are local, as after a kill
        rows[start : start + 1]
    sampler = BlockSampler(rows, 50, pool_batches=4, seed=None)

    def n_readers() -> int:
        return sum(thread.name.startswith("reader_") for thread in threading.enumerate())

    feed = open_feed(rows, sampler, "disk", "auto")
    batches = feed.batches(0)
    deque(islice(batches, 30), maxlen=0)
    assert n_readers() == 24
    deque(chain(batches, feed.batches(1)), maxlen=0)
    wait_until(lambda: n_readers() == 2)
    feed.close()
    forget()
    rows = open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)
    feed = open_feed(rows, sampler, "disk", n_readers=20)
    deque(feed.batches(0), maxlen=0)
    assert n_readers() == 20  # somebody has asked for them
    feed.close()


@pytest.mark.slow
def test_remote_requests_are_three_and_one_a_block(bucket, dense_file):
    path = dense_file(2000, (3, 32, 32), 250)
    run(parse(["repack", path, "converted.h5", "--seed", "0"]))
    rows = open_store("data.train", put(bucket, "converted.h5"), DENSE_FIELDS)
    assert rows.file.n_requests == 3  # its size, and metadata at its beginning and end
    read_rows(rows)
    assert rows.file.n_requests <= 3 + len(rows.block_rows)
    assert len(set(bucket.gets)) == len(bucket.gets)


FAULTS = {
    "503 for a while": {"refused": 2},
    "a body that is cut": {"cut": 1},
    "a server that hangs": {"hanging": 1},
    "a page of a proxy": {"replaced": 1},
    "wrong bytes at both ends": {"flipped_ends": 1},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_remote_fault_is_survived(bucket, dense_file, monkeypatch, fault):
    monkeypatch.setattr(remote, "PATIENCE", timedelta(minutes=1))
    path = with_checksums(dense_file(3000, (3, 32, 32), 100))
    local = read_rows(open_store("data.train", path, DENSE_FIELDS))
    for at_first in (True, False):
        forget()
        url = put(bucket, f"{shutil.copy(path, f'{at_first}.h5')}")
        if at_first:
            vars(bucket).update(FAULTS[fault])
        rows = open_store("data.train", url, DENSE_FIELDS)
        vars(bucket).update(FAULTS[fault])
        with suppress(UserError):  # a block of which all bytes came at once is damaged
            read_rows(rows)
        assert same(read_rows(rows), local)
    forget()
    assert same(read_rows(open_store("data.train", url, DENSE_FIELDS)), local)


def test_remote_server_that_is_gone_for_a_while(bucket, dense_file, monkeypatch):
    """A request is sent again for as long as the patience lasts."""
    rows = open_store("data.train", put(bucket, path := dense_file(3000, (3, 32, 32))), DENSE_FIELDS)
    monkeypatch.setattr(remote, "PATIENCE", timedelta(minutes=1))
    monkeypatch.setitem(remote.PAUSES, "max_backoff", timedelta(seconds=0.1))
    remote.client_of.cache_clear()
    bucket.refused = 12
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))


@pytest.mark.parametrize("kind", ["a neighbour", "the metadata", "an earlier process"])
def test_remote_rows_are_checked_whoever_fetched_them(bucket, dense_file, kind):
    """Their bytes may have come with those of others, and the copy may have been written by another process."""
    path = with_checksums(dense_file(2000, (3, 32, 32), 100))
    url = put(bucket, path)
    local = read_rows(open_store("data.train", path, DENSE_FIELDS))
    if kind == "the metadata":
        vars(bucket).update(flipped=2)
    rows = open_store("data.train", url, DENSE_FIELDS)
    if kind == "a neighbour":
        rows[600:601]
        vars(bucket).update(flipped_ends=1)
        rows[500:501]
    if kind == "an earlier process":
        read_rows(rows)
        forget()
        (copy,) = Path("data/cache").glob("*.h5")
        times = copy.stat()
        with copy.open("r+b") as file:
            file.seek(copy.stat().st_size // 2)
            file.write(b"x" * 5000)
        os.utime(copy, ns=(times.st_atime_ns, times.st_mtime_ns))
        rows = open_store("data.train", url, DENSE_FIELDS)
    assert same(read_rows(rows), local)
    forget()
    assert same(read_rows(open_store("data.train", url, DENSE_FIELDS)), local)


def test_remote_metadata_leaves_rows_that_were_checked(bucket, dense_file):
    path = with_checksums(dense_file(3000, (3, 32, 32), 64))
    rows = open_store("data.train", put(bucket, path), DENSE_FIELDS)
    middle = (4 * remote.PIECE_BYTES + remote.PIECE_BYTES // 2) // 3072
    rows[middle : middle + 1]
    vars(bucket).update(flipped=1)
    rows.file.read_piece(4)
    bucket.flipped = 0
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))
    assert fetched_twice(bucket) <= 2 * 200_000  # the block that was damaged


EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
LINES = {
    "503 for ever": ({"refused": 99}, "cannot be read: .*503.*check the URL, and the credentials .*run.resume=auto"),
    "a token that expires": ({"refused": 99, "status": 403, "message": EXPIRED}, "cannot be read: .*token has expired"),
    "an object that is removed": ({"refused": 99, "status": 404}, "does not exist"),
    "another object": ({"tag": '"2"'}, "was changed while in use; restore the file"),
    "ranges that are ignored": ({"ignores_ranges": True}, "cannot be read: .*[Rr]ange.*; its server sends whole files"),
    "a flipped bit": ({"flipped": 99}, "images: block 0 is damaged: checksum mismatch; restore"),
}


@pytest.mark.parametrize("fault", LINES)
def test_remote_fault_is_one_line(bucket, dense_file, fault):
    rows = open_store("data.train", put(bucket, with_checksums(dense_file(3000, (3, 32, 32), 750))), DENSE_FIELDS)
    settings, message = LINES[fault]
    vars(bucket).update(settings)
    with pytest.raises(UserError, match=f"s3://b/rows.h5.*{message}") as caught:
        rows[:750]
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600
    vars(bucket).update(vars(Store(bucket.objects)))
    forget()
    rows = open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)  # nothing wrong has been kept
    assert same(read_rows(rows), read_rows(open_store("data.train", "rows.h5", DENSE_FIELDS)))


def test_remote_file_that_cannot_be_opened(bucket, dense_file, monkeypatch):
    def message(url: str) -> str:
        with pytest.raises(UserError) as caught:
            open_store("data.train", url, DENSE_FIELDS)
        forget()
        return str(caught.value)

    url = put(bucket, dense_file(10))
    put(bucket, dense_file(10, name="part-1.h5"))
    assert message("s3://b/none.h5") == "data.train: s3://b/none.h5 does not exist"
    assert message("s3://b/none-*.h5") == "data.train: no file matches s3://b/none-*.h5"
    assert "should end in the name of a file" in message("s3://b*/x.h5")
    assert "should end in the name of a file" in message("s3://b/")
    assert message("what://b/x.h5").endswith('recognise URL "what://b"; use s3://, gs://, az:// or https://')
    assert "a user and a password in a URL are not sent; set AWS_ACCESS_KEY_ID" in message("http://a:b@host/x.h5")
    assert "may be secret and was not recorded; give the whole URL again" in message("http://host/x.h5?...::/train")
    vars(bucket).update(tag="", date="")
    assert message(url).endswith("an ETag nor a date, so nobody would notice that it has changed; download it")
    vars(bucket).update(vars(Store(bucket.objects)))
    Path("data").write_text("a file")
    assert "needs a local copy, but data/cache cannot be written (" in message(url)
    Path("data").unlink()
    bucket.objects["/b/rows.h5"] = b"no HDF5" * 100
    damaged = message(url)
    assert "cannot be read as HDF5: " in damaged
    assert re.search(r"; if the file is whole there, its copy is damaged: rm data/cache/[0-9a-f-]+\.h5\*$", damaged)
    bucket.objects["/b/rows.h5"] = Path("rows.h5").read_bytes()
    vars(bucket).update(refused=99, status=405)
    refused = message(f"{os.environ['AWS_ENDPOINT_URL']}/b/rows.h5")
    assert "405 Method Not Allowed" in refused
    bucket.refused = 0
    monkeypatch.setitem(remote.TIMES, "read_timeout", timedelta(seconds=0.2))
    bucket.hanging = 99
    assert "(TimedOut); check the host, the network, and the certificate" in message(url)
    bucket.hanging = 0
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens
    assert "(Connection refused); check the host, the network, and the certificate" in message(url)
    assert "(failed to lookup address" in message("http://nobody.invalid/x.h5")
    monkeypatch.setattr(remote, "find_spec", lambda name: None)
    assert message(url) == "data.train: s3://b/rows.h5 is read by obstore: pip install 'fastgpu-engine[cloud]'"


def test_remote_pattern_names_files_in_order(bucket, dense_file):
    for number in range(3):
        put(bucket, dense_file(10, name=f"part-{number}.h5", start=10 * number))
    rows = open_store("data.train", "s3://b/part-*.h5", DENSE_FIELDS)
    assert [path for path, _ in rows.files] == [f"s3://b/part-{number}.h5" for number in range(3)]
    assert same(read_rows(rows), read_rows(open_store("data.train", "part-*.h5", DENSE_FIELDS)))


def out_of_space(*_: object) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


FULL = {
    "little is free": (local_copy, "KEEP_FREE_BYTES", 1 << 60),
    "nothing is free": (os, "pwrite", out_of_space),
}


@pytest.mark.parametrize("reason", FULL)
def test_remote_rows_are_right_without_a_copy(bucket, dense_file, monkeypatch, capfd, reason):
    path = dense_file(3000, (3, 16, 16), 500)
    url = put(bucket, path)
    rows = open_store("data.train", url, DENSE_FIELDS)
    rows[:500]
    monkeypatch.setattr(*FULL[reason])
    expected = read_rows(open_store("data.train", path, DENSE_FIELDS))
    assert same(read_rows(rows), expected)
    n_gets = len(bucket.gets)
    assert same(read_rows(rows), expected)
    assert len(bucket.gets) > n_gets  # what is not kept is fetched again
    assert capfd.readouterr().out.count("data.cache") == 1


def test_remote_file_by_a_signed_and_encoded_url(bucket, dense_file, capfd):
    """A URL that is signed for GET refuses HEAD."""
    bucket.objects["/a folder/r%s 1.h5"] = Path(path := dense_file(500, (3, 16, 16))).read_bytes()
    bucket.query = "X-Amz-Signature=top%2Fsecret&b=2"
    url = f"{os.environ['AWS_ENDPOINT_URL']}/a%20folder/r%25s%201.h5"
    rows = open_store("data.train", f"{url}?{bucket.query}::/", DENSE_FIELDS)
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))
    gets = bucket.gets.copy()
    forget()
    bucket.query = "X-Amz-Signature=new"
    rows = open_store("data.train", f"{url}?{bucket.query}", DENSE_FIELDS)
    read_rows(rows)
    assert {*bucket.gets} == {*gets}  # the copy is that of the object, whoever signs its URL
    forget()
    with pytest.raises(UserError, match="403 Forbidden.*check the URL, and the credentials"):
        open_store("data.train", f"{url}?X-Amz-Signature=old", DENSE_FIELDS)


@pytest.mark.slow
def test_remote_secrets_of_a_url_are_nowhere(bucket, folder, capfd):
    """Nor in what is printed, and a resumed run asks for the URL again."""
    bucket.objects["/rows.h5"] = Path("rows.h5").read_bytes()
    bucket.query = "X-Amz-Signature=top%2Fsecret&b=2"
    url = f"{os.environ['AWS_ENDPOINT_URL']}/rows.h5?{bucket.query}"
    words = [f"data.train={url}::/train", f"data.val={url}::/val", "run.name=r", "data.tier=disk", "train.epochs=1"]
    done = run_to_end(train_command(*words), folder)
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "rows.h5"]
    assert len(files) > 10
    assert not [path for path in files if b"secret" in path.read_bytes()]
    assert "secret" not in done.stdout + done.stderr
    assert f"{url.partition('?')[0]}?...::/train" in (folder / "runs/r/config.yaml").read_text()
    with pytest.raises(UserError, match=r"data.train: http.*/rows.h5\?\.\.\.: .* give the whole URL again"):
        train("run.resume=runs/r", "train.epochs=2")
    assert train("run.resume=runs/r", *words[:2], "train.epochs=2") == 0


def test_remote_blocks_of_a_power_of_two_come_side_by_side(bucket, dense_file):
    rows = open_store("data.train", put(bucket, dense_file(16 * 512, (4, 32, 32), 512)), DENSE_FIELDS)
    bucket.delay_s = 0.2
    bucket.max_at_work = 0
    side_by_side(lambda block: rows[512 * block : 512 * block + 1], range(2, 14))
    assert bucket.max_at_work >= 6


def test_remote_fingerprints_of_many_files_come_side_by_side(bucket, dense_file):
    for number in range(6):
        put(bucket, dense_file(5000, (3, 16, 16), 250, name=f"part-{number}.h5"))
    rows = open_store("data.train", "s3://b/part-*.h5", DENSE_FIELDS)
    bucket.delay_s = 0.05
    bucket.max_at_work = 0
    assert rows.stored_fingerprint == open_store("data.train", "part-*.h5", DENSE_FIELDS).stored_fingerprint
    assert bucket.max_at_work >= 4


def test_remote_copies_of_an_object_that_changed_are_named(bucket, dense_file, capfd):
    url = put(bucket, dense_file(500, (3, 16, 16)))
    open_store("data.train", url, DENSE_FIELDS)
    (old,) = Path("data/cache").glob("*.h5")
    forget()
    put(bucket, path := dense_file(600, (3, 16, 16)))
    bucket.tag = '"2"'
    rows = open_store("data.train", url, DENSE_FIELDS)
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))
    assert f"{url} has changed since it was copied; if no run reads what it was: rm {old}*" in capfd.readouterr().out


def test_remote_rows_of_a_copy_that_was_copied(bucket, dense_file):
    """Holes that were filled on the way are no rows."""
    url = put(bucket, path := dense_file(3000, (3, 32, 32), 100))
    open_store("data.train", url, DENSE_FIELDS)[1000:1200]
    forget()
    subprocess.run("tar cf t data/cache; mv data/cache old; tar xf t", shell=True, check=True)
    rows = open_store("data.train", url, DENSE_FIELDS)
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))
    assert remote.counters()["storage/local_pct"] == 100


def test_remote_rows_of_a_copy_that_is_changed_in_use(bucket, dense_file):
    rows = open_store("data.train", put(bucket, path := dense_file(3000, (3, 32, 32), 100)), DENSE_FIELDS)
    read_rows(rows)
    (copy,) = Path("data/cache").glob("*.h5")
    os.truncate(copy, 0)
    os.truncate(copy, Path(path).stat().st_size)
    with pytest.raises(UserError, match=f"{copy} was changed while in use; continue with run.resume=auto"):
        rows[1000:1001]
    forget()
    rows = open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))


READ_ALL = """
from fastgpu.storage.store import open_store
rows = open_store("data.train", "s3://b/rows.h5", {"images": "images", "labels": "labels"})
for start in range(0, len(rows), 100):
    rows[start : start + 100]
"""


def python(code: str, **options) -> subprocess.Popen:
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen([sys.executable, "-c", code], env=env, text=True, **options)


def test_remote_process_ends_with_0_after_rows_that_h5py_reads(bucket, dense_file):
    put(bucket, dense_file(1000, (3, 16, 16), 100, fletcher32=True))
    assert python(READ_ALL).wait() == 0


def test_remote_wait_for_a_server_that_hangs_ends_by_ctrl_c(bucket, dense_file):
    put(bucket, dense_file(1000, (3, 16, 16), 100, fletcher32=True))
    bucket.hanging = 1
    bucket.hang_s = 100
    process = python(READ_ALL, stderr=subprocess.PIPE)
    wait_until(lambda: bucket.n_at_work)
    process.send_signal(signal.SIGINT)
    assert "KeyboardInterrupt" in process.communicate(timeout=60)[1]
    assert process.returncode == -signal.SIGINT


@pytest.mark.slow
def test_remote_copy_is_shared_by_processes(bucket, dense_file):
    path = dense_file(3000, (3, 32, 32), 100)
    put(bucket, path)
    bucket.delay_s = 0.01
    processes = [python(READ_ALL) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    n_gets = len(bucket.gets)
    rows = open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))
    assert len(bucket.gets) == n_gets
    (copy,) = Path("data/cache").glob("*.h5")
    assert copy.read_bytes() == Path(path).read_bytes()


def test_remote_file_refuses_a_fork(bucket, dense_file):
    rows = open_store("data.train", put(bucket, dense_file(4000, (3, 32, 32), 100)), DENSE_FIELDS)

    other = put(bucket, dense_file(10, name="other.h5"))

    def read(pipe):
        assert len(rows[:8]["labels"]) == 8  # what is local can be read
        with pytest.raises(UserError, match="cannot be fetched by a fork"):
            rows[2000:2008]
        with pytest.raises(UserError, match="cannot be fetched by a fork.*use loader.num_workers=0, or copy the file"):
            open_store("data.train", other, DENSE_FIELDS)
        pipe.send("refused")

    _, pipe = fork(read)
    assert pipe.recv() == "refused"


def test_remote_fork_reads_while_its_parent_fetches(bucket, dense_file):
    """The threads that fetch, and end, are not in the fork."""
    rows = open_store("data.train", put(bucket, dense_file(1000, (3, 16, 16), 100)), DENSE_FIELDS)
    read_rows(rows)
    forget()
    rows = open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)
    fetching = threading.Event()
    ending = threading.Event()

    def check(content):
        fetching.set()
        ending.wait()

    offset, count, _ = rows.parts[0].columns["images"].chunks[4].tolist()
    thread = threading.Thread(target=rows.file.prepare, args=(offset, count, check))
    thread.start()
    fetching.wait()
    process, pipe = fork(lambda pipe: pipe.send(len(rows[400:500]["labels"])))
    try:
        assert pipe.poll(30)
        assert pipe.recv() == 100
    finally:
        process.kill()
        ending.set()
        thread.join()


@pytest.mark.slow
def test_remote_run_is_killed_and_resumed_bit_for_bit(bucket, folder):
    """What it has fetched until then is not fetched again."""
    rng = np.random.default_rng(0)
    with h5py.File("rows.h5", "w") as file:  # of 35 blocks, of which few come with the metadata
        for name, n_rows in (("train", 700), ("val", 100)):
            x = rng.standard_normal((n_rows, 1024), np.float32)
            file.create_dataset(f"{name}/x", data=x, chunks=(20, 1024))
            file[f"{name}/y"] = x[:, 0]
    put(bucket, "rows.h5")
    settings = ["data.tier=disk", "run.checkpoint_every_steps=4", "train.epochs=2"]
    assert train("run.name=local", *settings) == 0
    bucket.delay_s = 0.1  # the run is killed in its first epoch
    words = ["run.name=remote", "run.resume=auto", "data.train=s3://b/rows.h5::/train", "data.val=s3://b/rows.h5::/val"]
    process = subprocess.Popen(train_command(*settings, *words))
    wait_for_step(folder / "runs/remote", 4, process)
    process.kill()
    process.wait()
    fetched = bucket.gets.copy()
    bucket.delay_s = 0.0
    assert train(*settings, *words) == 0
    assert same_weights(folder / "runs/remote", folder / "runs/local")
    assert any(point.get("storage/requests") for point in metrics_of(folder / "runs/remote"))
    assert len(fetched) > 5
    again = [each for each in bucket.gets[len(fetched) :] if each in fetched]
    assert len(again) <= 16  # those that were under way


@pytest.mark.nightly
@pytest.mark.slow
def test_remote_rows_are_those_of_the_goldens():
    goldens = Path(__file__).parents[2] / "goldens"
    printed_by([sys.executable, "goldens.py", "--over-http", "--only", "g1", "g2"], goldens)


@pytest.mark.nightly
@pytest.mark.slow
def test_remote_rows_of_a_server_that_speaks_s3(bucket, dense_file, monkeypatch):
    """With signatures, listings and errors as S3 has them: moto checks all but the secret."""
    port = free_port()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.delenv("AWS_SKIP_SIGNATURE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    with subprocess.Popen([sys.executable, "-m", "moto.server", "-p", str(port)]) as server:
        try:
            wait_for_port(port, server)
            urlopen(Request(f"http://127.0.0.1:{port}/bucket", method="PUT")).close()
            client = obstore.store.from_url("s3://bucket/deep/down", client_options={"allow_http": True})
            for number in range(2):
                path = dense_file(2000, (3, 32, 32), 500, name=f"part-{number}.h5", start=2000 * number)
                obstore.put(client, f"part-{number}.h5", Path(path))
            rows = open_store("data.train", "s3://bucket/deep/down/part-*.h5", DENSE_FIELDS)
            assert same(read_rows(rows), read_rows(open_store("data.train", "part-*.h5", DENSE_FIELDS)))
            obstore.put(client, "part-0.h5", Path("part-1.h5"))
            forget()
            rows = open_store("data.train", "s3://bucket/deep/down/part-0.h5", DENSE_FIELDS)
            assert same(read_rows(rows), read_rows(open_store("data.train", "part-1.h5", DENSE_FIELDS)))
            with pytest.raises(UserError, match="s3://bucket/none.h5 does not exist"):
                open_store("data.train", "s3://bucket/none.h5", DENSE_FIELDS)
        finally:
            server.terminate()
