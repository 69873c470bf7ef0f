import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpu.convert import writer as writer_module
from fastgpu.convert.summary import damaged
from fastgpu.convert.writer import choose_block_rows, write_rows
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.hdf5 import attributes_of
from fastgpu.storage.layout import DIGESTS
from fastgpu.storage.store import open_store
from support.rows import ITEMS, is_ragged, numbered, numbers_of, ragged, read_rows

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


@settings(max_examples=40, deadline=None)
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
        assert len(file[f"{DIGESTS}/images"]) == -(-came // file["images"].chunks[0])


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
            for block, digest in enumerate(file[f"{DIGESTS}/{name}"][:]):
                block_rows = rows[name][block * size : (block + 1) * size]
                assert hashlib.sha256(block_rows.tobytes()).digest() == digest.tobytes()
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
