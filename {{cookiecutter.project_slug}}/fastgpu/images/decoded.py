"""Encoded images as a source of pixels: the threads that read a block decode its rows straight into their places."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import UnidentifiedImageError

from fastgpu.images.encoded import (
    Box,
    EncodedImage,
    centre_box,
    draw,
    random_box,
    simplejpeg,
)
from fastgpu.images.files import Preprocessing
from fastgpu.process.launch import RankError, warn
from fastgpu.rows.contract import (
    BlockRead,
    BlockReader,
    DerivedSource,
    PoolPlan,
    PoolReader,
    Source,
)
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.rows.selection import Subset
from fastgpu.storage.file import RESTORE, scratch

if TYPE_CHECKING:
    from fastgpu.rows.order import BlockSampler

CENTRE_SHARE = 224 / 256
"""Share of the sides that is kept for validation where training sees random parts, which make things look larger."""


class DecodedImages(DerivedSource):
    """Another source, with pixels in place of encoded images: uint8 (3, H, W).

    `read` takes the centre of each image. A reader in random order takes a random part, if `min_scale` is below 1. The
    part is a function of (seed, epoch, row) alone: it is the same for every world size, tier and number of readers, and
    for a resumed run.
    """

    def __init__(
        self,
        encoded: Source,
        size: tuple[int, int],
        min_scale: float = 1.0,
        centre_share: float | None = None,
    ):
        """size: (height, width) of the rows.

        min_scale: smallest share of the area of a random part. 1: no such part. centre_share: share of the sides of the
        largest centre that is taken. None: CENTRE_SHARE if there are random parts, otherwise all of it.
        """
        super().__init__(encoded.name, encoded)
        self._row_ids = encoded.row_ids if isinstance(encoded, Subset) else None
        self.encoded_fields = {name for name, field in encoded.fields.items() if field.codec}
        self._size = size
        self._min_scale = min_scale
        self._is_random = min_scale < 1
        self._centre_share = centre_share or (CENTRE_SHARE if min_scale < 1 else 1.0)
        self.block_rows = encoded.block_rows
        self.mixture = encoded.mixture
        self.attributes = dict(encoded.attributes)
        self.attributes["preprocessing"] = Preprocessing(self._size, centre_share=self._centre_share).to_json()
        self.decoding = self._describe_decoding()
        self.lengths = {name: each for name, each in encoded.lengths.items() if name not in self.encoded_fields}
        pixels = Field(np.dtype(np.uint8), (3, *self._size))
        self.fields = {**encoded.fields, **dict.fromkeys(self.encoded_fields, pixels)}
        self._block_start = np.cumsum(self.block_rows, dtype=np.int64) - self.block_rows
        if simplejpeg is None:
            warn("simplejpeg is not installed: Pillow decodes JPEG files, which takes longer (pip install simplejpeg)")

    def __len__(self) -> int:
        return len(self._source)

    @property
    def stored(self) -> Source:
        """The encoded rows, if epochs see other parts of them."""
        return self._source if self._is_random else self

    def over(self, stored: Source) -> Source:
        """The same rows, from a copy of `stored` that is kept in memory."""
        return self._of(stored) if self._is_random else stored

    def _describe_decoding(self) -> str:
        codecs = "+".join(sorted({self._source.fields[name].codec for name in self.encoded_fields}))
        part = "the centre"
        if self._min_scale < 1:
            part = f"a random part of {100 * self._min_scale:g} to 100 % of the area"
            part += f" (validation: the central {100 * self._centre_share:g} % of the sides)"
        height, width = self._size
        library = "simplejpeg and Pillow" if simplejpeg else "Pillow"
        return f"{codecs}, decoded by {library} in the reader threads to {height} x {width} pixels: {part}"

    def column(self, name: str) -> np.ndarray:
        """One small field of all rows. Raises KeyError if it is not in memory."""
        return self._source.column(name)

    def open_reader(self, order: "BlockSampler", n_readers: int) -> PoolReader:
        """Threads that decode the centres; the parts that each epoch takes if the order is random, too."""
        if self._is_random and order.shuffle:
            return _EpochReader(self, order, n_readers)
        return super().open_reader(order, n_readers)

    def _find_box(self, image: EncodedImage, draws: Sequence[float]) -> Box:
        """The part of an image that is taken: a random one of (N_DRAWS,) numbers, or the centre if there are none."""
        if draws:
            return random_box(draws, image.height, image.width, self._min_scale)
        return centre_box(image.height, image.width, self._size, self._centre_share)

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Decode the parts of its epoch for an `_EpochRead`, otherwise the centres, to their places. Thread-safe.

        Raises RankError with the row if an image is damaged.
        """
        for read in reads:
            self._decode(read, out)

    def _decode(self, read: BlockRead, out: Mapping[str, Any]) -> None:
        """Decode the rows of a read to their places."""
        first_row = int(self._block_start[read.block]) + read.first
        rows = np.arange(first_row, first_row + len(read.places))
        draws: list[list[float]] = [[]] * len(rows)
        if isinstance(read, _EpochRead):
            draws = draw(read.seed, rows).tolist()
        for name, column in read_block(self._source, read, rows).items():
            if name in self.encoded_fields:
                for number, place in enumerate(read.places.tolist()):
                    data = column.values[column.offsets[number] : column.offsets[number + 1]]
                    try:
                        image = EncodedImage(data)
                        out[name][place] = image.decode(self._find_box(image, draws[number]), self._size)
                    except Exception as error:  # a decoder may raise anything for damaged bytes
                        raise self._damage(first_row + number, error) from None
            elif isinstance(column, RaggedArray):
                out[name].values[out[name].places(read.places)] = column.values
            else:
                out[name][read.places] = column

    def _damage(self, row: int, error: Exception) -> RankError:
        """What to say about an image that cannot be decoded."""
        reason = "it is no image" if isinstance(error, UnidentifiedImageError) else " ".join(str(error).split())
        row_id = row if self._row_ids is None else int(self._row_ids[row])
        text = f"{self.name}: the image in row {row_id:,} cannot be decoded: {reason}"
        if isinstance(error, MemoryError) or "allocate memory" in reason:
            return RankError(f"{text}; free some memory, or use a smaller loader.num_readers")
        return RankError(f"{text}; {RESTORE}, or convert the image files again with --on-error skip")

    def describe_read(self, variables: Mapping[str, Any]) -> str:
        """What a thread reads. variables: the local ones of a method of this object on the stack of the thread."""
        if "data" not in variables:
            return self.name
        return f"row {variables['first_row'] + variables['number']:,} of {self.name}"


