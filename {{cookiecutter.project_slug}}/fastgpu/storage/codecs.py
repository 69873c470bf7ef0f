"""HDF5 filters, undone by functions that release the GIL, so that threads work side by side.

The HDF5 library does the same under its one lock. gzip needs nothing but Python. lzf, blosc, lz4 and zstd need
imagecodecs (`pip install imagecodecs`). All other filters are left to the library.
"""

import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

imagecodecs: Any = import_module("imagecodecs") if find_spec("imagecodecs") else None
if find_spec("hdf5plugin"):
    import_module("hdf5plugin")  # from here on the HDF5 library knows blosc, lz4, zstd and more

NAMES = {
    1: "gzip",
    2: "shuffle",
    3: "fletcher32",
    32000: "lzf",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32015: "zstd",
}

Parameters = tuple[int, ...]
Filter = tuple[int, Parameters]
"""HDF5's number of a filter, and its parameters."""
Bytes = bytes | bytearray | memoryview
Decoder = Callable[[Any, Parameters, int], Bytes]
"""(bytes, parameters, maximum number of bytes that may come out) -> bytes"""


def filters_of(creation_properties: Any) -> list[Filter]:
    """The filters in the creation property list of an h5py dataset, in the order in which they are applied."""
    n_filters = creation_properties.get_nfilters()
    entries = [creation_properties.get_filter(number) for number in range(n_filters)]
    return [(code, parameters) for code, _, parameters, _ in entries]


def name_of(filters: Sequence[Filter]) -> str:
    """The names of the filters, joined by +."""
    return " + ".join(NAMES.get(code, f"HDF5 filter {code}") for code, _ in filters)


def can_decode(filters: Sequence[Filter]) -> bool:
    """Whether `decode` knows all of the filters."""
    return all(code in _DECODERS for code, _ in filters)


def decode(data: Bytes, filters: Sequence[Filter], skipped: int, size: int) -> Bytes:
    """The `size` bytes of a chunk before the filters were applied.

    skipped: HDF5's `filter_mask`. Bit i is set where filter i was left out for this chunk, as HDF5 does when the chunk
    would not shrink. Raises ValueError if the bytes are damaged.
    """
    try:
        for number, (code, parameters) in reversed(list(enumerate(filters))):
            was_applied = not skipped >> number & 1
            if was_applied:
                data = _DECODERS[code](data, parameters, size)
    except (zlib.error, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot be decoded ({error})") from None
    if len(data) != size:
        raise ValueError(f"has {len(data)} bytes instead of {size}")
    return data


def _unzip(data: Bytes, parameters: Parameters, size: int) -> bytes:
    inflate = zlib.decompressobj()
    out = inflate.decompress(data, size)  # no more than `size`, whatever the file says
    inflate.decompress(inflate.unconsumed_tail, 1)  # the checksum, which stands behind the last byte
    if not inflate.eof:
        raise ValueError("goes on behind its end, or is cut")
    return out


def _unshuffle(data: Bytes, parameters: Parameters, size: int) -> bytes:
    width = parameters[0]  # bytes of an element; the file has the first bytes of all elements, then the second bytes
    n_whole_bytes = len(data) // width * width
    elements = np.frombuffer(data, np.uint8)[:n_whole_bytes].reshape(width, -1).T
    return elements.tobytes() + bytes(data[n_whole_bytes:])


_DECODERS: dict[int, Decoder] = {1: _unzip, 2: _unshuffle}
if imagecodecs:
    _DECODERS[32000] = lambda data, parameters, size: imagecodecs.lzf_decode(data, out=size)
    _DECODERS[32001] = lambda data, parameters, size: imagecodecs.blosc_decode(data, out=size, numthreads=1)
    _DECODERS[32004] = lambda data, parameters, size: imagecodecs.lz4h5_decode(data, out=size)
    _DECODERS[32015] = lambda data, parameters, size: imagecodecs.zstd_decode(data, out=size)
