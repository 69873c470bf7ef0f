import ctypes
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from h5py import h5d, h5p, h5s, h5t

from fastgpu.process.launch import UserError
from fastgpu.storage import layout as module
from fastgpu.storage.file import OpenFile
from fastgpu.storage.filters import decode, filters_of
from fastgpu.storage.layout import Layout
from fastgpu.storage.store import HDF5Dataset, open_store
from support.rows import numbered, numbers_of, read_rows

hdf5plugin = pytest.importorskip("hdf5plugin", reason="comes with the codecs")

CODECS = {
    "gzip": {"compression": "gzip"},
    "gzip, shuffled": {"compression": "gzip", "shuffle": True},
    "lzf": {"compression": "lzf"},
    "lzf, shuffled": {"compression": "lzf", "shuffle": True},
    "blosc": {"compression": hdf5plugin.Blosc(cname="lz4", shuffle=2)},
    "lz4": {"compression": hdf5plugin.LZ4()},
    "zstd": {"compression": hdf5plugin.Zstd()},
}
KNOWN = {"one row": {"chunk": 1}, "eight rows": {}, "one chunk": {"chunk": 50}, "no chunks": {"chunk": None}} | CODECS
ONLY_H5PY = {
    "split rows": {"chunks": (50, 6)},
    "checksums": {"fletcher32": True},
    "bitshuffle": {"compression": hdf5plugin.Bitshuffle()},
}


def by_h5py(store: HDF5Dataset) -> bool:
    """Whether only the HDF5 library can read the rows, one thread at a time."""
    largest = max(store.parts[0].columns.values(), key=lambda column: column.field.row_bytes)
    return type(largest) is Layout


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("width", [7, 9216])  # the kernel scatters the longer rows
@pytest.mark.parametrize("dtype", ["u1", "<i4", ">f8"])
@pytest.mark.parametrize("layout", KNOWN | ONLY_H5PY)
def test_layout_rows_need_no_hdf5_library(open_x, monkeypatch, width, dtype, layout):
    monkeypatch.setattr(module, "IOV_MAX", 3)  # fewer rows than a block has
    values = np.random.default_rng(0).integers(0, 3, (50, width)).cumsum(1).astype(dtype)
    store = open_x(values, **(KNOWN | ONLY_H5PY)[layout])
    assert by_h5py(store) == (layout in ONLY_H5PY)
    if layout in KNOWN:
        monkeypatch.setattr(h5py, "File", lambda *_, **__: pytest.fail("read through h5py"))
    rows = read_rows(store)["x"]
    assert rows.dtype.isnative
    np.testing.assert_array_equal(rows, values)


def changed(kind: h5t.TypeID, **settings: object) -> h5t.TypeID:
    """A copy of an HDF5 type with other settings, each of them the arguments of `set_...`, in this order."""
    copy = kind.copy()
    for name, value in settings.items():
        getattr(copy, f"set_{name}")(*(value if isinstance(value, tuple) else (value,)))
    return copy


AS_SHOWN = {"float16, big-endian": h5t.IEEE_F16BE, "bool": h5t.py_create(np.dtype(bool), logical=True)}
SHOWN_AS_ANOTHER = {
    "bfloat16": changed(h5t.IEEE_F32LE, fields=(15, 7, 8, 0, 7), size=2, ebias=127),
    "float16 with another bias": changed(h5t.IEEE_F16LE, ebias=20),
    "12 bits at bit 5": changed(h5t.STD_I32LE, precision=12, offset=5),
}
WITHOUT_NUMBERS = {
    "24 bits": changed(h5t.STD_U32LE, size=3),
    "long double": h5t.NATIVE_LDOUBLE,
    "vlen": h5t.vlen_create(h5t.STD_I32LE),
}


@pytest.fixture
def store_type(tmp_path) -> Callable[..., str]:
    """store_type(kind, **dcpl) is a file with 64 rows `x` of that HDF5 type."""

    def write(kind: h5t.TypeID, **settings: object) -> str:
        path = str(tmp_path / "x.h5")
        plan = changed(h5p.create(h5p.DATASET_CREATE), **settings)
        with h5py.File(path, "w") as file:
            data = h5d.create(file.id, b"x", kind, h5s.create_simple((64, 2)), plan)
            if kind.get_class() != h5t.VLEN:
                highest = 2 if kind.get_class() == h5t.ENUM else 113
                data.write(h5s.ALL, h5s.ALL, np.arange(128 * kind.get_size(), dtype=np.uint8) % highest, kind)
        return path

    return write


