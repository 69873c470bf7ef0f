"""The contenders of bench/run.py encoded: each decodes JPEG files, and yields shuffled batches of pixels.

All have the same images in the page cache, and a thread or process for each CPU. Images of 256 x 256 are taken whole,
of others parts as torchvision's RandomResizedCrop does (8 to 100 % of the area), resized to 224 x 224. FFCV and DALI
resize by code of their own, all others by torch with antialiasing. Nothing is flipped or normalised.
"""

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peers import Contender, Items, Task, convert_once, ffcv_loader, loader, permutation, spdl_pipeline
from PIL import Image, ImageOps

from fastgpu.images.parts import N_DRAWS, Box, random_box

WHOLE = (256, 256)
SIZE = (224, 224)
MIN_SCALE = 0.08
RATIO = (3 / 4, 4 / 3)


def files_of(task: Task) -> list[Path]:
    """The JPEG files of a task, beside its HDF5 file."""
    return sorted((task.folder / "source").rglob("*.jpg"))


def all_files(task: Task) -> list[Path]:
    """Whatever a contender may read."""
    return [path for path in task.folder.rglob("*") if path.is_file() and path.suffix != ".log"]


def are_whole(task: Task) -> bool:
    """Whether the images of a task are taken whole."""
    with Image.open(files_of(task)[0]) as image:
        return image.size == WHOLE


def a_box(height: int, width: int) -> Box:
    """A random part of an image."""
    return random_box([random.random() for _ in range(N_DRAWS)], height, width, MIN_SCALE)


def by_simplejpeg(path: Path) -> torch.Tensor:
    """Decoder and resize as a user of both libraries writes them."""
    import simplejpeg  # which a machine that runs bench/gpu.py may lack

    pixels = simplejpeg.decode_jpeg(path.read_bytes())
    if pixels.shape[:2] == WHOLE:
        return torch.from_numpy(pixels).permute(2, 0, 1)
    top, left, height, width = a_box(*pixels.shape[:2])
    part = np.ascontiguousarray(pixels[top : top + height, left : left + width])
    return F.interpolate(torch.from_numpy(part).permute(2, 0, 1)[None], SIZE, mode="bilinear", antialias=True)[0]


