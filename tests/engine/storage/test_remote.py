import errno
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from hashlib import sha256
from itertools import chain
from pathlib import Path
from urllib.request import Request, urlopen

import convert
import h5py
import numpy as np
import obstore.store
import pytest
import torch

from fastgpu.feed import sizes
from fastgpu.process.launch import UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import local_copy, remote
from fastgpu.storage.store import open_store
from support import PROJECT
from support.object_store import Store, serve
from support.ranks import fork, free_port, printed_by, train_command, wait_for_port, wait_until
from support.rows import DENSE_FIELDS, open_feed, read_rows
from support.runs import metrics_of, same_weights, train, wait_for_step


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
    monkeypatch.setattr(remote, "PATIENCE", timedelta(seconds=1))
    monkeypatch.setitem(remote.PAUSES, "init_backoff", timedelta(seconds=0.1))
    monkeypatch.setitem(remote.TIMES, "read_timeout", timedelta(seconds=1))
    forget()
    yield store
    server.shutdown()
    forget()
    remote.RemoteFile.has_warned = False


def forget() -> None:
    """As a new process, which has opened nothing."""
    remote._opened.clear()
    remote._client.cache_clear()


def put(store: Store, path: str) -> str:
    """Put a file into the bucket. Returns its URL."""
    store.objects[f"/b/{Path(path).name}"] = Path(path).read_bytes()
    return f"s3://b/{Path(path).name}"


def same(rows: dict, others: dict) -> bool:
    def parts(column):
        return (column.values, column.offsets) if isinstance(column, RaggedArray) else (column,)

    pairs = [(one, other) for name in others for one, other in zip(parts(rows[name]), parts(others[name]), strict=True)]
    return rows.keys() == others.keys() and all(np.array_equal(one, other) for one, other in pairs)


def with_digests(path: str) -> str:
    """Write the checksums of the images, as convert.py does."""
    with h5py.File(path, "r+") as file:
        images = file["images"]
        blocks = [images[chunk] for chunk in images.iter_chunks()]
        digests = [np.frombuffer(sha256(block.tobytes()).digest(), np.uint8) for block in blocks]
        file["fastgpu_sha256/images"] = np.stack(digests)
    return path


@pytest.mark.parametrize("options", [{}, {"chunk": None}, {"compression": "gzip"}, {"fletcher32": True}], ids=str)
def test_remote_rows_are_fetched_once_and_equal_local_ones(bucket, dense_file, options):
    local = open_store("data.train", path := dense_file(3000, (3, 16, 16), **{"chunk": 64} | options), DENSE_FIELDS)
    rows = open_store("data.train", put(bucket, path), DENSE_FIELDS)
    assert rows.fingerprint == local.fingerprint
    assert same(read_rows(rows), read_rows(local))
    ranges = bucket.gets.copy()
    assert len(set(ranges)) == len(ranges)
    assert same(read_rows(rows), read_rows(local))
    forget()
    assert same(read_rows(open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)), read_rows(local))
    assert bucket.gets == ranges


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


def test_remote_readers_that_waited_for_the_network_end(bucket, dense_file, monkeypatch):
    monkeypatch.setattr(sizes, "available_cpus", lambda: 2)
    rows = open_store("data.train", put(bucket, dense_file(4000, (3, 32, 32), 50)), DENSE_FIELDS)
    feed = open_feed(rows, BlockSampler(rows, 50, pool_batches=4, seed=1), "disk", n_readers=24)

    def n_readers() -> int:
        return sum(thread.name.startswith("reader_") for thread in threading.enumerate())

    batches = feed.batches(0)
    next(batches)
    assert n_readers() == 24
    deque(chain(batches, feed.batches(1)), maxlen=0)
    wait_until(lambda: n_readers() == 2)
    feed.close()


