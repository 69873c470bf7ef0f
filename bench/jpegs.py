"""The contenders of bench/run.py encoded: each decodes JPEG files, and yields shuffled batches of pixels.

All have the same images in the page cache, and a thread or process for each CPU. Images of 256 x 256 are taken whole,
of others parts as torchvision's RandomResizedCrop does (8 to 100 % of the area), resized to 224 x 224. FFCV, DALI and
timm resize by code of their own, Pillow by its own, all others by torch with antialiasing. Nothing is flipped or
normalised.
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
from peers import PEERS as PEER_NAMES
from peers import (
    Contender,
    Items,
    Task,
    convert_once,
    ffcv_loader,
    litdata_folder,
    loader,
    permutation,
    spdl_pipeline,
)
from PIL import Image, ImageOps

from fastgpu.images.crops import N_DRAWS, Box, random_box

WHOLE = (256, 256)
SIZE = (224, 224)
MIN_SCALE = 0.08
RATIO = (3 / 4, 4 / 3)


def files_of(task: Task) -> list[Path]:
    """The JPEG files of a task, beside its HDF5 file."""
    return sorted((task.folder / "source").rglob("*.jpg"))


def are_whole(task: Task) -> bool:
    """Whether the images of a task are taken whole."""
    with Image.open(files_of(task)[0]) as image:
        return image.size == WHOLE


def a_box(height: int, width: int) -> Box:
    """A random part of an image."""
    return random_box([random.random() for _ in range(N_DRAWS)], height, width, MIN_SCALE)


def by_simplejpeg(path: Path) -> torch.Tensor:
    """The pixels of a file."""
    return decoded_by_simplejpeg(path.read_bytes())


def decoded_by_simplejpeg(encoded: bytes) -> torch.Tensor:
    """Decoder and resize as a user of both libraries writes them."""
    import simplejpeg  # which a machine that runs bench/gpu.py may lack

    pixels = simplejpeg.decode_jpeg(encoded)
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
    return Contender([task.h5], lambda number: ((batch["images"],) for batch in ours.batches(pools, number)))


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


def batches_of(task: Task, *, read: Callable[[Path], torch.Tensor]) -> Items:
    """Batches of what `read` makes of the files of a task, each as a tuple."""
    paths = files_of(task)
    return Items(len(paths), lambda rows: (torch.stack([read(paths[row]) for row in rows]),))


def data_loader(task: Task, *, read: Callable[[Path], torch.Tensor], in_batches: bool = False) -> Contender:
    """torch's DataLoader over the files."""
    rows = partial(batches_of if in_batches else items_of, read=read)
    return loader(task, rows=rows, in_batches=in_batches)._replace(files=files_of(task))


def ffcv(task: Task, *, share_of_jpeg: float, order: str) -> Contender:
    """FFCV: RGBImageField, which encodes the pixels again in the quality of the files; a compiled decoder.

    share_of_jpeg: of images that are encoded; the others are stored as pixels. ffcv-imagenet encodes half of them.
    """
    import simplejpeg
    from ffcv.fields import RGBImageField
    from ffcv.fields.rgb_image import RandomResizedCropRGBImageDecoder, SimpleRGBImageDecoder
    from ffcv.transforms import ToTensor
    from ffcv.writer import DatasetWriter

    def write(target: Path) -> None:
        image = RGBImageField("proportion", jpeg_quality=92, compress_probability=share_of_jpeg)
        pixels = items_of(task, read=lambda path: simplejpeg.decode_jpeg(path.read_bytes()))
        DatasetWriter(str(target), {"image": image}, num_workers=task.n_workers).from_indexed_dataset(pixels)

    path = convert_once(task.folder / f"jpeg-{share_of_jpeg:g}.beton", write)
    parts = RandomResizedCropRGBImageDecoder(SIZE, (MIN_SCALE, 1), RATIO)
    decoder = SimpleRGBImageDecoder() if are_whole(task) else parts
    loader = ffcv_loader(task, path, {"image": [decoder, ToTensor()]}, order=order)
    return Contender([path], lambda number: loader)


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

    return Contender(files_of(task), epoch)


def decode_batch(paths: list[Path]) -> tuple[torch.Tensor]:
    """A batch of files, one after the other."""
    return (torch.stack([by_simplejpeg(path) for path in paths]),)


def spdl(task: Task) -> Contender:
    """SPDL: a PipelineBuilder of threads, each of which decodes a whole batch; simplejpeg.

    A stage that decodes file by file, and one that aggregates, reached a third to a half of this speed. SPDL's own
    decoder, which is FFmpeg's, takes more CPU time. The source never ends.
    """
    from spdl.pipeline import PipelineBuilder

    paths = files_of(task)

    def source() -> Iterator[list[Path]]:
        for number in count():
            for rows in permutation(len(paths), task.batch_size, number):
                if not threading.main_thread().is_alive():
                    return  # or SPDL's thread would keep the interpreter alive
                yield [paths[row] for row in rows]

    torch.set_num_threads(1)
    builder = PipelineBuilder().add_source(source()).pipe(decode_batch, concurrency=task.n_workers).add_sink(2)
    pipeline = spdl_pipeline(builder, task.n_workers)
    n_batches = len(paths) // task.batch_size
    return Contender(files_of(task), lambda number: (pipeline.get_item() for _ in range(n_batches)))


