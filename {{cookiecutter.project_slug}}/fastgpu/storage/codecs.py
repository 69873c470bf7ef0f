"""HDF5 filters applied and undone by functions that release the GIL, so that threads work side by side.

The HDF5 library does so under its one lock. gzip needs nothing but Python; lzf, blosc, lz4 and zstd are done by
imagecodecs where it is installed (`pip install imagecodecs`). Every other filter is left to the library.
"""

import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

imagecodecs: Any = import_module("imagecodecs") if find_spec("imagecodecs") else None
if find_spec("hdf5plugin"):
    import_module("hdf5plugin")  # from here on the library itself knows blosc, lz4, zstd and more

NAMES = {1: "gzip", 2: "shuffle", 3: "fletcher32", 4: "szip", 5: "nbit", 6: "scaleoffset"} | {
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32015: "zstd",
    32026: "blosc2",
}

Filter = tuple[int, tuple[int, ...]]  # HDF5's number of a filter and its parameters
Bytes = bytes | bytearray | memoryview
Do = Callable[[Any, tuple[int, ...]], Bytes]  # (bytes, parameters) -> bytes
Undo = Callable[[Any, tuple[int, ...], int], Bytes]  # (bytes, parameters, most bytes that may come out) -> bytes


def filters_of(plan: Any) -> list[Filter]:
    """Those in an h5py dataset creation property list, the one that is applied first at the front."""
    found = [plan.get_filter(number) for number in range(plan.get_nfilters())]
    return [(code, parameters) for code, _, parameters, _ in found]


def can_decode(filters: Sequence[Filter]) -> bool:
    """Whether `decode` knows all of them."""
    return all(code in _UNDO for code, _ in filters)


def encode(data: Bytes, filters: Sequence[Filter]) -> Bytes:
    """A chunk as it lies in the file: gzip, lz4 and zstd, and shuffle before them."""
    for code, parameters in filters:
        data = _DO[code](data, parameters)
    return data


def decode(data: Bytes, filters: Sequence[Filter], skipped: int, size: int) -> Bytes:
    """The `size` bytes of a chunk as they were before `filters`, the first of which was applied first.

    skipped: bit i is set where filter i was left out for this chunk, as HDF5 does when data would not shrink
    (`filter_mask`). Raises ValueError if the bytes are damaged.
    """
    try:
        for number, (code, parameters) in reversed(list(enumerate(filters))):
            if not skipped >> number & 1:
                data = _UNDO[code](data, parameters, size)
    except (zlib.error, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot be decoded ({error})") from None
    if len(data) != size:
        raise ValueError(f"has {len(data)} bytes instead of {size}")
    return data


def _unzip(data: Bytes, parameters: tuple[int, ...], size: int) -> bytes:
    inflate = zlib.decompressobj()
    out = inflate.decompress(data, size)  # never more than asked for, whatever the file says
    inflate.decompress(inflate.unconsumed_tail, 1)  # the checksum, which stands behind the last byte
    if not inflate.eof:
        raise ValueError("goes on behind its end, or is cut")
    return out


def _unshuffle(data: Bytes, parameters: tuple[int, ...], size: int) -> bytes:
    width = parameters[0]  # bytes of an element; the first bytes of all elements come first
    whole = len(data) // width * width
    return np.frombuffer(data, np.uint8)[:whole].reshape(width, -1).T.tobytes() + bytes(data[whole:])


def _shuffle(data: Bytes, parameters: tuple[int, ...]) -> bytes:
    return np.frombuffer(data, np.uint8).reshape(-1, parameters[0]).T.tobytes()


_DO: dict[int, Do] = {1: lambda data, parameters: zlib.compress(data, parameters[0]), 2: _shuffle}
_UNDO: dict[int, Undo] = {1: _unzip, 2: _unshuffle}
if imagecodecs:
    _DO[32004] = lambda data, parameters: imagecodecs.lz4h5_encode(data)
    _DO[32015] = lambda data, parameters: imagecodecs.zstd_encode(data, level=parameters[0] if parameters else 1)
    _UNDO[32000] = lambda data, parameters, size: imagecodecs.lzf_decode(data, out=size)
    _UNDO[32001] = lambda data, parameters, size: imagecodecs.blosc_decode(data, out=size, numthreads=1)
    _UNDO[32004] = lambda data, parameters, size: imagecodecs.lz4h5_decode(data, out=size)
    _UNDO[32015] = lambda data, parameters, size: imagecodecs.zstd_decode(data, out=size)
