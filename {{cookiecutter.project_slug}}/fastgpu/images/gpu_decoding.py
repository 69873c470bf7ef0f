"""Encoded images of a pool, decoded on the GPU instead of in the reader threads.

The reader threads copy the bytes of the files to staging memory. nvJPEG decodes them from there (by torchcodec), and
two matrix products cut and resize the same parts that the reader threads would take. Images that nvJPEG cannot decode
are decoded on the CPU.

Shapes: n images of 3 colors, H and W pixels of the largest part, h and w pixels of the result.
"""

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastgpu.images.encoded import Box, EncodedImage, to_jpeg
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.contract import BlockReader, PoolPlan, PoolReader
from fastgpu.rows.rows import Ragged, Rows, beginnings, to_device

if TYPE_CHECKING:
    from fastgpu.images.decoded import DecodedImages
    from fastgpu.rows.order import BlockSampler

CHUNK_PIXELS = 16 << 20
"""Images that are decoded at a time have at most so many pixels together, and so have their parts, padded to one size:
48 MiB and 96 MiB. A larger image comes alone."""
NO_MEMORY = ("out of memory", "nvjpegDecode failed: 5")
"""How torchcodec says that the device has no memory left."""

Decode = Callable[..., list[Tensor]]
"""`decode_jpeg` of torchcodec: bytes in host memory and `device=` -> uint8 (3, height, width) of each upright image."""


def load_decoder() -> Decode:
    """Raises UserError if torchcodec is missing, or does not work with this torch."""
    try:
        return import_module("torchcodec.decoders").decode_jpeg
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UserError(
            f"data.decode_on is gpu, but torchcodec cannot be loaded ({_reason(error)}); pip install "
            "'torchcodec>=0.16', built for torch's version of CUDA, or use cpu"
        ) from None


def _reason(error: Exception) -> str:
    """The first line of an error."""
    return next(iter(str(error).splitlines()), type(error).__name__)


class _Part(NamedTuple):
    """What is taken of one image, and where it goes."""

    place: int
    data: Tensor
    """(bytes,) uint8 in host memory."""
    upright: tuple[int, int]
    """(height, width) of the whole image."""
    box: Box


