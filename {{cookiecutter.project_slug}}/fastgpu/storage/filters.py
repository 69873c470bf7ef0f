"""Decoders of HDF5 filters that release the GIL, so that threads decode in parallel.

The HDF5 library decodes under its one lock. gzip needs only Python. lzf, blosc, lz4 and zstd need imagecodecs, which
the extra `codecs` installs. All other filters are left to the library.
"""

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import h5py
import numpy as np

imagecodecs: Any = import_module("imagecodecs") if find_spec("imagecodecs") else None
if find_spec("hdf5plugin"):
    import_module("hdf5plugin")  # from here on the HDF5 library knows blosc, lz4, zstd and more

Bytes = bytes | bytearray | memoryview


class _Decoding(threading.local):
    """A context that adds up the time that each thread spends in it. Its own cost is about a microsecond."""

    seconds = 0.0

    def __enter__(self) -> None:
        self._t0 = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.seconds += time.perf_counter() - self._t0


DECODING = _Decoding()
Filter = tuple[int, tuple[int, ...], str]
"""(HDF5's number of a filter, its parameters, its name)"""


def filters_of(data: h5py.Dataset) -> list[Filter]:
    """The filters of a dataset, in the order in which they are applied."""
    properties = data.id.get_create_plist()
    found = [properties.get_filter(number) for number in range(properties.get_nfilters())]
    return [(code, parameters, name.decode().partition(";")[0]) for code, _, parameters, name in found]


def decode(data: Bytes, filters: Sequence[Filter], skipped: int, size: int) -> Bytes:
    """The `size` bytes of a chunk before the filters were applied.

    skipped: HDF5's `filter_mask`. Bit i is set if filter i was left out for this chunk, because the chunk would not
    shrink. Raises ValueError if the bytes are damaged.
    """
    try:
        for number, (code, parameters, _) in reversed([*enumerate(filters)]):
            if not skipped >> number & 1:
                data = DECODERS[code](data, parameters, size)
    except (zlib.error, RuntimeError, ValueError) as error:
        raise ValueError(f"cannot be decoded ({error})") from None
    if len(data) != size:
        raise ValueError(f"has {len(data)} bytes instead of {size}")
    return data


def _inflate(data: Bytes, parameters: tuple[int, ...], size: int) -> bytes:
    stream = zlib.decompressobj()
    decoded = stream.decompress(data, size + 1)  # at most: a few bytes could inflate to more than the memory
    if not stream.eof:
        raise ValueError(f"it does not end after {size} bytes")
    return decoded


def _unshuffle(data: Bytes, parameters: tuple[int, ...], size: int) -> bytes:
    width = parameters[0]  # bytes of an element; the file has the first byte of all elements, then the second byte
    n_whole_bytes = len(data) // width * width
    elements = np.frombuffer(data, np.uint8)[:n_whole_bytes].reshape(width, -1).T
    return elements.tobytes() + bytes(data[n_whole_bytes:])


DECODERS: dict[int, Callable[[Any, tuple[int, ...], int], Bytes]] = {
    1: _inflate,
    2: _unshuffle,
}
"""{number of a filter that `decode` knows: function of (bytes, parameters, number of decoded bytes)}"""
if imagecodecs:
    DECODERS[32000] = lambda data, parameters, size: imagecodecs.lzf_decode(data, out=size)
    DECODERS[32001] = lambda data, parameters, size: imagecodecs.blosc_decode(data, out=size, numthreads=1)
    DECODERS[32004] = lambda data, parameters, size: imagecodecs.lz4h5_decode(data, out=size)
    DECODERS[32015] = lambda data, parameters, size: imagecodecs.zstd_decode(data, out=size)
