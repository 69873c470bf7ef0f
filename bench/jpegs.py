"""The contenders of encoded.py: each decodes JPEG files, takes a random part, and yields shuffled batches of 224 x 224.

All have the bytes of the same files in the page cache, take parts as torchvision's RandomResizedCrop does (8 to 100 %
of the area), and have a thread or process for each CPU. FFCV and DALI resize by code of their own and yield
(B, H, W, C), all others resize by torch with antialiasing and yield (B, C, H, W). Nothing is flipped or normalised.
"""

from __future__ import annotations

import multiprocessing
import random
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import project  # noqa: F401
import simplejpeg
import torch
import torch.nn.functional as F
from peers import Batch, Task, convert_once, permutation
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fastgpu.images.parts import N_DRAWS, Box, random_box

SIZE = (224, 224)
MIN_SCALE = 0.08
RATIO = (3 / 4, 4 / 3)
Epochs = Callable[[int], Iterable[Any]]
"""The batches of an epoch."""


def files_of(task: Task) -> list[Path]:
    """The JPEG files of a task, beside its HDF5 file."""
    return sorted((task.folder / "jpegs").iterdir())


def a_box(height: int, width: int) -> Box:
    """A random part of an image."""
    return random_box([random.random() for _ in range(N_DRAWS)], height, width, MIN_SCALE)


def by_simplejpeg(data: bytes | np.ndarray) -> torch.Tensor:
    """Decoder and resize as a user of both libraries writes them."""
    pixels = simplejpeg.decode_jpeg(data)
    top, left, height, width = a_box(*pixels.shape[:2])
    part = np.ascontiguousarray(pixels[top : top + height, left : left + width])
    return F.interpolate(torch.from_numpy(part).permute(2, 0, 1)[None], SIZE, mode="bilinear", antialias=True)[0]


def by_pillow(path: Path) -> torch.Tensor:
    """What torchvision's RandomResizedCrop does with an image of Pillow."""
    with Image.open(path) as image:
        top, left, height, width = a_box(image.height, image.width)
        part = image.convert("RGB").crop((left, top, left + width, top + height))
        resized = np.array(part.resize(SIZE[::-1], Image.Resampling.BILINEAR))
        return torch.from_numpy(resized).permute(2, 0, 1).contiguous()


def read_by_simplejpeg(path: Path) -> torch.Tensor:
    return by_simplejpeg(path.read_bytes())


def feed(task: Task, *, n_readers: int | None = None) -> Epochs:
    """This project's feed, with as many rows ahead as a DataLoader has."""
    from fastgpu.feed.tiers import Placement, make_feed
    from fastgpu.images.column import ImageDecoder
    from fastgpu.rows.order import BlockSampler
    from fastgpu.storage.store import open_store

    rows = open_store("FILE", str(task.h5), {"images": "images", "labels": "labels"})
    source = ImageDecoder(SIZE, MIN_SCALE).decoded(rows)
    order = BlockSampler(source.block_rows, task.batch_size, pool_batches=1)
    pools = make_feed(source, order, Placement("disk", torch.device("cpu"), n_readers or task.n_workers)).pools
    return lambda epoch: (pool.rows["images"] for pool in pools(epoch))


def bare(task: Task, *, on_each_cpu: bool = False) -> Epochs:
    """A limit: `by_simplejpeg` in a loop over bytes in memory, in one process or in one for each worker at a time.

    The batches are as large as those of all processes together, which are equally fast.
    """
    torch.set_num_threads(1)
    files = [np.fromfile(path, np.uint8) for path in files_of(task)]
    n_processes = task.n_workers if on_each_cpu else 1

    def epoch(number: int) -> Iterator[range]:
        for rows in permutation(len(files), task.batch_size, 0, number):
            for row in rows:
                by_simplejpeg(files[row])
            yield range(n_processes * len(rows))

    def repeat() -> None:
        for number in count():
            for _ in epoch(number):
                pass

    for _ in range(n_processes - 1):
        multiprocessing.get_context("fork").Process(target=repeat, daemon=True).start()
    return epoch


class Files(Dataset[Any]):
    """What `read` makes of the files of a task."""

    def __init__(self, task: Task, read: Callable[[Path], Any]) -> None:
        self.paths = files_of(task)
        self.read = read

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> Any:
        return self.read(self.paths[row])


def data_loader(task: Task, *, read: Callable[[Path], torch.Tensor]) -> Epochs:
    """torch's DataLoader over the files."""
    options = {"shuffle": True, "drop_last": True, "num_workers": task.n_workers, "persistent_workers": True}
    loader = DataLoader(Files(task, read), task.batch_size, **options)
    return lambda epoch: loader


class Picture(np.ndarray):
    """Pixels that know the file from which they were decoded."""

    jpeg: np.ndarray