@pytest.mark.parametrize("kind", AS_SHOWN | SHOWN_AS_ANOTHER)
@pytest.mark.parametrize("settings", [{}, {"chunk": ((16, 2),)}, {"chunk": ((16, 2),), "deflate": 4}], ids=str)
def test_layout_values_are_those_of_h5py(store_type, kind, settings):
    path = store_type((AS_SHOWN | SHOWN_AS_ANOTHER)[kind], **settings)
    store = open_store("data.train", path, {"x": "x"})
    assert by_h5py(store) == (kind in SHOWN_AS_ANOTHER)
    with h5py.File(path) as file:
        np.testing.assert_array_equal(read_rows(store)["x"], file["x"][:])
        assert len(np.unique(file["x"])) > 1


@pytest.mark.parametrize("kind", WITHOUT_NUMBERS)
def test_layout_types_that_torch_lacks_are_one_line(store_type, kind):
    path = store_type(WITHOUT_NUMBERS[kind])
    with pytest.raises(UserError, match=r"x is .* \(64, 2\); allowed are rows of bool, integers and floats up to 64"):
        open_store("data.train", path, {"x": "x"})


def test_layout_rows_in_the_header_of_a_file(store_type):
    path = store_type(h5t.STD_I16LE, layout=h5d.COMPACT)
    store = open_store("data.train", path, {"x": "x"})
    with h5py.File(path) as file:
        np.testing.assert_array_equal(read_rows(store)["x"], file["x"][:])


