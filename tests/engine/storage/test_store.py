import shutil
import tracemalloc

import h5py
import numpy as np
import pytest
from harness import PLAN, numbered, numbers_of, reads_of
from scattered import read_scattered

from fastgpu.process.launch import UserError
from fastgpu.storage import store as store_module
from fastgpu.storage.file import OpenFile
from fastgpu.storage.store import HDF5Dataset, expand, open_store

FIELDS = {"images": "images", "labels": "labels"}
BIG = (1, 96, 96)  # 9 KiB: rows that the kernel scatters


def test_a_path_names_files_and_a_group(write, tmp_path):
    paths = [write(4, name=f"part-{number}.h5") for number in range(2)]
    assert expand("data.train", f"{tmp_path}/part-*.h5::/train") == [(path, "/train") for path in paths]
    for path in (paths[0], "nowhere.h5", write(4, name="odd[1].h5")):
        assert expand("data.train", path) == [(path, "/")]


def test_several_files_are_one(write, tmp_path):
    for number, (rows, start) in enumerate([(20, 0), (13, 20), (7, 33)]):
        write(rows, name=f"part-{number}.h5", start=start)
    paths = [str(tmp_path / f"part-{number}.h5") for number in range(3)]
    for names in (paths, str(tmp_path / "part-*.h5")):
        store = open_store("data.train", names, FIELDS)
        assert store.name == f"{paths[0]} and 2 more"
        assert store.block_rows.tolist() == [8, 8, 4, 8, 5, 7]
        assert numbers_of(read_scattered(store)["images"]) == list(range(40))
        assert store.column("labels").tolist() == [n % 4 for n in range(40)]


@pytest.mark.parametrize("compression", [None, "gzip"])
def test_the_digest_of_rows_is_that_of_their_copy_and_of_no_others(write, tmp_path, compression):
    path = write(40, compression=compression)
    digest = open_store("data.train", path, FIELDS).digest
    copy = str(shutil.copyfile(path, tmp_path / "copy.h5"))
    assert open_store("data.train", copy, FIELDS).digest == digest
    for field, row in (("labels", 3), ("images", 0), ("images", 13), ("images", 39)):
        with h5py.File(copy, "r+") as file:
            file[field][row] += 1
        assert open_store("data.train", copy, FIELDS).digest != digest
        shutil.copyfile(path, copy)


@pytest.mark.parametrize(
    ("paths", "fields", "message"),
    [
        ([], FIELDS, "data.train: no file or no field is named"),
        (["a.h5"], {}, "data.train: no file or no field is named; data.fields maps names"),
        (["a.h5", "b.h5"], FIELDS, r"b.h5 holds images as uint8 \(N, 1, 2, 4\).*files must agree"),
        (["a.h5"], {"images": "images", "y": "four"}, r"fields of lengths \{'images': 10, 'y': 4\}; give each as many"),
        (["a.h5"], {"images": "empty"}, r"fields of lengths \{'images': 0\}; give each as many rows, and at least one"),
    ],
)
def test_files_and_fields_that_do_not_fit_are_refused(write, tmp_path, monkeypatch, paths, fields, message):
    monkeypatch.chdir(tmp_path)
    write(10, name="a.h5")
    write(10, (1, 2, 4), name="b.h5")
    with h5py.File("a.h5", "a") as file:
        file["four"] = np.arange(4)
        file["empty"] = np.arange(0)
    with pytest.raises(UserError, match=message):
        open_store("data.train", paths, fields)


def test_only_small_fields_are_in_memory(write, monkeypatch):
    path = write(10)
    assert open_store("data.train", path, FIELDS).column("images") is None
    monkeypatch.setattr(store_module, "COLUMN_BYTES", 0)
    assert open_store("data.train", path, FIELDS).column("labels") is None


def test_two_large_fields_with_different_chunks_and_other_names(tmp_path, monkeypatch):
    monkeypatch.setattr(store_module, "COLUMN_BYTES", 0)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("pixels", data=numbered(50, BIG), chunks=(8, *BIG))
        file.create_dataset("labels", data=np.arange(50), chunks=(3,))
    fields = {"images": "/pixels", "labels": "labels"}
    rows = read_scattered(open_store("data.train", str(tmp_path / "x.h5"), fields))
    assert numbers_of(rows["images"]) == rows["labels"].tolist() == list(range(50))