def read_block(source: Source, read: BlockRead, rows: np.ndarray) -> dict[str, Any]:
    """{field: rows of the read, in their order}, valid until this thread reads again. rows: their row numbers."""
    columns: dict[str, Any] = {}
    for name, field in source.fields.items():
        if field.is_ragged:
            offsets = np.zeros(len(rows) + 1, np.int64)
            np.cumsum(source.lengths[name][rows], out=offsets[1:])
            memory = scratch(int(offsets[-1]) * field.dtype.itemsize, f"field {name}")
            columns[name] = RaggedArray(memory.view(field.dtype), offsets)
        else:
            columns[name] = np.empty((len(rows), *field.shape), field.dtype)
    source.read([read._replace(places=np.arange(len(rows)))], columns)
    return columns


class _EpochRead(BlockRead):
    """A read of the random parts of its epoch."""

    seed: tuple[int, int]
    """(seed of the run, epoch)"""


def _mark(read: BlockRead, seed: tuple[int, int]) -> BlockRead:
    """The same read, of the random parts of its epoch."""
    marked = _EpochRead(*read)
    marked.seed = seed
    return marked


class _EpochReader(BlockReader):
    """Reads the parts of images that each epoch takes by threads, in the order of a sampler."""

    def __init__(self, source: DecodedImages, order: "BlockSampler", n_threads: int):
        super().__init__(source, order, n_threads)
        self._source = source
        self._order = order
        self.pools = self._pools

    def _pools(self, epoch: int, consumed: int = 0) -> Iterator[PoolPlan]:
        """The pools of an epoch, with reads that know it."""
        seed = (self._order.seed, epoch)
        for plan in self._order.pools(epoch, consumed):
            reads = [_mark(read, seed) for read in plan.reads]
            yield plan._replace(reads=reads)
