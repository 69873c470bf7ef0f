import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from harness import ITEMS, is_ragged, numbered, numbers_of, ragged, read_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from fastgpu.convert import writer as writer_module
from fastgpu.convert.summary import damaged
from fastgpu.convert.writer import choose_block_rows, write_rows
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.storage.hdf5 import attributes_of
from fastgpu.storage.layout import DIGESTS
from fastgpu.storage.store import open_store

IMAGES = {"images": Field(np.dtype("u1"), (1, 4, 2)), "labels": Field(np.dtype("i8"), ())}
RAGGED = {"items": Field(np.dtype("i4"), (), 2.0, ITEMS), "words": Field(np.dtype("u2"), (), 2.0)}


def parts_of(rows: int, part_rows: int) -> Iterator[dict[str, Any]]:
    """Numbered rows, in parts whose arrays are overwritten when they were taken."""
    for start in range(0, rows, part_rows):
        labels = np.arange(start, min(start + part_rows, rows))
        images, items = numbered(len(labels), start=start), ragged(labels)
        words = RaggedArray(items.values.astype("u2"), items.offsets)
        yield {"images": images, "labels": labels, "items": items, "words": words}
        images[:], labels[:], items.values[:], items.offsets[:], words.values[:] = 0, -1, -1, -1, 0


def write(path: Path, rows: int, fields: dict[str, Field], *parts: dict[str, Any], **options: Any) -> None:
    write_rows(path, rows, fields, parts, attributes={}, **options)


@settings(max_examples=40, deadline=None)
@given(
    came=st.integers(1, 300),
    more=st.integers(0, 40),
    part_rows=st.integers(1, 90),
    block_bytes=st.integers(8, 600),
    compression=st.sampled_from(["none", "gzip"]),
)
def test_rows_come_back_in_order(tmp_path_factory, came, more, part_rows, block_bytes, compression):
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
def test_any_hdf5_tool_reads_what_was_written(tmp_path, compression):
    path = tmp_path / "rows.h5"
    weights = np.random.default_rng(0).normal(size=(600, 3)).astype("f4")
    rows = {"images": numbered(600), "labels": np.arange(600), "weights": weights}
    fields = IMAGES | {"weights": Field(np.dtype("f4"), (3,))}
    write_rows(path, 600, fields, [rows], attributes={"class_names": ["a", "größe"]}, compression=compression)
    with h5py.File(path) as file:
        assert file.attrs["fastgpu_format"] == 1
        assert attributes_of(file)["class_names"] == ["a", "größe"]
        for name, written in rows.items():
            np.testing.assert_array_equal(file[name][:], written)
            size = file[name].chunks[0]
            for block, digest in enumerate(file[f"{DIGESTS}/{name}"][:]):
                assert hashlib.sha256(written[block * size : (block + 1) * size].tobytes()).digest() == digest.tobytes()
    assert b"GCOL" not in path.read_bytes()  # no heap of text of any length, which HDF5 walks without a check


def test_blocks_are_whole_rows_of_two_mib_in_one_piece(tmp_path):
    shape = (3, 64, 64)
    fields = {"images": Field(np.dtype("u1"), shape), "labels": Field(np.dtype("i8"), ())}
    images, labels = fields.values()
    assert [choose_block_rows(100_000, field, images) for field in (images, labels)] == [170, 100_000]
    assert choose_block_rows(10**9, labels, images) == 170  # too long for memory: blocks as those of the images
    assert [choose_block_rows(3, field, images) for field in (images, labels)] == [1, 3]
    assert choose_block_rows(2560, images, images) == 10  # still 256 blocks
    write(tmp_path / "rows.h5", 2560, fields, {"images": np.zeros((2560, *shape), "u1"), "labels": np.arange(2560)})
    with h5py.File(tmp_path / "rows.h5") as file:
        data = file["images"]
        offsets = [data.id.get_chunk_info(number).byte_offset for number in range(data.id.get_num_chunks())]
        assert {*np.diff(offsets).tolist()} == {10 * 3 * 64 * 64}


def test_mean_and_std_of_each_channel(tmp_path):
    images = np.random.default_rng(0).integers(0, 200, (300, 3, 5, 4), dtype=np.uint8)
    images[:, 1] //= 2
    fields = {"images": Field(np.dtype("u1"), (3, 5, 4))}
    write(tmp_path / "a.h5", 300, fields, {"images": images[:101]}, {"images": images[101:]})
    write_rows(tmp_path / "b.h5", 300, fields, [{"images": images}], attributes={"mean": [1.0], "std": [2.0]})
    with h5py.File(tmp_path / "a.h5") as file, h5py.File(tmp_path / "b.h5") as given:
        np.testing.assert_allclose(file.attrs["mean"], images.mean((0, 2, 3)), rtol=1e-4)
        np.testing.assert_allclose(file.attrs["std"], images.std((0, 2, 3)), rtol=1e-4)
        assert (given.attrs["mean"], given.attrs["std"]) == (1, 2)


@pytest.mark.parametrize("shape", [(1024, 683), (683, 1024), (96, 96)])
def test_statistics_come_from_pixels_spread_over_the_whole_image(tmp_path, shape):
    """Stripes: any column alone, or any share of them at regular steps, has another mean."""
    image = np.zeros(shape, np.uint8)
    image[:, : shape[1] // 4] = 200
    image[::3] = 40
    fields = {"images": Field(np.dtype("u1"), (1, *shape))}
    write(tmp_path / "a.h5", 8, fields, {"images": np.broadcast_to(image, (8, 1, *shape))})
    with h5py.File(tmp_path / "a.h5") as file:
        found = [file.attrs["mean"][0], file.attrs["std"][0]]
        np.testing.assert_allclose(found, [image.mean(), image.std()], atol=0.05 * image.std())


def test_statistics_come_from_rows_spread_over_the_whole_and_not_from_ragged_ones(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "STATISTICS_ROWS", 10)
    clips = RaggedArray(np.ones((100, 3, 4, 4), np.uint8), np.arange(101))
    parts = [
        {"images": np.arange(start, min(start + 7, 100), dtype=np.uint8).reshape(-1, 1, 1, 1)}
        for start in range(0, 100, 7)
    ]
    write(tmp_path / "a.h5", 100, {"images": Field(np.dtype("u1"), (1, 1, 1))}, *parts)
    write(tmp_path / "b.h5", 100, {"clips": Field(np.dtype("u1"), (3, 4, 4), 2.0)}, {"clips": clips})
    with h5py.File(tmp_path / "a.h5") as file, h5py.File(tmp_path / "b.h5") as ragged_rows:
        assert file.attrs["mean"] == 45  # of 0, 10, ... 90
        assert "mean" not in ragged_rows.attrs
        assert ragged_rows["clips/values"].shape == (100, 3, 4, 4)


def test_a_csr_matrix_is_written_as_anndata_does(tmp_path):
    write(tmp_path / "rows.h5", 50, {"items": RAGGED["items"]}, {"items": ragged(range(50))})
    with h5py.File(tmp_path / "rows.h5") as file:
        matrix = file["items"]
        found = {"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": [50, ITEMS]}
        assert attributes_of(matrix) == found
        assert matrix["indptr"].dtype == np.int64
        assert (matrix["data"][:] == 1).all()
        assert matrix["data"].id.get_storage_size() == 0
        assert len(matrix["data"]) == len(matrix["indices"]) == matrix["indptr"][-1]