def test_layout_filter_left_out_for_a_chunk(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        data = file.create_dataset("x", (16, 8), "u1", chunks=(8, 8), compression="gzip", shuffle=True)
        data[:8] = numbered(8).reshape(8, 8)
        data.id.write_direct_chunk((8, 0), numbered(8, start=8).tobytes(), filter_mask=3)  # both left out
    store = open_store("data.train", str(tmp_path / "x.h5"), {"x": "x"})
    assert numbers_of(read_rows(store)["x"]) == list(range(16))


@pytest.fixture
def leave_partial_chunks_unfiltered() -> Callable[[h5p.PropDCID], None]:
    """H5Pset_chunk_opts, which h5py does not have, of the library that comes with it."""
    paths = [*(Path(h5py.__file__).parents[1] / "h5py.libs").glob("libhdf5-*")]
    if not paths:
        pytest.skip("this h5py comes without its own HDF5 library")
    function = ctypes.CDLL(str(paths[0])).H5Pset_chunk_opts
    function.argtypes = [ctypes.c_int64, ctypes.c_uint]

    def call(plan: h5p.PropDCID) -> None:
        assert function(plan.id, 2) >= 0

    return call


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize("chunk", [(16, 8), (16, 3), (64, 8)], ids=str)
@pytest.mark.parametrize("name", [*CODECS, "shuffled", "checksums"])
def test_layout_partial_chunks_without_filters(tmp_path, leave_partial_chunks_unfiltered, name, chunk):
    options = {"shuffled": {"shuffle": True}, "checksums": ONLY_H5PY["checksums"]} | CODECS
    path = str(tmp_path / "x.h5")
    values = np.random.default_rng(0).integers(0, 9, (60, 8)).astype("i4")
    with h5py.File(path, "w", libver="latest") as file:
        plan = file.create_dataset("y", (64, 8), "i4", chunks=chunk, **options[name]).id.get_create_plist()
        leave_partial_chunks_unfiltered(plan)
        space = h5s.create_simple((60, 8), (h5s.UNLIMITED, 8))
        h5d.create(file.id, b"x", h5t.STD_I32LE, space, plan).write(h5s.ALL, h5s.ALL, values)
    np.testing.assert_array_equal(read_rows(open_store("data.train", path, {"x": "x"}))["x"], values)


@pytest.mark.parametrize("shape", [(3,), (2, 2)])
@pytest.mark.parametrize("chunk", [None, 16])
def test_layout_elements_that_are_arrays(tmp_path, shape, chunk):
    values = np.random.default_rng(0).random((60, 5, *shape)).astype("f4")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        chunks = (chunk, 5) if chunk else None
        file.create_dataset("x", (60, 5), np.dtype(("f4", shape)), chunks=chunks)[:] = values
    store = open_store("data.train", str(tmp_path / "x.h5"), {"x": "x"})
    assert not by_h5py(store)
    np.testing.assert_array_equal(read_rows(store)["x"], values)


def test_layout_virtual_dataset_of_its_own_file(tmp_path):
    path = str(tmp_path / "x.h5")
    with h5py.File(path, "w") as file:
        file.create_dataset("raw/x", data=numbered(40), chunks=(8, 1, 4, 2), compression="gzip")
        file["newest"] = h5py.SoftLink("raw/x")
        layout = h5py.VirtualLayout((40, 1, 4, 2), "u1")
        layout[:8] = h5py.VirtualSource(".", "raw/x", (40, 1, 4, 2))[32:]
        layout[8:] = h5py.VirtualSource(".", "newest", (40, 1, 4, 2))[:32]
        file.create_virtual_dataset("x", layout)
    rows = read_rows(open_store("data.train", path, {"x": "x", "raw": "newest"}))
    assert numbers_of(rows["x"]) == [*range(32, 40), *range(32)]
    assert numbers_of(rows["raw"]) == [*range(40)]


@pytest.mark.parametrize("name", CODECS)
def test_layout_decoding_stops_at_the_size(open_x, name):
    """A few bytes of a chunk could stand for all of the memory."""
    path = open_x(np.zeros((1 << 24, 1), np.uint8), chunk=1 << 24, **CODECS[name]).file.path
    with h5py.File(path) as file:
        filters = filters_of(file["x"])
        _, raw = file["x"].id.read_direct_chunk((0, 0))
    tracemalloc.start()
    with pytest.raises(ValueError, match="cannot be decoded|bytes instead of"):
        decode(raw, filters, 0, 1000)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("name", [name for name in CODECS if name != "lzf, shuffled"])
def test_layout_damaged_chunks_are_an_error(open_x, name):
    rows = numbered(64, (1, 8, 8))
    path = open_x(rows, chunk=64, **CODECS[name]).file.path
    with h5py.File(path) as file:
        filters = filters_of(file["x"])
        _, raw = file["x"].id.read_direct_chunk((0, 0, 0, 0))
    for damaged in (raw[: len(raw) // 2], bytes(range(256)) * 4, b""):
        with pytest.raises(ValueError, match="cannot be decoded|bytes instead of"):
            decode(damaged, filters, 0, rows.nbytes)


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ((8, 1, 4, 2), "x: block 2 is damaged: it cannot be decoded .*; restore the file"),
        ((8, 1, 2, 2), r"x.h5: /x from row \d+ on cannot be read \(.*\); restore the file"),  # by the HDF5 library
    ],
)
def test_layout_damage_names_the_block(open_x, chunks, message):
    path = open_x(numbered(40), chunks=chunks, compression="gzip").file.path
    with h5py.File(path) as file:
        infos = map(file["x"].id.get_chunk_info, range(10))
        damaged = next(info for info in infos if info.chunk_offset[0] == 16)
    with Path(path).open("r+b") as raw:
        raw.seek(damaged.byte_offset)
        raw.write(bytes(damaged.size))
    with pytest.raises(UserError, match=message):
        read_rows(open_store("data.train", path, {"x": "x"}))


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}])
def test_layout_chunk_whose_address_is_damaged(open_x, options):
    path = Path(open_x(numbered(40), **options).file.path)
    with h5py.File(path) as file:
        address = file["x"].id.get_chunk_info(2).byte_offset.to_bytes(8, "little")
    content = path.read_bytes()
    assert content.count(address) == 1
    path.write_bytes(content.replace(address, b"\xff" * 8))  # which stands for none
    with pytest.raises(UserError, match="x: the file is truncated: copy or write it again"):
        open_store("data.train", str(path), {"x": "x"})


def test_layout_of_a_local_file_is_read_at_once(open_x, monkeypatch):
    """No thread and no system call for each of its chunks, of which labels may have many."""
    (column,) = open_x(rows := numbered(1000, (4,)), 1).parts[0].columns.values()
    check, n_calls = OpenFile.check_unchanged, []
    monkeypatch.setattr(OpenFile, "check_unchanged", lambda file: (n_calls.append(1), check(file)))
    assert np.array_equal(column.read_all(), rows)
    assert len(n_calls) == 2
