"""From readers to files: names, orders, broken rows, whatever ends the process; blocks, checksums and statistics."""

import hashlib
import os
import signal
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpu.convert import writer as writer_module
from fastgpu.convert import writing
from fastgpu.convert.splits import split_rows
from fastgpu.convert.summary import damaged
from fastgpu.convert.writer import choose_block_rows, write_rows
from fastgpu.convert.writing import Writing, write_files
from fastgpu.process.config import LoaderConfig
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage import arrays
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.chunks import CHECKSUMS
from fastgpu.storage.hdf5 import attributes_of
from fastgpu.storage.store import open_store
from support import PROJECT
from support.ranks import run_to_end, wait_until
from support.readers import Numbers
from support.rows import ITEMS, is_ragged, numbered, numbers_of, ragged, read_rows


def numbers_in(path: Path) -> list[int]:
    with h5py.File(path) as file:
        assert (file["x"][:] == file["y"][:][:, None]).all()
        return file["y"][:].tolist()


def test_writing_order_is_that_of_the_seed(tmp_path):
    orders = []
    for seed in (1, 1, 2, None):
        write_files({"": Numbers(1000)}, tmp_path / "x.h5", Writing(seed=seed, replace=True))
        orders.append(numbers_in(tmp_path / "x.h5"))
    assert orders[0] == orders[1] != orders[2]
    assert orders[3] == sorted(orders[0]) == list(range(1000))
    assert 0.4 < np.mean(np.diff(orders[0]) > 0) < 0.6


@pytest.mark.parametrize(("asked", "expected"), [(None, 5), (3, 3)])
def test_writing_takes_the_threads_asked_for(tmp_path, monkeypatch, asked, expected):
    loaders = []
    monkeypatch.setattr(writing, "available_cpus", lambda: 5)
    monkeypatch.setattr(
        writing, "LoaderConfig", lambda **options: loaders.append(LoaderConfig(**options)) or loaders[-1]
    )
    write_files({"": Numbers(10)}, tmp_path / "x.h5", Writing(n_threads=asked))
    assert [each.num_readers for each in loaders] == [expected]


def test_writing_splits_to_files(tmp_path, capsys):
    reader = Numbers(100)
    reader.splits = np.arange(100) % 2
    write_files(split_rows(reader), tmp_path / "new/x.h5")
    assert sorted(numbers_in(tmp_path / "new/x-train.h5")) == list(range(0, 100, 2))
    assert sorted(numbers_in(tmp_path / "new/x-val.h5")) == list(range(1, 100, 2))
    assert "warning" not in capsys.readouterr().out
    write_files({"": reader}, tmp_path / "new/x.h5")
    assert "x-train.h5, " in capsys.readouterr().out.partition("warning: ")[2]


def test_writing_refuses_attributes_early(tmp_path):
    reader = Numbers(10)
    reader.attributes["date"] = np.datetime64("2026-01-01")
    reader.fields  # noqa: B018 (reads the first row)
    reader.odd = range(10)  # a row that is read now is broken
    with pytest.raises(TypeError):
        write_files({"": reader}, tmp_path / "x.h5")
    assert not reader.broken


@pytest.mark.parametrize(("n_rows", "broken"), [(60, (3,)), (200, (0, 9))])
def test_writing_leaves_out_few_broken_rows(tmp_path, n_rows, broken):
    """One, or 1 %. The list of them is of the file that is there."""
    listed = tmp_path / "x.h5.skipped.txt"
    parts = {"": Numbers(n_rows, broken)}
    write_files(parts, tmp_path / "x.h5", Writing(max_broken=0.01))
    assert sorted(numbers_in(tmp_path / "x.h5")) == [row for row in range(n_rows) if row not in broken]
    lines = [f"numbers: row {row} cannot be read: it is odd" for row in broken]
    assert listed.read_text().splitlines() == lines
    (tmp_path / "x.h5").rename(tmp_path / "kept.h5")
    with pytest.raises(UserError, match="x.h5.skipped.txt exists; --force replaces a file"):
        write_files(parts, tmp_path / "x.h5", Writing(max_broken=0.01))
    write_files({"": Numbers(n_rows)}, tmp_path / "x.h5", Writing(replace=True))
    assert not listed.exists()