def gathered(store: HDF5Dataset, row_ids: np.ndarray, n_rows: int) -> dict[str, np.ndarray]:
    """Rows of a store that are found in memory, copied in parts of `n_rows`."""
    places = np.arange(len(row_ids))
    reads = reads_of(*[(row, places[i : i + 1]) for i, row in enumerate(row_ids.tolist())])
    out = {name: np.zeros((len(row_ids), *field.shape), field.dtype) for name, field in store.fields.items()}
    jobs = store.gathers(PLAN._replace(n_rows=len(row_ids), reads=reads), out, n_rows)
    assert jobs
    for job in jobs:
        job()
    return out


@pytest.mark.usefixtures("all_cached")
@pytest.mark.parametrize("chunk", [8, None])
def test_rows_in_the_page_cache_are_gathered_in_any_order(write, chunk):
    order = np.random.default_rng(0).permutation(40)
    rows = gathered(open_store("data.train", write(40, BIG, chunk), FIELDS), order, 13)
    assert numbers_of(rows["images"]) == order.tolist()
    assert rows["labels"].tolist() == (order % 4).tolist()


@pytest.mark.usefixtures("all_cached")
def test_gathering_a_row_copies_no_others_where_values_lie_at_odd_bytes(tmp_path):
    values = np.arange(1 << 20, dtype=np.float32).reshape(-1, 512)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["odd"] = np.zeros(3, np.uint8)
        file["values"] = values
        assert file["values"].id.get_offset() % 4
    store = open_store("data.train", str(tmp_path / "x.h5"), {"values": "values"})
    tracemalloc.start()
    rows = gathered(store, np.array([999, 3]), 1)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.array_equal(rows["values"], values[[999, 3]])
    assert peak_bytes < values.nbytes / 4


def is_found(path: str | list[str], fields: dict[str, str] = FIELDS) -> bool:
    store = open_store("data.train", path, fields)
    out = {name: np.zeros((2, *field.shape), field.dtype) for name, field in store.fields.items()}
    return bool(store.gathers(PLAN._replace(n_rows=2, reads=reads_of((0, np.arange(2)))), out, 2))


def test_rows_that_do_not_lie_in_the_page_cache_in_one_piece_as_they_are_cannot_be_gathered(
    write, tmp_path, monkeypatch
):
    path = write(40, BIG)
    monkeypatch.setattr(OpenFile, "cached", lambda *_: None)
    assert not is_found(path)
    monkeypatch.setattr(OpenFile, "cached", lambda file, offset, count: file.mapped[offset : offset + count])
    assert is_found(path)
    assert not is_found([path, write(40, BIG, name="more.h5")])
    assert not is_found(write(40, BIG, name="gzip.h5", compression="gzip"))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["big_endian"] = np.zeros((40, 256), ">i8")
        parts = [file.create_dataset(name, (40, 256), "f4", chunks=(4, 256)) for name in ("one", "two")]
        for start in range(0, 40, 4):
            for part in parts:
                part[start : start + 4] = start
                file.flush()
    assert not is_found(str(tmp_path / "x.h5"), {"x": "one"})
    assert not is_found(str(tmp_path / "x.h5"), {"x": "big_endian"})


def open_with(write, *attributes):
    """Files of 30, 60, ... numbered rows with these attributes, opened as one."""
    paths = []
    for number, own in enumerate(attributes):
        paths.append(write(30 * (number + 1), name=f"{number}.h5", start=30 * number))
        with h5py.File(paths[-1], "a") as file:
            file.attrs.update(own)
    return open_store("data.train", paths, FIELDS)


def test_mean_and_std_are_those_of_the_rows_of_all_files(write):
    rng = np.random.default_rng(0)
    parts = [rng.normal(center, spread, (3, n)) for center, spread, n in ((227, 16, 3000), (14, 5, 6000))]
    store = open_with(write, *({"mean": part.mean(1), "std": part.std(1)} for part in parts))
    whole = np.concatenate(parts, axis=1)
    np.testing.assert_allclose(store.attributes["mean"], whole.mean(1))
    np.testing.assert_allclose(store.attributes["std"], whole.std(1))


def test_shards_of_one_conversion_keep_their_mean_and_a_shard_without_one_is_told(write, capsys):
    same = {"mean": [0.1234567], "std": [0.3]}
    assert open_with(write, same, same).attributes["mean"] == same["mean"]
    assert capsys.readouterr().out == ""
    assert open_with(write, same, {}).attributes["mean"] == same["mean"]
    assert "warning: 1 of 2 files have attributes mean and std; those of " in capsys.readouterr().out