def grain(task: Task) -> Contender:
    """Grain: a random-access source of shuffled batches of files, each of which a thread decodes; simplejpeg."""
    from grain import MapDataset, ReadOptions

    torch.set_num_threads(1)
    paths = files_of(task)
    options = ReadOptions(num_threads=task.n_workers, prefetch_buffer_size=2 * task.n_workers)

    def epoch(number: int) -> Iterator[tuple[torch.Tensor]]:
        order = permutation(len(paths), task.batch_size, number)
        batches = MapDataset.source([[paths[row] for row in rows] for rows in order]).map(decode_batch)
        yield from batches.to_iter_dataset(options)

    return Contender(files_of(task), epoch)


def litdata(task: Task) -> Contender:
    """LitData: chunks of the encoded files, which worker processes decode; simplejpeg."""
    from litdata import StreamingDataLoader, StreamingDataset

    def write(target: Path) -> None:
        paths = files_of(task)
        litdata_folder(target, lambda row: paths[row].read_bytes(), len(paths), task.n_workers)

    folder = convert_once(task.folder / "litdata", write)
    rows = StreamingDataset(str(folder), shuffle=True, drop_last=True, batch_decode=0, transform=decoded_by_simplejpeg)
    options = {"num_workers": task.n_workers, "persistent_workers": True, "drop_last": True}
    loader = StreamingDataLoader(rows, batch_size=task.batch_size, **options)
    return Contender(sorted(folder.iterdir()), lambda number: ((batch,) for batch in loader))


def streaming(task: Task) -> Contender:
    """Streaming: MDS shards of the encoded files, which worker processes decode; simplejpeg."""
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    class Decoded(StreamingDataset):
        def __getitem__(self, row: int) -> tuple[torch.Tensor]:
            return (decoded_by_simplejpeg(super().__getitem__(row)["image"]),)

    def write(target: Path) -> None:
        with MDSWriter(out=str(target), columns={"image": "bytes"}) as writer:
            for path in files_of(task):
                writer.write({"image": path.read_bytes()})

    folder = convert_once(task.folder / "streaming", write)
    clean_stale_shared_memory()  # of a contender that was killed
    rows = Decoded(local=str(folder), shuffle=True, batch_size=task.batch_size)
    options = {"num_workers": task.n_workers, "persistent_workers": True, "drop_last": True}
    loader = DataLoader(rows, task.batch_size, **options)
    return Contender(sorted(folder.iterdir()), lambda number: loader)


def timm(task: Task) -> Contender:
    """timm's loader as its train.py makes it, up to the batches of uint8 that it normalises on the GPU; Pillow."""
    from timm.data import ImageDataset, create_loader

    size = WHOLE if are_whole(task) else SIZE
    options = {"no_aug": are_whole(task), "scale": (MIN_SCALE, 1), "ratio": RATIO, "hflip": 0, "color_jitter": None}
    loader = create_loader(
        ImageDataset(str(task.folder / "source")),
        (3, *size),
        task.batch_size,
        is_training=True,
        num_workers=task.n_workers,
        device=torch.device("cpu"),
        **options,
    )
    return Contender(files_of(task), lambda number: loader.loader)


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
PILLOW_BATCHES = "DataLoader of batches + Pillow"
SIMPLEJPEG_BATCHES = "DataLoader of batches + simplejpeg"
HALF_RAW = "ffcv, half JPEG"
PEERS = tuple(f"{peer}, JPEG" for peer in PEER_NAMES)
"""First words of the peers that read the same JPEG files."""
FFCV = "ffcv, JPEG, RANDOM"
CONVERT = "500x375: convert.py, centre"
CENTRE = "500x375: Pillow in bare threads, centre"
CONTENDERS: dict[str, Callable[[Task], Contender]] = {
    OURS: feed,
    "DataLoader + simplejpeg": partial(data_loader, read=by_simplejpeg),
    PILLOW: partial(data_loader, read=by_pillow),
    SIMPLEJPEG_BATCHES: partial(data_loader, read=by_simplejpeg, in_batches=True),
    PILLOW_BATCHES: partial(data_loader, read=by_pillow, in_batches=True),
    BARE: partial(in_threads, decode=by_simplejpeg),
    CONVERT: convert,
    CENTRE: partial(in_threads, decode=centre_by_pillow),
    FFCV: partial(ffcv, share_of_jpeg=1, order="RANDOM"),
    "ffcv, JPEG, QUASI_RANDOM": partial(ffcv, share_of_jpeg=1, order="QUASI_RANDOM"),
    HALF_RAW: partial(ffcv, share_of_jpeg=0.5, order="RANDOM"),
    "dali, JPEG": dali,
    "spdl, JPEG": spdl,
    "grain, JPEG": grain,
    "litdata, JPEG": litdata,
    "streaming, JPEG": streaming,
    "timm, JPEG": timm,
}
