import errno
import hashlib
import multiprocessing
import os
import pickle
import subprocess
import sys

import h5py
import hdf5plugin
import numpy as np
import pytest
import torch
from harness import ITEMS, is_ragged, numbered, numbers_of

from fastgpu.feed.tiers import make_feed
from fastgpu.process.launch import RankError, UserError
from fastgpu.rows.contract import BlockRead
from fastgpu.rows.field import Field
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import RaggedArray
from fastgpu.storage import layout as layout_module
from fastgpu.storage import store as store_module
from fastgpu.storage.store import Store, open_store

FIELDS = {"images": "images", "labels": "labels"}
BIG = (1, 96, 96)  # rows past SCATTER_BYTES


def read_all(store: Store, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Every block, in pieces, scattered to shuffled places; then brought back to file order."""
    rng = np.random.default_rng(seed)
    places = rng.permutation(len(store))
    out = {name: np.zeros((len(store), *f.shape), f.dtype) for name, f in store.fields.items()}
    at = 0
    for block, rows in enumerate(store.block_rows.tolist()):
        cut = int(rng.integers(0, rows + 1))
        for first, stop in ((0, cut), (cut, rows)):
            store.read([BlockRead(block, first, places[at + first : at + stop])], out)
        at += rows
    return out["images"][places], out["labels"][places]


@pytest.fixture(params=["cached", "read"])
def way(request, monkeypatch) -> str:
    """Rows out of a mapping, as where the file is in the page cache, or by system calls, as where it is not."""
    if request.param == "read":
        monkeypatch.setattr(layout_module.OpenFile, "cached", lambda *_: None)
    return request.param


def test_the_page_cache_is_asked_less_often_where_it_held_all_and_again_where_it_did_not(write, monkeypatch):
    store, asked, missing = open_store("data.train", write(1600, chunk=8), FIELDS), [], set[int]()
    monkeypatch.setattr(
        layout_module.OpenFile, "_is_cached", lambda _, offset: (asked.append(offset), len(asked) not in missing)[1]
    )
    out = {name: np.zeros((1600, *field.shape), field.dtype) for name, field in store.fields.items()}
    reads = [BlockRead(block, 0, np.arange(8) + 8 * block) for block in range(200)]
    store.read(reads, out)
    assert 64 + 136 // 8 <= len(asked) <= 65 + 136 // 8
    before, missing = len(asked), {len(asked) + 1}
    store.read(reads, out)
    assert before + 64 + 120 // 8 <= len(asked) <= before + 67 + 136 // 8
    assert numbers_of(out["images"]) == list(range(1600))


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_all_that_is_not_in_memory_is_announced_before_the_first_read(write, monkeypatch, options):
    store, done = open_store("data.train", write(40, BIG, **options), FIELDS), []
    spy = {"cached": lambda *_: None, "will_need": lambda _, *where: done.append(where)}
    for name, function in spy.items():
        monkeypatch.setattr(layout_module.OpenFile, name, function)
    preadv = layout_module.OpenFile.preadv
    monkeypatch.setattr(layout_module.OpenFile, "preadv", lambda *args: (done.append("read"), preadv(*args)))
    out = {name: np.zeros((40, *field.shape), field.dtype) for name, field in store.fields.items()}
    store.read([BlockRead(block, 0, np.arange(8) + 8 * block) for block in range(5)], out)
    assert numbers_of(out["images"]) == list(range(40))
    assert done[5:] == ["read"] * 5
    assert "read" not in done[:5]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("shape", [(1, 4, 2), BIG])
@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 8},
        {"chunk": 1},
        {"chunk": 100},
        {"chunk": None},
        {"chunk": 8, "compression": "gzip"},
        {"chunk": 8, "compression": "lzf", "shuffle": True},
        {"chunk": 8, "fletcher32": True},
    ],
)
def test_every_layout_gives_the_rows(write, shape, options):
    store = open_store("data.train", write(100, shape, **options), FIELDS)
    images, labels = read_all(store)
    assert numbers_of(images) == list(range(100))
    assert labels.tolist() == [n % 4 for n in range(100)]


def test_plain_layouts_do_not_go_through_the_hdf5_library(write, monkeypatch):
    stores = [open_store("data.train", write(100, BIG, c, name=f"{c}.h5"), FIELDS) for c in (8, None)]
    monkeypatch.setattr(layout_module.OpenFile, "read_h5", lambda *_: pytest.fail("read through h5py"))
    for store in stores:
        read_all(store)


def test_chunks_that_split_rows_and_foreign_byte_order(tmp_path):
    wide = np.arange(20 * 6, dtype=">i4").reshape(20, 6)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=wide, chunks=(3, 2))
        file.create_dataset("labels", data=np.arange(20.0, dtype=">f8"))
    store = open_store("data.train", str(tmp_path / "x.h5"), FIELDS)
    images, labels = read_all(store)
    assert images.dtype.isnative
    np.testing.assert_array_equal(images, wide)
    np.testing.assert_array_equal(labels, np.arange(20.0))


def test_two_large_fields_with_different_chunks(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "COLUMN_BYTES", 0)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=numbered(50, BIG), chunks=(8, *BIG))
        file.create_dataset("labels", data=np.arange(50), chunks=(3,))
    images, labels = read_all(open_store("data.train", str(tmp_path / "x.h5"), FIELDS))
    assert numbers_of(images) == labels.tolist() == list(range(50))


def test_several_files_are_one(write, tmp_path):
    for number, (rows, start) in enumerate([(20, 0), (13, 20), (7, 33)]):
        write(rows, name=f"part-{number}.h5", start=start)
    paths = [str(tmp_path / f"part-{number}.h5") for number in range(3)]
    for what in (paths, str(tmp_path / "part-*.h5")):
        store = open_store("data.train", what, FIELDS)
        assert store.block_rows.tolist() == [8, 8, 4, 8, 5, 7]
        assert numbers_of(read_all(store)[0]) == list(range(40))
        assert store.column("labels").tolist() == [n % 4 for n in range(40)]


def test_a_group_of_a_file_and_its_attributes(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        group = file.create_group("train")
        group["images"], group["labels"] = numbered(5), np.arange(5)
        group.attrs["class_names"] = ["a", "b"]
        group.attrs["mean"] = np.array([1.5])
        group.attrs["fastgpu_format"] = np.int64(1)
    store = open_store("data.train", f"{tmp_path}/x.h5::/train", FIELDS)
    assert len(store) == 5
    assert store.attributes == {"class_names": ["a", "b"], "mean": [1.5], "fastgpu_format": 1}


def test_fields_may_have_other_names_in_the_file(write):
    store = open_store("data.train", write(10), {"pixels": "/images"})
    assert store.fields["pixels"].shape == (1, 4, 2)


def test_the_mapping_is_read_only_where_the_page_cache_has_all(write, monkeypatch):
    path = write(40, BIG)
    assert numbers_of(read_all(open_store("data.train", path, FIELDS))[0]) == list(range(40))  # now it has
    real, reads, at = os.preadv, [], {"missing": False}

    def preadv(fd, buffers, offset, flags=0):
        if not flags:
            reads.append(offset)
        elif at["missing"]:
            raise BlockingIOError
        return real(fd, buffers, offset, flags)

    store = open_store("data.train", path, FIELDS)
    monkeypatch.setattr(os, "preadv", preadv)
    assert numbers_of(read_all(store)[0]) == list(range(40))
    assert not reads
    at["missing"] = True
    assert numbers_of(read_all(store)[0]) == list(range(40))
    assert reads


def test_a_file_system_that_does_not_tell_what_it_has_cached_is_asked_once(write, monkeypatch):
    store, real, asked = open_store("data.train", write(40, BIG), FIELDS), os.preadv, []

    def preadv(fd, buffers, offset, flags=0):
        if flags:
            asked.append(offset)
            raise OSError(errno.EOPNOTSUPP, "not supported")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert numbers_of(read_all(store)[0]) == list(range(40))
    assert len(asked) == 1


def test_short_reads_are_continued(write, monkeypatch):
    monkeypatch.setattr(layout_module.OpenFile, "cached", lambda *_: None)
    store = open_store("data.train", write(40, BIG), FIELDS)
    real, calls = os.preadv, []

    def short(fd, buffers, offset):
        calls.append(offset)
        first = buffers[0][: max(1, len(buffers[0]) // 3)]
        return real(fd, [first], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert numbers_of(read_all(store)[0]) == list(range(40))
    assert len(calls) > 40


def test_more_rows_in_a_block_than_one_system_call_takes(write, monkeypatch):
    monkeypatch.setattr(layout_module.OpenFile, "cached", lambda *_: None)
    monkeypatch.setattr(layout_module, "IOV_MAX", 3)
    store = open_store("data.train", write(40, BIG, 10), FIELDS)
    assert numbers_of(read_all(store)[0]) == list(range(40))


@pytest.mark.usefixtures("way")
def test_a_file_cut_while_in_use_is_an_error(write):
    path = write(40, BIG)
    store = open_store("data.train", path, FIELDS)
    os.truncate(path, os.path.getsize(path) // 2)  # noqa: PTH202
    with pytest.raises(RankError, match=r"rows.h5 (was changed|.*was cut) while in use; restore the file"):
        read_all(store)


@pytest.mark.parametrize("options", [{"chunk": 8}, {"chunk": None}, {"chunk": 8, "compression": "gzip"}])
@pytest.mark.parametrize("change", ["grow", "write", "replace"])
def test_a_file_changed_while_in_use_is_an_error(write, options, change):
    path = write(40, BIG, **options)
    store = open_store("data.train", path, FIELDS)
    read_all(store)
    copy = pickle.dumps(store)
    if change == "replace":
        os.replace(write(40, BIG, **options, name="other.h5"), path)  # noqa: PTH105
        assert numbers_of(read_all(store)[0]) == list(range(40))  # the open file is still the old one
        store = pickle.loads(copy)
    else:
        with open(path, "r+b") as file:  # noqa: PTH123
            file.seek(0, os.SEEK_END if change == "grow" else os.SEEK_SET)
            file.write(b"x")
    with pytest.raises(RankError, match="was changed while in use"):
        read_all(store)


def test_pickles_and_works_in_the_copy(write):
    for options in ({}, {"compression": "gzip"}):
        store = open_store("data.train", write(20, **options), FIELDS)
        read_all(store)
        copy = pickle.loads(pickle.dumps(store))
        assert numbers_of(read_all(copy)[0]) == list(range(20))


def _read_in_child(store: Store) -> list[int]:
    return numbers_of(read_all(store)[0])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_works_in_child_processes(write, method, compression):
    store = open_store("data.train", write(20, compression=compression), FIELDS)
    read_all(store)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_read_in_child, [store, store]) == [list(range(20))] * 2


# ---------------------------------------------------------------------------------------------- checksums


def _digests(path: str, chunk: int, rows: int) -> None:
    with h5py.File(path, "r+") as file:
        for name, size in (("images", chunk), ("labels", rows)):
            parts = [file[name][i : i + size] for i in range(0, rows, size)]
            found = np.array([list(hashlib.sha256(part.tobytes()).digest()) for part in parts], np.uint8)
            file.create_group(layout_module.DIGESTS, track_order=True) if name == "images" else None
            file[f"{layout_module.DIGESTS}/{name}"] = found


@pytest.mark.parametrize("shape", [(1, 4, 2), BIG])
@pytest.mark.parametrize("compression", [None, "gzip"])
def test_verify_notices_a_flipped_bit(write, shape, compression):
    path = write(40, shape, 7, compression=compression)
    _digests(path, 7, 40)
    good = open_store("data.train", path, FIELDS, verify=True)
    assert numbers_of(read_all(good)[0]) == list(range(40))
    with h5py.File(path) as file:
        where = file["images"].id.get_chunk_info(3)
    with open(path, "r+b") as raw:  # noqa: PTH123
        raw.seek(where.byte_offset + where.size // 2)
        byte = raw.read(1)[0]
        raw.seek(-1, os.SEEK_CUR)
        raw.write(bytes([byte ^ 16]))
    bad = open_store("data.train", path, FIELDS, verify=True)
    with pytest.raises(RankError, match="images: block 3 is damaged"):
        read_all(bad)


def test_verify_needs_checksums(write):
    with pytest.raises(UserError, match="images has no checksums for data.verify; `python convert.py repack`"):
        open_store("data.train", write(10), FIELDS, verify=True)


# ---------------------------------------------------------------------------------------------- bad input


def _file(tmp_path, **datasets):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for name, value in datasets.items():
            file[name] = value
    return str(tmp_path / "x.h5")


def refused(what, message, fields=FIELDS):
    with pytest.raises(UserError, match=message):
        open_store("data.train", what, fields)


def test_missing_files_and_globs_without_a_match():
    refused("nowhere.h5", "data.train: nowhere.h5 does not exist")
    refused("nowhere-*.h5", r"data.train: no file matches nowhere-\*.h5")
    refused(["nowhere.h5"], "does not exist")


def test_not_hdf5_and_truncated(write, tmp_path):
    (tmp_path / "text.h5").write_text("no")
    refused(str(tmp_path / "text.h5"), "is not an HDF5 file")
    refused(str(tmp_path), "is a folder; name the files in it")
    path = write(100, BIG)
    os.truncate(path, 20_000)
    refused(path, "is truncated: copy or write it again")


def test_locked(write):
    path = write()
    code = f"import h5py, sys; f = h5py.File({path!r}, 'r+'); print('open', flush=True); sys.stdin.read()"
    writer = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout
    assert writer.stdout.readline() == "open\n"
    try:
        refused(path, "is locked by a process that writes it")
    finally:
        writer.communicate()


def test_missing_dataset_group_and_fields_of_unequal_length(tmp_path):
    path = _file(tmp_path, images=numbered(5), other=np.arange(4))
    refused(path, "images, other|labels has no dataset")
    refused(path, "has no dataset labels; it has images, other")
    refused(f"{path}::/train", "has no group /train; it has images, other")
    refused(path, r"fields of unequal length \{'images': 5, 'labels': 4\}", {"images": "images", "labels": "other"})


def test_no_rows_scalars_and_types_without_numbers(tmp_path):
    refused(_file(tmp_path, images=numbered(0), labels=np.arange(0)), "has no rows")
    refused(_file(tmp_path, images=3, labels=3), "is a single value")
    refused(_file(tmp_path, images=numbered(2), labels=["a", "b"]), "is of type object; allowed are bool, integers and")


def test_never_written_chunks(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("images", (40, 2), "u1", chunks=(10, 2))
        data[:10] = 1
        file["labels"] = np.arange(40)
    refused(str(tmp_path / "x.h5"), "3 of 4 chunks were never written")


def test_bytes_of_other_files_are_not_followed(write, tmp_path):
    source = write(10, name="source.h5")
    with h5py.File(tmp_path / "link.h5", "w") as file:
        file["images"], file["labels"] = h5py.ExternalLink(source, "images"), np.arange(10)
    refused(str(tmp_path / "link.h5"), "takes its bytes from other files")
    with h5py.File(tmp_path / "group.h5", "w") as file:
        file["train"] = h5py.ExternalLink(source, "/")
    refused(f"{tmp_path}/group.h5::/train", "takes its bytes from other files")
    layout = h5py.VirtualLayout((10, 1, 4, 2), "u1")
    layout[:] = h5py.VirtualSource(source, "images", (10, 1, 4, 2))
    with h5py.File(tmp_path / "virtual.h5", "w") as file:
        file.create_virtual_dataset("images", layout)
        file["labels"] = np.arange(10)
    refused(str(tmp_path / "virtual.h5"), "takes its bytes from other files")
    with h5py.File(tmp_path / "external.h5", "w") as file:
        file.create_dataset("images", (10, 8), "u1", external=[(tmp_path / "raw", 0, 80)])
        file["labels"] = np.arange(10)
    refused(str(tmp_path / "external.h5"), "takes its bytes from other files; .* data.trust_links=true")


def test_trusted_links_are_followed(write, tmp_path):
    source = write(10, name="source.h5")
    (tmp_path / "raw").write_bytes(numbered(10).tobytes())
    layout = h5py.VirtualLayout((10, 1, 4, 2), "u1")
    layout[:] = h5py.VirtualSource(source, "images", (10, 1, 4, 2))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["link"], file["labels"] = h5py.ExternalLink(source, "images"), np.arange(10)
        file["group"] = h5py.ExternalLink(source, "/")
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (10, 1, 4, 2), "u1", external=[(tmp_path / "raw", 0, 80)])
    for group, name in (("", "link"), ("", "virtual"), ("", "external"), ("::/group", "images")):
        fields = {"images": name, "labels": "labels"}
        store = open_store("data.train", f"{tmp_path}/x.h5{group}", fields, trust_links=True)
        assert numbers_of(read_all(pickle.loads(pickle.dumps(store)))[0]) == list(range(10))


@pytest.mark.parametrize("name", ["link", "virtual", "external"])
def test_a_trusted_link_must_lead_somewhere(write, tmp_path, name):
    layout = h5py.VirtualLayout((10, 1, 4, 2), "u1")
    layout[:] = h5py.VirtualSource("gone.h5", "images", (10, 1, 4, 2))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["link"], file["labels"] = h5py.ExternalLink("gone.h5", "images"), np.arange(10)
        file.create_virtual_dataset("virtual", layout)
        file.create_dataset("external", (10, 1, 4, 2), "u1", external=[("gone.h5", 0, 80)])
    with pytest.raises(UserError, match="gone.h5, which is not there"):
        open_store("data.train", f"{tmp_path}/x.h5", {"images": name, "labels": "labels"}, trust_links=True)


def test_a_filter_that_nothing_here_can_undo(write, monkeypatch):
    path = write(40, compression=hdf5plugin.Bitshuffle())
    assert numbers_of(read_all(open_store("data.train", path, FIELDS))[0]) == list(range(40))  # through h5py
    monkeypatch.setattr(h5py.h5z, "filter_avail", lambda code: False)
    refused(path, "compressed by bitshuffle, which is not installed; pip install hdf5plugin")


def test_the_chunk_cache_is_given_to_h5py(write, monkeypatch):
    cache = {"rdcc_nbytes": 1 << 22, "rdcc_nslots": 101, "rdcc_w0": 0.5}
    store = open_store("data.train", write(40, fletcher32=True), FIELDS, chunk_cache=cache)
    seen, real = [], h5py.File
    monkeypatch.setattr(h5py, "File", lambda *args, **options: seen.append(options) or real(*args, **options))
    read_all(store)
    assert seen == [cache]


def test_shards_must_agree(write, tmp_path):
    write(10, name="a.h5")
    write(10, (1, 2, 4), name="b.h5")
    refused(str(tmp_path / "?.h5"), r"b.h5 holds images as uint8 \(N, 1, 2, 4\).*shards must agree")


# ---------------------------------------------------------------------------------------------- ragged rows

SPARSE = {"items": "items", "number": "number"}


def read_ragged(store: Store, seed: int = 0) -> tuple[RaggedArray, np.ndarray]:
    """Every block, in pieces, to shuffled places, laid out as the prefetcher does; (items, number) at each place."""
    places = np.random.default_rng(seed).permutation(len(store))
    offsets = np.zeros(len(store) + 1, np.int32)
    offsets[places + 1] = store.lengths["items"]
    np.cumsum(offsets, out=offsets)
    out = {"items": RaggedArray(np.full(offsets[-1] + 5, -1, np.int32), offsets), "number": np.zeros(len(store), int)}
    at = 0
    for block, rows in enumerate(store.block_rows.tolist()):
        for first, stop in ((0, rows // 2), (rows // 2, rows)):
            store.read([BlockRead(block, first, places[at + first : at + stop])], out)
        at += rows
    assert (out["items"].values[offsets[-1] :] == -1).all()
    return out["items"], out["number"]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunks": (7,)},
        {"chunks": (64,), "compression": "gzip", "shuffle": True},
        {"dtype": "<u8"},
        {"dtype": ">i4"},
    ],
    ids=["whole", "chunks", "gzip", "uint64", "big-endian"],
)
@pytest.mark.parametrize("least", [1, 30])
def test_ragged_rows_are_read_from_any_layout(way, write_ragged, monkeypatch, options, least):
    monkeypatch.setattr(store_module, "LEAST_BLOCKS", least)
    dtype = options.pop("dtype", None)
    path = write_ragged(101, **options)
    if dtype:
        with h5py.File(path, "a") as file:
            values = file["items/indices"][:].astype(dtype)
            del file["items/indices"]
            file["items/indices"] = values
    store = open_store("data.train", path, SPARSE)
    assert store.fields["items"] == Field(np.dtype("i4"), (), sum(n * 7 % 5 for n in range(101)) / 101, ITEMS)
    assert len(store.block_rows) >= least
    items, number = read_ragged(store)
    assert is_ragged(items, number)


def test_shards_of_ragged_rows_are_one_after_the_other(write_ragged):
    paths = [write_ragged(n, f"{n}.h5", start) for n, start in ((40, 0), (25, 40), (3, 65))]
    store = open_store("data.train", paths, SPARSE)
    items, number = read_ragged(store)
    assert sorted(number) == list(range(68))
    assert is_ragged(items, number)
    other = write_ragged(5, "other.h5", items=99)
    with pytest.raises(
        UserError, match=r"other.h5 holds items as int32 \(N, any number\) below 99, .*; shards must agree"
    ):
        open_store("data.train", [*paths, other], SPARSE)


def test_what_belongs_to_the_items_and_other_ragged_values(write_ragged):
    path = write_ragged(30)
    with h5py.File(path, "a") as file:
        file["items/data"] = file["items/indices"][:] / 8
        file["words/indptr"], file["words/values"] = file["items/indptr"][:], file["items/indices"][:].astype("u2")
    store = open_store("data.train", path, {"items": "items", "weights": "items/data", "words": "words"})
    assert [field.n_items for field in store.fields.values()] == [ITEMS, None, None]
    assert [str(field.dtype) for field in store.fields.values()] == ["int32", "float64", "uint16"]
    feed = make_feed(store, BlockSampler(store.block_rows, 10), "disk", torch.device("cpu"), 2)
    for pool in feed.pools(0):
        items, weights, words = (pool.rows[name] for name in store.fields)
        assert (items.host == weights.host).all()
        assert (items.values / 8 == weights.values).all()
        assert (items.values == words.values.int()).all()
    feed.close()


def test_rows_without_any_value_are_rows(write_ragged):
    path = write_ragged(20)
    with h5py.File(path, "a") as file:
        del file["items/indices"]
        file["items/indptr"][:] = 0
        file["items/indices"] = np.zeros(0, np.int32)
    items, number = read_ragged(open_store("data.train", path, SPARSE))
    assert len(items) == len(number) == 20
    assert len(items.values) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda f: f["items/indptr"].write_direct(np.arange(21, dtype="i4")[::-1].copy()),
            "its indptr should rise from 0",
        ),
        (lambda f: f["items/indptr"].__setitem__(20, 3), "its indptr should rise from 0 to the 40 values"),
        (
            lambda f: f["items"].attrs.__setitem__("encoding-type", "csc_matrix"),
            "is a csc_matrix; rows need a csr_matrix",
        ),
        (lambda f: f["items"].attrs.__delitem__("shape"), r"should have the attribute shape, \(rows, items\)"),
        (lambda f: f["items"].attrs.__setitem__("shape", (20, 0)), "should have the attribute shape"),
        (lambda f: f["items"].__delitem__("indices"), "has no dataset items/indices; it has items, number"),
    ],
)
def test_ragged_rows_that_are_none_are_one_line(write_ragged, change, message):
    path = write_ragged(20)
    with h5py.File(path, "a") as file:
        change(file)
    with pytest.raises(UserError, match=message):
        open_store("data.train", path, SPARSE)


@pytest.mark.parametrize("wrong", [ITEMS, -1])
@pytest.mark.parametrize("options", [{}, {"chunks": (16,), "compression": "gzip"}], ids=["plain", "gzip"])
def test_an_item_that_there_is_not_stops_the_run_and_not_the_device(way, write_ragged, wrong, options):
    path = write_ragged(50, **options)
    with h5py.File(path, "a") as file:
        file["items/indices"][17] = wrong
    with pytest.raises(RankError, match=f"ragged.h5: items: {wrong} is none of 0 to 999, as its shape says"):
        read_ragged(open_store("data.train", path, {"items": "items", "number": "number"}))