def picture(path: Path) -> tuple[Picture]:
    data = np.fromfile(path, np.uint8)
    pixels = simplejpeg.decode_jpeg(data).view(Picture)
    pixels.jpeg = data
    return (pixels,)


def ffcv(task: Task, *, mode: str = "jpg") -> Epochs:
    """FFCV: RGBImageField, RandomResizedCropRGBImageDecoder, OrderOption.RANDOM, os_cache=True, compiled.

    The field would encode the pixels anew; here it keeps the bytes of the files. mode: proportion stores a random half
    of the images as pixels.
    """
    import ffcv.fields.rgb_image as rgb
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    def write(target: Path) -> None:
        rgb.encode_jpeg = lambda pixels, quality: pixels.jpeg
        writer = DatasetWriter(str(target), {"image": rgb.RGBImageField(mode)}, num_workers=task.n_workers)
        writer.from_indexed_dataset(Files(task, picture))

    loader = Loader(
        str(convert_once(task.folder / f"{mode}.beton", write)),
        batch_size=task.batch_size,
        num_workers=task.n_workers,
        os_cache=True,
        order=OrderOption.RANDOM,
        seed=task.seed,
        drop_last=True,
        pipelines={"image": [rgb.RandomResizedCropRGBImageDecoder(SIZE, (MIN_SCALE, 1), RATIO), ToTensor()]},
    )
    return lambda epoch: (images for (images,) in loader)


def dali(task: Task) -> Epochs:
    """DALI, CPU pipeline: file reader with a full shuffle, decoders.image_random_crop (which decodes the part), resize.

    It resizes by a triangular filter where the part is larger, as torch with antialiasing does.
    """
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    files = [str(path) for path in files_of(task)]
    pipeline = Pipeline(task.batch_size, num_threads=task.n_workers, device_id=None, seed=task.seed)
    with pipeline:
        data, _ = fn.readers.file(files=files, shuffle_after_epoch=True)
        parts = fn.decoders.image_random_crop(data, random_area=(MIN_SCALE, 1), random_aspect_ratio=RATIO)
        pipeline.set_outputs(fn.resize(parts, size=SIZE))
    pipeline.build()
    n_batches = len(files) // task.batch_size
    return lambda epoch: (np.asarray(pipeline.run()[0].as_tensor()) for _ in range(n_batches))


def spdl(task: Task) -> Epochs:
    """SPDL: a PipelineBuilder of threads that decode, then one that makes the batches; simplejpeg.

    SPDL's own decoder, which is FFmpeg's, took 1.3 to 1.9 times the CPU time. The source never ends.
    """
    from spdl.pipeline import PipelineBuilder

    paths = files_of(task)

    def source() -> Iterator[Path]:
        for number in count():
            for row in np.random.default_rng(number).permutation(len(paths)):
                if not threading.main_thread().is_alive():
                    return  # or SPDL's thread would keep the interpreter alive
                yield paths[row]

    torch.set_num_threads(1)
    builder = PipelineBuilder().add_source(source()).pipe(read_by_simplejpeg, concurrency=task.n_workers)
    builder = builder.aggregate(task.batch_size).pipe(torch.stack).add_sink(2)
    pipeline = builder.build(num_threads=task.n_workers + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about daemon threads, which have nothing to finish here
        pipeline.start(daemon=True)
    n_batches = len(paths) // task.batch_size
    return lambda epoch: (pipeline.get_item() for _ in range(n_batches))


OURS = "feed"
BARE = "bare, one thread"
PILLOW = "DataLoader + Pillow"
SIMPLEJPEG = "DataLoader + simplejpeg"
MIXED = "FFCV, half of the images as pixels"
SPDL = "SPDL + simplejpeg"
CONTENDERS: dict[str, Callable[[Task], Epochs]] = {
    BARE: bare,
    "bare, on each CPU": partial(bare, on_each_cpu=True),
    "feed, 1 reader": partial(feed, n_readers=1),
    OURS: feed,
    SIMPLEJPEG: partial(data_loader, read=read_by_simplejpeg),
    PILLOW: partial(data_loader, read=by_pillow),
}
PEERS: dict[str, Callable[[Task], Epochs]] = {
    "FFCV": ffcv,
    MIXED: partial(ffcv, mode="proportion"),
    "DALI": dali,
    SPDL: spdl,
}
"""These run in the peers' environment."""


class Contender:
    """A contender as worker.py knows it."""

    def __init__(self, name: str, task: Task) -> None:
        self.epochs = (CONTENDERS | PEERS)[name](task)
        self.folder = task.folder

    def files(self) -> list[Path]:
        """Whatever may be read."""
        return [path for path in self.folder.rglob("*") if path.is_file()]

    def epoch(self, number: int) -> Iterator[Batch]:
        for images in self.epochs(number):
            yield images, images  # there are no labels, of which worker.py takes the number of rows