def by_pillow(path: Path) -> torch.Tensor:
    """What torchvision's RandomResizedCrop does with an image of Pillow."""
    with Image.open(path) as opened:
        image = opened.convert("RGB")
    if image.size != WHOLE:
        top, left, height, width = a_box(image.height, image.width)
        image = image.crop((left, top, left + width, top + height)).resize(SIZE[::-1], Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()


def centre_by_pillow(path: Path) -> Image.Image:
    """What convert.py makes of an image."""
    with Image.open(path) as image:
        image.draft("RGB", (2 * SIZE[0], 2 * SIZE[1]))
        return ImageOps.fit(image, SIZE, Image.Resampling.BILINEAR)


def feed(task: Task) -> Contender:
    """This project's feed, with as many rows ahead as a DataLoader has."""
    import ours  # whose packages the peers' environment lacks

    from fastgpu.images.column import ImageCodec
    from fastgpu.storage.store import open_store

    size, min_scale = (WHOLE, 1.0) if are_whole(task) else (SIZE, MIN_SCALE)
    codec = ImageCodec(size, min_scale)
    rows = open_store("FILE", str(task.h5), {"images": "images", "labels": "labels"}, {"images": codec})
    pools = ours.open_feed(rows, task.batch_size, n_readers=task.n_workers, pool_batches=1)
    return Contender(all_files(task), lambda number: ((batch["images"],) for batch in ours.batches(pools, number)))


def in_threads(task: Task, *, decode: Callable[[Path], Any]) -> Contender:
    """A limit: what decodes a file in a loop, in as many bare threads. An epoch is one batch."""
    torch.set_num_threads(1)
    files = files_of(task)

    def decode_all(rows: np.ndarray) -> None:
        for row in rows:
            decode(files[row])

    def epoch(number: int) -> Iterator[tuple[list[Path]]]:
        (rows,) = permutation(len(files), len(files), number)
        with ThreadPoolExecutor(task.n_workers) as threads:
            list(threads.map(decode_all, np.array_split(rows, task.n_workers)))
        yield (files,)

    return Contender(files, epoch)


def items_of(task: Task, *, read: Callable[[Path], Any]) -> Items:
    """What `read` makes of each file of a task, as a tuple."""
    paths = files_of(task)
    return Items(len(paths), lambda row: (read(paths[row]),))


def data_loader(task: Task, *, read: Callable[[Path], torch.Tensor]) -> Contender:
    """torch's DataLoader over the files."""
    return loader(task, rows=partial(items_of, read=read))._replace(files=all_files(task))


def ffcv(task: Task) -> Contender:
    """FFCV: RGBImageField, which encodes the pixels anew in the quality of the files; a compiled decoder."""
    import simplejpeg
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    def write(target: Path) -> None:
        fields = {"image": RGBImageField("jpg", jpeg_quality=92)}
        pixels = items_of(task, read=lambda path: simplejpeg.decode_jpeg(path.read_bytes()))
        DatasetWriter(str(target), fields, num_workers=task.n_workers).from_indexed_dataset(pixels)

    path = convert_once(task.folder / "jpg.beton", write)
    parts = RandomResizedCropRGBImageDecoder(SIZE, (MIN_SCALE, 1), RATIO)
    decoder = SimpleRGBImageDecoder() if are_whole(task) else parts
    loader = ffcv_loader(task, path, {"image": [decoder, ToTensor()]})
    return Contender(all_files(task), lambda number: loader)


def dali(task: Task) -> Contender:
    """DALI, CPU pipeline: file reader with a full shuffle, a decoder (image_random_crop decodes the part), resize.

    It resizes by a triangular filter where the part is larger, as torch with antialiasing does.
    """
    from nvidia.dali import fn
    from nvidia.dali.pipeline import Pipeline

    files = [str(path) for path in files_of(task)]
    pipeline = Pipeline(task.batch_size, num_threads=task.n_workers, device_id=None, seed=0)
    with pipeline:
        data, _ = fn.readers.file(files=files, shuffle_after_epoch=True)
        if are_whole(task):
            pipeline.set_outputs(fn.decoders.image(data))
        else:
            parts = fn.decoders.image_random_crop(data, random_area=(MIN_SCALE, 1), random_aspect_ratio=RATIO)
            pipeline.set_outputs(fn.resize(parts, size=SIZE))
    pipeline.build()

    def epoch(number: int) -> Iterator[tuple[np.ndarray]]:
        for _ in range(len(files) // task.batch_size):
            yield (np.asarray(pipeline.run()[0].as_tensor()),)

    return Contender(all_files(task), epoch)


def spdl(task: Task) -> Contender:
    """SPDL: a PipelineBuilder of threads that decode, then one that makes the batches; simplejpeg.

    SPDL's own decoder, which is FFmpeg's, takes more CPU time. The source never ends.
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
    builder = PipelineBuilder().add_source(source()).pipe(by_simplejpeg, concurrency=task.n_workers)
    pipeline = spdl_pipeline(builder.aggregate(task.batch_size).pipe(torch.stack).add_sink(2), task.n_workers + 1)
    n_batches = len(paths) // task.batch_size
    return Contender(all_files(task), lambda number: ((pipeline.get_item(),) for _ in range(n_batches)))


def convert(task: Task) -> Contender:
    """convert.py in this process, once it has been imported. An epoch writes all files to one HDF5 file of pixels."""
    from fastgpu.convert.command import parse, run  # whose packages the peers' environment lacks

    words = ["images", str(task.folder / "source"), str(task.folder / "converted.h5")]

    def epoch(number: int) -> Iterator[tuple[list[Path]]]:
        assert run(parse([*words, "--size", str(SIZE[0]), "--force"])) == 0
        yield (files_of(task),)

    return Contender([], epoch)


OURS = "fastgpu, JPEG"
BARE = "simplejpeg in bare threads"
PILLOW = "DataLoader + Pillow"
FFCV = "ffcv, JPEG"
CONVERT = "500x375: convert.py, centre"
CENTRE = "500x375: Pillow in bare threads, centre"
CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    OURS: feed,
    "DataLoader + simplejpeg": partial(data_loader, read=by_simplejpeg),
    PILLOW: partial(data_loader, read=by_pillow),
    BARE: partial(in_threads, decode=by_simplejpeg),
    CONVERT: convert,
    CENTRE: partial(in_threads, decode=centre_by_pillow),
    FFCV: ffcv,
    "dali, JPEG": dali,
    "spdl, JPEG": spdl,
}