class GpuDecoder:
    """Turns pools of encoded images into pools of pixels. See `contract.PoolDecoder`."""

    def __init__(self, source: "DecodedImages", order: "BlockSampler", device: torch.device):
        self.encoded = source.encoded
        self._source = source
        self._order = order
        self._device = device
        self._decode_jpeg = load_decoder()
        self._refused: set[int] = set()  # rows that are left to the CPU
        file = torch.frombuffer(bytearray(to_jpeg(np.zeros((3, 16, 16), np.uint8), quality=90)), dtype=torch.uint8)
        try:
            self._decode([file])
        except Exception as error:
            raise UserError(f"data.decode_on is gpu, but nvJPEG does not work ({_reason(error)}); use cpu") from None

    def open_reader(self, n_threads: int) -> PoolReader:
        """Threads that read encoded rows, by plans that know what each epoch takes of them."""
        reader = BlockReader(self.encoded, self._order, n_threads)
        reader.pools = self._source.open_reader(self._order, n_threads).pools
        return reader

    def make_pool(self, host: Rows) -> Rows:
        """Memory on the device for what the rows of `host` become."""
        images = {name: self._source.fields[name] for name in sorted(self._source.encoded_fields)}
        others = Rows({name: column for name, column in host.columns.items() if name not in images})
        pixels = Rows.empty(images, len(host), self._device)
        return Rows({**others.empty_like(self._device).columns, **pixels.columns})

    def decode(self, plan: PoolPlan, host: Rows, device: Rows) -> Iterator[None]:
        """See `contract.PoolDecoder.decode`."""
        rows = self._order.row_ids(plan)
        seed = (self._order.seed, plan.epoch, plan.echo_pass or 0) if self._order.shuffle else None
        draws = self._source.draw(seed, rows) if seed else [[]] * len(rows)
        damaged: set[int] = set()
        for name, column in device.slice(0, plan.n_rows).columns.items():
            if name not in self._source.encoded_fields:
                column.copy_(host[name][: plan.n_rows], non_blocking=True)
                continue
            pixels = beginnings(column, plan.shapes[name]) if name in plan.shapes else column
            parts, left = self._find_parts(host[name], rows, (pixels.shape[2], pixels.shape[3]), draws)
            for chunk in _chunks(parts):
                left += self._decode_parts(chunk, rows, pixels)
                yield
            for place in left:
                data = host[name].values[host[name].host_offsets[place] : host[name].host_offsets[place + 1]].numpy()
                if not self._decode_on_cpu(data, pixels[place], draws[place]):
                    damaged.add(place)
                yield
        for place in sorted(damaged):
            decoded = self._source.decode_row(int(rows[place]), seed, plan.shapes)
            for name, column in device.columns.items():
                if not isinstance(column, Ragged):
                    column[place].copy_(to_device(decoded[name][0], self._device))
            yield

    def _decode(self, files: list[Tensor]) -> list[Tensor]:
        """Decode files by nvJPEG, after the work that is queued on the current stream is done.

        The hardware decoder of a GPU does not wait for that work. It would overwrite memory that was freed but is
        still to be read, such as the previous images (https://github.com/meta-pytorch/torchcodec/pull/1634).
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).record_event().synchronize()
        return self._decode_jpeg(files, device=self._device)

    def _find_parts(
        self, encoded: Ragged, rows: np.ndarray, size: tuple[int, int], draws: Sequence[Sequence[float]]
    ) -> tuple[list[_Part], list[int]]:
        """The parts of images that the GPU decodes, and the places of the other images.

        rows: (places,) row numbers.
        """
        values = encoded.values.numpy()
        offsets = encoded.host_offsets.tolist()
        parts: list[_Part] = []
        left: list[int] = []
        for place, row in enumerate(rows.tolist()):
            data = slice(offsets[place], offsets[place + 1])
            if row in self._refused:
                left.append(place)
                continue
            try:
                image = EncodedImage(values[data])
            except Exception as error:  # a decoder may raise anything for damaged bytes
                self._refuse(row, _reason(error))
                left.append(place)
                continue
            if image.is_plain_jpeg:
                box = image.widen(self._source.find_box(image, size, draws[place]), size)
                parts.append(_Part(place, encoded.values[data], (image.height, image.width), box))
            else:
                self._refuse(row, "it is no JPEG file of usual colors and orientation")
                left.append(place)
        return parts, left

    def _decode_parts(self, parts: list[_Part], rows: np.ndarray, pixels: Tensor) -> list[int]:
        """Decode some parts to their places in `pixels`, uint8 (rows, 3, h, w). Returns the places of those that fail.

        One image that nvJPEG refuses fails all of a call, so the two halves are tried again.
        """
        try:
            images = self._decode([part.data for part in parts])
            if any(image.shape != (3, *part.upright) for image, part in zip(images, parts, strict=True)):
                raise ValueError("nvJPEG gives another size than the header")
        except (RuntimeError, ValueError) as error:
            reason = _reason(error)
            if isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in NO_MEMORY):
                raise torch.OutOfMemoryError(f"data.decode_on is gpu: {reason}") from None
            if len(parts) == 1:
                self._refuse(int(rows[parts[0].place]), reason)
                return [parts[0].place]
            half = len(parts) // 2
            return self._decode_parts(parts[:half], rows, pixels) + self._decode_parts(parts[half:], rows, pixels)
        places = to_device(torch.tensor([part.place for part in parts]), self._device)
        size = (pixels.shape[2], pixels.shape[3])
        pixels.index_copy_(0, places, cut_and_resize(images, [part.box for part in parts], size))
        return []

    def _decode_on_cpu(self, data: np.ndarray, out: Tensor, draws: Sequence[float]) -> bool:
        """Decode an image to `out`, uint8 (3, h, w). False if it is damaged."""
        size = (out.shape[1], out.shape[2])
        try:
            image = EncodedImage(data)
            pixels = image.decode(self._source.find_box(image, size, draws), size)
        except Exception:  # whoever decodes it again says why
            return False
        out.copy_(to_device(torch.from_numpy(pixels.copy()), self._device))
        return True

    def _refuse(self, row: int, reason: str) -> None:
        """Leave a row to the CPU from now on, and tell the first one."""
        if not self._refused:
            warn(f"{self._source.name}: the CPU decodes row {row:,}, and maybe others: {reason}")
        self._refused.add(row)


def _chunks(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Images of at most CHUNK_PIXELS together, parts of about the same size side by side."""
    chunk: list[_Part] = []
    n_pixels = height = width = 0
    for part in sorted(parts, key=lambda part: part.box.height * part.box.width):
        n_pixels += part.upright[0] * part.upright[1]
        height = max(height, part.box.height)
        width = max(width, part.box.width)
        if chunk and max(n_pixels, (len(chunk) + 1) * height * width) > CHUNK_PIXELS:
            yield chunk
            chunk = []
            n_pixels = part.upright[0] * part.upright[1]
            height, width = part.box.height, part.box.width
        chunk.append(part)
    if chunk:
        yield chunk


def cut_and_resize(images: Sequence[Tensor], boxes: Sequence[Box], size: tuple[int, int]) -> Tensor:
    """A part of each image, resized to (h, w): uint8 (n, 3, h, w), on the device of the images.

    images: uint8 (3, height, width) of any size. The filter is a triangle, as in Pillow, and in torch with antialias.
    """
    height = max(box.height for box in boxes)
    width = max(box.width for box in boxes)
    is_cpu = images[0].device.type == "cpu"  # float16 holds all grey levels, and is fast on a GPU only
    dtype = torch.float32 if is_cpu else torch.float16
    parts_nHCW = images[0].new_zeros((len(images), height, 3, width), dtype=dtype)
    for part_HCW, image, box in zip(parts_nHCW, images, boxes, strict=True):
        cut = image[:, box.top : box.top + box.height, box.left : box.left + box.width]
        part_HCW[: box.height, :, : box.width] = cut.transpose(0, 1)
    heights, widths = to_device(torch.tensor([box[2:] for box in boxes]), images[0].device).unbind(1)
    rows = _weights(heights, size[0], height).to(dtype) @ parts_nHCW.flatten(2)
    columns = _weights(widths, size[1], width).to(dtype).transpose(1, 2)
    resized = rows.unflatten(2, (3, width)).flatten(1, 2) @ columns
    return resized.round_().clamp_(0, 255).to(torch.uint8).unflatten(1, (size[0], 3)).transpose(1, 2)


def _weights(lengths: Tensor, size: int, longest: int) -> Tensor:
    """(n, size, longest) float32: how much each of `longest` pixels counts for each of `size` new ones.

    lengths: (n,) pixels that there are. The pixels behind them do not count.
    """
    scales = lengths[:, None] / size
    centres = (torch.arange(size, device=lengths.device) + 0.5) * scales
    at = torch.arange(longest, device=lengths.device) + 0.5
    distances = (at - centres[:, :, None]).abs() / scales[:, :, None].clamp(min=1)
    weights = (1 - distances).clamp_(min=0) * (at < lengths[:, None, None])
    return weights / weights.sum(2, keepdim=True)