@pytest.mark.parametrize(
    ("n_rows", "broken", "max_broken"),
    [(250, (0, 9), 0.0), (99, (3, 7), 0.01), (299, (0, 9, 8), 0.01), (209, range(0, 210, 10), 0.1)],
)
def test_writing_of_many_broken_rows_changes_nothing(tmp_path, n_rows, broken, max_broken):
    (tmp_path / "x.h5").write_text("before")
    with pytest.raises(UserError, match=rf"{len(broken)} of {n_rows} rows are broken, .* nothing else .* 1 % at most"):
        write_files({"": Numbers(n_rows, broken)}, tmp_path / "x.h5", Writing(replace=True, max_broken=max_broken))
    lines = "".join(f"numbers: row {row} cannot be read: it is odd\n" for row in sorted(broken))
    written = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert written == {"x.h5": "before", "x.h5.broken.txt": lines}
    write_files({"": Numbers(n_rows)}, tmp_path / "x.h5", Writing(replace=True))
    assert [path.name for path in tmp_path.iterdir()] == ["x.h5"]


def test_writing_follows_no_link_and_replaces_no_pipe(tmp_path):
    (tmp_path / "x.h5").symlink_to("nowhere")
    with pytest.raises(UserError, match="x.h5 exists; --force replaces a file"):
        write_files({"": Numbers(3)}, tmp_path / "x.h5")
    write_files({"": Numbers(3)}, tmp_path / "x.h5", Writing(replace=True))
    assert sorted(numbers_in(tmp_path / "x.h5")) == [0, 1, 2]
    os.mkfifo(tmp_path / "pipe.h5")
    with pytest.raises(UserError, match="pipe.h5 is a device or a pipe; name a file"):
        write_files({"": Numbers(3)}, tmp_path / "pipe.h5", Writing(replace=True))
    # Nor do the lists of broken rows.
    for name in ("y.h5.skipped.txt", "z.h5.broken.txt"):
        (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(UserError, match="y.h5.skipped.txt exists; --force replaces a file"):
        write_files({"": Numbers(3, (1,))}, tmp_path / "y.h5", Writing(max_broken=0.5))
    write_files({"": Numbers(3, (1,))}, tmp_path / "y.h5", Writing(max_broken=0.5, replace=True))
    with pytest.raises(UserError, match="z.h5.broken.txt lists"):
        write_files({"": Numbers(3, (1,))}, tmp_path / "z.h5")
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("kind", ["f2", "f4", "f8"])
def test_writing_counts_what_is_not_finite(tmp_path, capsys, kind):
    x, y = np.zeros((100, 3), kind), np.zeros(100, kind)
    x[7], x[9, 0], y[5] = np.nan, np.inf, -np.inf
    values = np.zeros(200, kind)
    values[[0, 20]] = np.nan  # the first one is of no row
    ragged_rows = RaggedArray(values, np.arange(101) + 10)
    columns = {"x": x, "y": y, "z": ragged_rows, "n": np.arange(100)}
    write_files({"": ArrayDataset("made up", columns)}, tmp_path / "x.h5")
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert [line.split()[1:4] for line in warnings] == [["x", "has", "4"], ["y", "has", "1"], ["z", "has", "1"]]
    # Or their rows are broken.
    write_files({"": ArrayDataset("made up", columns)}, tmp_path / "x.h5", Writing(None, replace=True, max_broken=0.1))
    lines = (tmp_path / "x.h5.skipped.txt").read_text().splitlines()
    names = {5: "y", 7: "x", 9: "x", 10: "z"}
    assert lines == [f"made up: row {row}: {name} is NaN or infinite" for row, name in names.items()]
    with h5py.File(tmp_path / "x.h5") as file:
        kept = file["n"][:].tolist()
        assert kept == [row for row in range(100) if row not in (5, 7, 9, 10)]
        assert len(file["z/values"]) == len(kept) == np.isfinite(file["z/values"][:]).sum()
    assert "warning" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_writing_interrupted_leaves_nothing(tmp_path, number):
    with h5py.File(tmp_path / "old.h5", "w") as file:
        file["images"] = np.random.default_rng(0).integers(0, 256, (100_000, 3, 16, 16), np.uint8)  # seconds of gzip
        file["labels"] = np.zeros(100_000, int)
    command = [sys.executable, str(PROJECT / "convert.py"), "repack", "old.h5", "new.h5", "--compression", "gzip"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until(lambda: bool([*tmp_path.glob(".new.*.h5")]), process)
    # Python swallows an exception in a callback, such as one of importlib: then a person would try again.
    while process.poll() is None:
        os.kill(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
    error = process.stderr.read()
    assert process.returncode == 128 + number, error
    assert "Traceback" not in error or "Exception ignored" in error
    assert [path.name for path in tmp_path.iterdir()] == ["old.h5"]


@pytest.mark.slow
def test_writing_to_a_full_disk_leaves_nothing(tmp_path):
    np.save(tmp_path / "x.npy", np.ones((100, 1 << 16), np.uint8))
    command = f"trap '' XFSZ; ulimit -f 1024; '{sys.executable}' '{PROJECT / 'convert.py'}' arrays x=x.npy y.h5"
    result = run_to_end(["bash", "-c", command], tmp_path)
    assert "File too large" in result.stderr
    assert result.returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ["x.npy"]


IMAGES = {"images": Field(np.dtype("u1"), (1, 4, 2)), "labels": Field(np.dtype("i8"), ())}
RAGGED = {"items": Field(np.dtype("i4"), (), 2.0, ITEMS), "words": Field(np.dtype("u2"), (), 2.0)}


def parts_of(rows: int, part_rows: int) -> Iterator[dict[str, Any]]:
    """Numbered rows, in parts whose arrays are overwritten when they were taken."""
    for start in range(0, rows, part_rows):
        labels = np.arange(start, min(start + part_rows, rows))
        images, items = numbered(len(labels), start=start), ragged(labels)
        words = RaggedArray(np.append(0, items.values).astype("u2"), items.offsets + 1)  # of a larger array
        yield {"images": images, "labels": labels, "items": items, "words": words}
        images[:], labels[:], items.values[:], items.offsets[:], words.values[:] = 0, -1, -1, -1, 0


@given(
    came=st.integers(1, 300),
    more=st.integers(0, 40),
    part_rows=st.integers(1, 90),
    block_bytes=st.integers(8, 600),
    compression=st.sampled_from(["none", "gzip"]),
)
def test_writer_rows_come_back_in_order(tmp_path_factory, came, more, part_rows, block_bytes, compression):
    """Whatever the parts and blocks. Fewer rows than announced make the file shorter."""
    path = tmp_path_factory.mktemp("writer") / "rows.h5"
    fields = IMAGES | RAGGED
    parts = parts_of(came, part_rows)
    with pytest.MonkeyPatch.context() as patch:
        sizes = {"BLOCK_BYTES": block_bytes, "RAGGED_BLOCK_BYTES": block_bytes, "MIN_CHUNK_BYTES": 4, "MIN_BLOCKS": 1}
        for name, value in sizes.items():
            patch.setattr(writer_module, name, value)
        assert write_rows(path, came + more, fields, parts, attributes={}, compression=compression) == came
    assert not damaged(str(path))
    store = open_store("data.train", str(path), {name: name for name in fields})
    assert [field.n_items for field in store.fields.values()] == [None, None, ITEMS, None]
    found = read_rows(store)
    assert numbers_of(found["images"]) == found["labels"].tolist() == list(range(came))
    assert is_ragged(found["items"], range(came))
    assert is_ragged(found["words"], range(came))
    with h5py.File(path) as file:
        assert len(file[f"{CHECKSUMS}/images"]) == -(-came // file["images"].chunks[0])


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_writer_files_are_read_by_any_tool(tmp_path, compression):
    """A CSR matrix is one as anndata writes it, whose values take no room. Clips are no images with a mean."""
    path = tmp_path / "rows.h5"
    rows = {"images": numbered(600), "labels": np.arange(600), "items": ragged(range(600))}
    rows["clips"] = RaggedArray(np.ones((600, 3, 4, 4), np.uint8), np.arange(601))
    fields = {"clips": Field(np.dtype("u1"), (3, 4, 4), 2.0), **IMAGES, "items": RAGGED["items"]}
    write_rows(path, 600, fields, [rows], attributes={"class_names": ["a", "größe"]}, compression=compression)
    with h5py.File(path) as file:
        assert file.attrs["fastgpu_format"] == 1
        assert attributes_of(file)["class_names"] == ["a", "größe"]
        for name in IMAGES:
            np.testing.assert_array_equal(file[name][:], rows[name])
            size = file[name].chunks[0]
            for block, checksum in enumerate(file[f"{CHECKSUMS}/{name}"][:]):
                block_rows = rows[name][block * size : (block + 1) * size]
                assert hashlib.sha256(block_rows.tobytes()).digest() == checksum.tobytes()
        assert file["clips/values"].shape == (600, 3, 4, 4)
        assert len(file.attrs["mean"]) == 1
        matrix = file["items"]
        found = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [600, ITEMS]}
        assert attributes_of(matrix) == found
        assert is_ragged(RaggedArray(matrix["indices"][:], matrix["indptr"][:]), range(600))
        assert (matrix["data"][:] == 1).all()
        assert matrix["data"].id.get_storage_size() == 0
        assert len(matrix["data"]) == len(matrix["indices"])
    assert b"GCOL" not in path.read_bytes()  # no heap of text of any length, which HDF5 walks without a check


def test_writer_blocks_of_two_mib(tmp_path):
    shape = (3, 64, 64)
    fields = {"images": Field(np.dtype("u1"), shape), "labels": Field(np.dtype("i8"), ())}
    images, labels = fields.values()
    assert [choose_block_rows(100_000, field, images) for field in (images, labels)] == [170, 100_000]
    assert choose_block_rows(10**9, labels, images) == 170  # too long for memory: blocks as those of the images
    assert [choose_block_rows(3, field, images) for field in (images, labels)] == [1, 3]
    rows = {"images": np.zeros((2560, *shape), "u1"), "labels": np.arange(2560)}
    write_rows(tmp_path / "rows.h5", 2560, fields, [rows], attributes={})
    with h5py.File(tmp_path / "rows.h5") as file:
        data = file["images"]
        offsets = [data.id.get_chunk_info(number).byte_offset for number in range(data.id.get_num_chunks())]
        assert {*np.diff(offsets).tolist()} == {10 * 3 * 64 * 64}  # still 256 blocks


def statistics_of(path: Path, *parts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The mean and standard deviation of each channel that a file of these images says."""
    fields = {"images": Field(np.dtype("u1"), parts[0].shape[1:])}
    write_rows(path, sum(map(len, parts)), fields, [{"images": part} for part in parts], attributes={})
    with h5py.File(path) as file:
        return file.attrs["mean"], file.attrs["std"]


def test_writer_statistics_from_all_rows(tmp_path, monkeypatch):
    images = np.random.default_rng(0).integers(0, 200, (300, 3, 5, 4), dtype=np.uint8)
    images[:, 1] //= 2
    mean, std = statistics_of(tmp_path / "a.h5", images[:101], images[101:])
    np.testing.assert_allclose(mean, images.mean((0, 2, 3)), rtol=1e-4)
    np.testing.assert_allclose(std, images.std((0, 2, 3)), rtol=1e-4)
    monkeypatch.setattr(writer_module, "STATISTICS_ROWS", 10)
    numbers = np.arange(100, dtype=np.uint8).reshape(-1, 1, 1, 1)
    assert statistics_of(tmp_path / "b.h5", *np.split(numbers, range(7, 100, 7)))[0] == 45  # of 0, 10, ... 90


@pytest.mark.parametrize("shape", [(1024, 683), (683, 1024), (96, 96)])
def test_writer_statistics_from_the_whole_image(tmp_path, shape):
    """Stripes: any column alone, or any share of them at regular steps, has another mean."""
    image = np.zeros(shape, np.uint8)
    image[:, : shape[1] // 4] = 200
    image[::3] = 40
    (mean,), (std,) = statistics_of(tmp_path / "a.h5", np.broadcast_to(image, (8, 1, *shape)))
    np.testing.assert_allclose([mean, std], [image.mean(), image.std()], atol=0.05 * image.std())


def test_writing_in_order_takes_no_memory_for_each_row(tmp_path, monkeypatch):
    """Rows may be billions of tokens, of which a number each would take more memory than there is."""
    monkeypatch.setattr(writing, "POOL_ROWS_IN_ORDER", 10_000)
    for module in (writing, arrays):
        monkeypatch.setattr(module, "BLOCK_BYTES", 10_000)
    tokens = np.random.default_rng(0).integers(0, 256, 2_000_000, np.uint8)
    source = ArrayDataset("tokens", {"x": tokens})
    tracemalloc.start()
    write_files(split_rows(source), tmp_path / "x.h5", Writing(seed=None))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 2 * len(tokens)
    with h5py.File(tmp_path / "x.h5") as file:
        np.testing.assert_array_equal(file["x"][:], tokens)