@pytest.mark.slow
def test_remote_requests_are_three_and_one_a_block(bucket, dense_file):
    path = dense_file(2000, (3, 32, 32), 250)
    convert.main(convert.parse(["repack", path, "converted.h5", "--seed", "0"]))
    rows = open_store("data.train", put(bucket, "converted.h5"), DENSE_FIELDS)
    assert rows.file.n_requests == 3  # its size, and metadata at its beginning and end
    read_rows(rows)
    assert rows.file.n_requests <= 3 + len(rows.block_rows)
    assert len(set(bucket.gets)) == len(bucket.gets)


FAULTS = {
    "503 for a while": {"refused": 2},
    "a body that is cut": {"cut": 1},
    "a server that hangs": {"hanging": 1},
    "no If-Match": {"ignores_tags": True},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_remote_fault_is_survived(bucket, dense_file, fault):
    local = open_store("data.train", path := dense_file(500, (3, 16, 16)), DENSE_FIELDS)
    rows = open_store("data.train", put(bucket, path), DENSE_FIELDS)
    vars(bucket).update(FAULTS[fault])
    assert same(read_rows(rows), read_rows(local))


EXPIRED = "<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
LINES = {
    "503 for ever": ({"refused": 99}, "cannot be read: .*503.*check the URL, and the credentials .*run.resume=auto"),
    "a token that expires": ({"refused": 99, "status": 403, "message": EXPIRED}, "cannot be read: .*token has expired"),
    "an object that is removed": ({"refused": 99, "status": 404}, "does not exist"),
    "another object": ({"tag": '"2"'}, "was changed while in use; restore the file"),
    "another object, no If-Match": ({"tag": '"2"', "ignores_tags": True}, "was changed while in use"),
    "ranges that are ignored": ({"ignores_ranges": True}, "cannot be read: .*[Rr]ange"),
    "a flipped bit": ({"flipped": 99}, "images: block 0 is damaged: its SHA-256 is another one; restore"),
}


@pytest.mark.parametrize("fault", LINES)
def test_remote_fault_is_one_line(bucket, dense_file, fault):
    rows = open_store("data.train", put(bucket, with_digests(dense_file(3000, (3, 32, 32), 750))), DENSE_FIELDS)
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
    assert "cannot be read: " in message("what://b/x.h5")
    Path("data").write_text("a file")
    assert "needs a local copy, but data/cache cannot be written (" in message(url)
    Path("data").unlink()
    bucket.objects["/b/rows.h5"] = b"no HDF5" * 100
    assert "cannot be read as HDF5: " in message(url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # nobody listens
    assert "cannot be read: " in message(url)
    monkeypatch.setattr(remote, "find_spec", lambda name: None)
    assert message(url) == "data.train: s3://b/rows.h5 is read by obstore: pip install -c constraints.txt obstore"


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


READ_ALL = """
from fastgpu.storage.store import open_store
rows = open_store("data.train", "s3://b/rows.h5", {"images": "images", "labels": "labels"})
for start in range(0, len(rows), 100):
    rows[start : start + 100]
"""


@pytest.mark.slow
def test_remote_copy_is_shared_by_processes(bucket, dense_file):
    path = dense_file(3000, (3, 32, 32), 100)
    put(bucket, path)
    bucket.delay_s = 0.01
    env = {**os.environ, "PYTHONPATH": str(PROJECT)}
    processes = [subprocess.Popen([sys.executable, "-c", READ_ALL], env=env) for _ in range(2)]
    assert [process.wait() for process in processes] == [0, 0]
    n_gets = len(bucket.gets)
    rows = open_store("data.train", "s3://b/rows.h5", DENSE_FIELDS)
    assert same(read_rows(rows), read_rows(open_store("data.train", path, DENSE_FIELDS)))
    assert len(bucket.gets) == n_gets
    (copy,) = Path("data/cache").glob("*.h5")
    assert copy.read_bytes() == Path(path).read_bytes()


def test_remote_file_refuses_a_fork(bucket, dense_file):
    rows = open_store("data.train", put(bucket, dense_file(4000, (3, 32, 32), 100)), DENSE_FIELDS)

    def read(pipe):
        with pytest.raises(UserError, match="cannot be fetched by a fork"):
            rows[2000:2008]
        pipe.send("refused")

    _, pipe = fork(read)
    assert pipe.recv() == "refused"


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
