"""The GPU is replaced by the CPU, and nvJPEG by Pillow, but in the tests that are marked `gpu`."""

import io
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from harness import CPU
from PIL import Image
from torch import Tensor

from fastgpu.feed.sources import open_source, open_sources
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.images import gpu_decoding
from fastgpu.images.decoded import DecodedImages
from fastgpu.images.encoded import Box, EncodedImage
from fastgpu.images.gpu_decoding import GpuDecoder, _chunks, _Part, cut_and_resize, load_decoder
from fastgpu.process.config import Data, Hdf5, Loader
from fastgpu.process.launch import RankError, UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import BlockRead
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.storage.store import open_store

N_ROWS = 64
SIZE = (32, 48)
FIELDS = {"images": "images", "labels": "labels"}
GPU = torch.device("cuda", 0)
MAX_GPU_DIFFERENCE = 4
"""Grey levels, in the mean of an image. Colors of half the resolution that are repeated, as by nvJPEG, make 1.7."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def photo(number: int) -> bytes:
    """A file with soft shapes, from 60 to 120 pixels: every 8th is a PNG file, every 8th lies on its side."""
    rng = np.random.default_rng(number)
    height, width = rng.integers(60, 120, 2)
    corners = rng.integers(0, 256, (3, 3, 3), np.uint8)
    image = Image.fromarray(corners).resize((width, height), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    if number % 8 == 1:
        exif[0x0112] = 6
    file = io.BytesIO()
    image.save(file, "PNG" if number % 8 == 0 else "JPEG", exif=exif, quality=95)
    return file.getvalue()


FILES = [photo(number) for number in range(N_ROWS)]


def write_encoded(path: Path, files: list[bytes]) -> Path:
    with h5py.File(path, "w") as file:
        file["images/indptr"] = np.cumsum([0, *map(len, files)])
        file["images/values"] = np.frombuffer(b"".join(files), np.uint8)
        file["images"].attrs["codec"] = "jpeg+png"
        file["labels"] = np.arange(len(files))
    return path


def decode_by_pillow(files: list[Tensor], device: torch.device) -> list[Tensor]:
    """What torchcodec does: upright images; one damaged file fails all of them."""
    images = []
    for data in files:
        try:
            image = Image.open(io.BytesIO(data.numpy().tobytes()))
            assert image.format == "JPEG"
            pixels = np.asarray(image.convert("RGB"))
        except OSError as error:
            raise RuntimeError(f"nvjpegDecode failed: {error}") from None
        if image.getexif().get(0x0112) == 6:
            pixels = np.rot90(pixels, -1)
        images.append(torch.from_numpy(pixels.copy()).permute(2, 0, 1).to(device))
    return images


@pytest.fixture
def by_pillow(monkeypatch):
    """Decode on the "GPU" wherever a source says so."""
    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda: decode_by_pillow)

    def open_decoder(source: DecodedImages, order: BlockSampler, device: torch.device) -> GpuDecoder | None:
        return GpuDecoder(source, order, device) if source._is_on_gpu else None

    monkeypatch.setattr(DecodedImages, "open_decoder", open_decoder)


def feed_of(source: DecodedImages, tier: str = "disk", device: torch.device = CPU) -> Feed:
    order = BlockSampler(source.block_rows, 8, shard=Shard(0, 1, 4), pool_batches=3, seed=5)
    return make_feed(source, order, Placement(tier, device, 2), Loader())


def rows_of(feed: Feed, n_epochs: int = 2) -> list[tuple[int, np.ndarray]]:
    """(label, pixels) of the rows in order."""
    rows = []
    for epoch in range(n_epochs):
        for pool in feed.pools(epoch):
            images = pool.rows["images"].cpu().numpy().copy()
            rows += list(zip(pool.rows["labels"].tolist(), images, strict=True))
    feed.close()
    return rows


def differences(ours: list[tuple[int, np.ndarray]], others: list[tuple[int, np.ndarray]]) -> list[float]:
    """Mean difference of the pixels of each row, in grey levels. The rows and their sizes must be the same."""
    assert [row for row, _ in ours] == [row for row, _ in others]
    pairs = zip(ours, others, strict=True)
    return [np.abs(np.subtract(one, other, dtype=np.float64)).mean() for (_, one), (_, other) in pairs]


def test_parts_are_resized_as_torch_resizes_them():
    rng = np.random.default_rng(0)
    images, boxes, expected = [], [], []
    for height, width, box in [
        (90, 70, Box(3, 5, 80, 60)),  # smaller, in both directions
        (40, 130, Box(0, 0, 20, 130)),  # larger and smaller
        (64, 64, Box(16, 8, 32, 48)),  # as it is
        (9, 9, Box(4, 4, 1, 2)),
    ]:
        image = torch.from_numpy(rng.integers(0, 256, (3, height, width), np.uint8))
        part = image[None, :, box.top : box.top + box.height, box.left : box.left + box.width].double()
        expected.append(torch.nn.functional.interpolate(part, SIZE, mode="bilinear", antialias=True)[0])
        images.append(image)
        boxes.append(box)
    resized = cut_and_resize(images, boxes, SIZE)
    assert resized.dtype == torch.uint8
    assert (resized.double() - torch.stack(expected)).abs().max() < 0.51


RANDOM_PARTS = {"min_scale": 0.3}
ECHOED_PARTS = {"min_scale": 0.3, "echo": 2.5}
TIERS_AND_OPTIONS = [
    *[(tier, options) for tier in ("disk", "host") for options in (RANDOM_PARTS, ECHOED_PARTS, {})],
    ("device", {}),  # which has one part of each image
]


@pytest.mark.parametrize(("tier", "options"), TIERS_AND_OPTIONS)
def test_rows_and_parts_are_those_of_the_cpu(tmp_path, by_pillow, capsys, tier, options):
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", FILES)), FIELDS)
    sizes = {0: (20, 30), 1: SIZE} if options else SIZE
    expected = rows_of(feed_of(DecodedImages(store, sizes, **options), tier))
    rows = rows_of(feed_of(DecodedImages(store, sizes, **options, on_gpu=True), tier))
    by_row = differences(rows, expected)
    assert max(by_row) < 2
    assert [number for (row, _), number in zip(rows, by_row, strict=True) if row % 8 == 0 and number] == []
    told = capsys.readouterr().out
    assert "and maybe others: it is no JPEG file of usual colors and orientation" in told


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_feed_says_whether_the_device_decodes(tmp_path, by_pillow, on_gpu):
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", FILES)), FIELDS)
    with closing(feed_of(DecodedImages(store, SIZE, on_gpu=on_gpu))) as feed:
        assert feed.decodes_on_device == on_gpu


def test_an_image_that_the_gpu_cannot_decode_is_decoded_or_named_by_the_cpu(tmp_path, by_pillow, monkeypatch, capsys):
    jpegs = [data for data in FILES if data[:2] == b"\xff\xd8"]
    monkeypatch.setattr(gpu_decoding, "CHUNK_PIXELS", 30_000)  # a few images
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", jpegs)), FIELDS)
    expected = rows_of(feed_of(DecodedImages(store, SIZE, 0.3)))
    n_calls = 0

    def decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
        nonlocal n_calls
        n_calls += 1
        if any(data.numpy().tobytes() == jpegs[3] for data in files):
            raise RuntimeError("nvjpegDecode failed: 9")
        return decode_by_pillow(files, device)

    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda: decode)
    assert max(differences(rows_of(feed_of(DecodedImages(store, SIZE, 0.3, on_gpu=True))), expected)) < 2
    first_epochs = n_calls
    source = DecodedImages(store, SIZE, 0.3, on_gpu=True)
    feed = feed_of(source)
    rows_of(feed, 5)
    assert n_calls - first_epochs < 2.5 * first_epochs  # in later epochs, no call fails
    assert "and maybe others: nvjpegDecode failed: 9" in capsys.readouterr().out

    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda: decode_by_pillow)
    jpegs[7] = jpegs[7][:200]
    damaged = open_store("x", str(write_encoded(tmp_path / "y.h5", jpegs)), FIELDS)
    with pytest.raises(RankError, match=r"the image in row 7 cannot be decoded: .*data.on_damaged_image=skip"):
        rows_of(feed_of(DecodedImages(damaged, SIZE, 0.3, on_gpu=True)))
    on_gpu, on_cpu = (DecodedImages(damaged, SIZE, 0.3, on_gpu=on_gpu) for on_gpu in (True, False))
    on_gpu.damaged, on_cpu.damaged = {}, {}
    expected = rows_of(feed_of(on_cpu))
    assert max(differences(rows_of(feed_of(on_gpu)), expected)) < 2
    assert on_gpu.damaged == on_cpu.damaged
    assert [*on_gpu.damaged] == [7]


@pytest.mark.parametrize("message", ["CUDA out of memory", "nvjpegDecode failed: 5"])
def test_no_memory_on_the_gpu_is_no_damage(tmp_path, by_pillow, monkeypatch, message):
    def decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
        if len(files) > 1:
            raise RuntimeError(message)
        return decode_by_pillow(files, device)

    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda: decode)
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", FILES)), FIELDS)
    with pytest.raises(torch.OutOfMemoryError, match=message):
        rows_of(feed_of(DecodedImages(store, SIZE, on_gpu=True)))


def test_a_decoder_that_never_works_ends_the_run(tmp_path, by_pillow, monkeypatch):
    def decode(files: list[Tensor], device: torch.device) -> list[Tensor]:
        raise RuntimeError("Failed to create nvjpeg handle\nat some place")

    monkeypatch.setattr(gpu_decoding, "load_decoder", lambda: decode)
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", FILES)), FIELDS)
    with pytest.raises(UserError, match=r"nvJPEG does not work \(Failed to create nvjpeg handle\); use cpu"):
        feed_of(DecodedImages(store, SIZE, on_gpu=True))


def test_images_are_decoded_in_chunks_of_limited_memory(monkeypatch):
    """Also where a large part lies among small ones, which would all be padded to its size."""
    monkeypatch.setattr(gpu_decoding, "CHUNK_PIXELS", 10_000)
    rng = np.random.default_rng(0)
    sides = [*rng.integers(10, 60, 200).tolist(), 500]
    empty = torch.empty(0, dtype=torch.uint8)
    parts = [_Part(place, empty, (side, side + 3), Box(0, 0, side, 30)) for place, side in enumerate(sides)]
    chunks = list(_chunks(parts))
    assert sorted(part.place for chunk in chunks for part in chunk) == list(range(len(parts)))
    for chunk in chunks:
        padded = len(chunk) * max(part.box.height for part in chunk) * max(part.box.width for part in chunk)
        whole = sum(part.upright[0] * part.upright[1] for part in chunk)
        assert len(chunk) == 1 or max(padded, whole) <= 10_000
    assert len(chunks) < 80


@pytest.mark.parametrize("kind", ["rgb", "cmyk", "xmp", "plain", "exif", "grey"])
def test_files_that_decoders_take_for_different_things_are_left_to_the_cpu(kind):
    image = Image.new("CMYK" if kind == "cmyk" else "L" if kind == "grey" else "RGB", (40, 30), 100)
    exif = Image.Exif()
    options = {}
    if kind == "rgb":
        options["keep_rgb"] = True
    if kind == "exif":
        exif[0x0112] = 6
    if kind == "xmp":
        exif[0x010F] = "a camera"
        options["xmp"] = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    file = io.BytesIO()
    image.save(file, "JPEG", exif=exif, **options)
    encoded = EncodedImage(np.frombuffer(file.getvalue(), np.uint8))
    assert encoded.is_plain_jpeg == (kind in ("plain", "exif", "grey"))
    assert (encoded.height, encoded.width) == ((40, 30) if kind in ("exif", "xmp") else (30, 40))


def test_pools_hold_the_files_even_if_these_are_larger_than_the_pixels(tmp_path, by_pillow):
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", FILES)), FIELDS)
    on_cpu = DecodedImages(store, (4, 4))
    on_gpu = DecodedImages(store, (4, 4), on_gpu=True)
    assert on_cpu.pool_row_bytes == on_cpu.row_bytes < store.row_bytes
    assert on_gpu.pool_row_bytes == store.row_bytes


def test_a_feed_that_is_closed_decodes_nothing_that_was_not_read(tmp_path, by_pillow, capsys):
    """Readers leave out what is no longer wanted, so the memory of a pool holds what was there before."""
    jpegs = [data for data in FILES if data[:2] == b"\xff\xd8"]
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", jpegs)), FIELDS)
    is_reading, may_read = threading.Event(), threading.Event()
    read = store.read

    def wait_and_read(reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        is_reading.set()
        may_read.wait(60)
        read(reads, out)

    store.read = wait_and_read
    feed = feed_of(DecodedImages(store, SIZE, 0.3, on_gpu=True))
    loop = threading.Thread(target=lambda: next(feed.pools(0), None))
    loop.start()
    assert is_reading.wait(60)
    time.sleep(0.2)  # the other pools are planned; from then on, the first one is waited for
    closing = threading.Thread(target=feed.close)
    closing.start()
    while not feed._prefetcher._closing.is_set():
        time.sleep(0.001)
    may_read.set()
    closing.join(60)
    loop.join(60)
    assert "the CPU decodes" not in capsys.readouterr().out


def test_nvjpeg_begins_when_the_work_before_it_is_done(monkeypatch):
    calls = []
    event = SimpleNamespace(synchronize=lambda: calls.append("wait"))
    stream = SimpleNamespace(record_event=lambda: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    decoder = GpuDecoder.__new__(GpuDecoder)
    decoder._device = GPU
    decoder._decode_jpeg = lambda files, device: calls.append("decode")
    decoder._decode([])
    assert calls == ["wait", "decode"]


def test_a_cpu_and_a_missing_package_are_one_line(tmp_path, monkeypatch):
    path = str(write_encoded(tmp_path / "x.h5", FILES))
    data = Data(train=path, val=path, fields=FIELDS, image_size=32, decode_on="gpu")
    with pytest.raises(UserError, match="data.decode_on is gpu, but this run is on a CPU; use cpu"):
        open_sources(data, Loader(), Hdf5(), World(0, 1, 1, CPU))
    with h5py.File(path, "a") as file:
        file["images"].attrs["codec"] = "png"
    with pytest.raises(UserError, match=r"decodes JPEG files, but \S+x\.h5.* has png; use cpu"):
        open_source(data, "train", Loader(), Hdf5())

    def fail(name: str) -> None:
        raise ImportError(f"No module named {name}\nand more")

    monkeypatch.setattr(gpu_decoding, "import_module", fail)
    with pytest.raises(UserError, match=r"cannot be loaded \(No module named torchcodec.decoders\); pip install"):
        load_decoder()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize(("tier", "options"), TIERS_AND_OPTIONS)
def test_on_a_gpu_rows_and_parts_are_those_of_the_cpu(tmp_path, tier, options):
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", FILES)), FIELDS)
    expected = rows_of(feed_of(DecodedImages(store, SIZE, **options)))
    rows = rows_of(feed_of(DecodedImages(store, SIZE, **options, on_gpu=True), tier, GPU))
    assert max(differences(rows, expected)) < MAX_GPU_DIFFERENCE


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_memory_stays_and_pixels_stay_while_kernels_are_slow(tmp_path, monkeypatch):
    """Decoding uses a stream of its own: what it writes must not be what the loop, or it itself, still reads."""
    monkeypatch.setattr(gpu_decoding, "CHUNK_PIXELS", 1)  # one image at a time, in the memory of an earlier one
    store = open_store("x", str(write_encoded(tmp_path / "x.h5", FILES)), FIELDS)
    expected = rows_of(feed_of(DecodedImages(store, SIZE, 0.3)), 4)
    feed = feed_of(DecodedImages(store, SIZE, 0.3, on_gpu=True), device=GPU)
    slow = torch.randn(4096, 4096, device=GPU)
    rows = []
    reserved = []
    for epoch in range(4):
        for pool in feed.pools(epoch):
            for _ in range(20):
                slow = slow @ slow / 4096
            images = pool.rows["images"] + (slow.sum() * 0).to(torch.uint8)  # read behind the slow kernels
            rows.append((pool.rows["labels"].clone(), images))
        reserved.append(torch.cuda.memory_reserved())
    feed.close()
    on_host = [pair for labels, images in rows for pair in zip(labels.tolist(), images.cpu().numpy(), strict=True)]
    assert max(differences(on_host, expected)) < MAX_GPU_DIFFERENCE
    assert reserved[3] - reserved[1] <= 4 << 20  # torch takes memory in pieces of 2 MiB
