"""HDF5 files, arrays or image files as rows, and the pools that the model takes them from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastgpu.feed.sizes import choose_readers
from fastgpu.feed.sources import decode_images
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset, Out, Pool, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.store import open_store

POOL_BYTES = 64 << 20
"""Size of a pool. Three of them are in memory."""


class DescribedSource(Dataset):
    """The rows that a model was trained on, by their fields and attributes: there are no rows."""

    def __init__(self, description: Mapping[str, Any], name: str = "model.json"):
        self.name = name
        self.attributes = description["attributes"]
        self.fields = {}
        for name, field in description["fields"].items():
            mean_values = 0.0 if field["is_ragged"] else None
            self.fields[name] = Field(np.dtype(field["dtype"]), tuple(field["shape"]), mean_values, field["n_items"])
        self.lengths = {name: np.empty(0, np.int32) for name, field in self.fields.items() if field.is_ragged}
        self.block_rows = np.empty(0, np.int32)


class ImageRows(Dataset):
    """Rows of one field, decoded in the reader threads as the training images were. Each image file is a block."""

    def __init__(self, name: str, field: Field, files: Any):
        """files: an `ImageFiles` of fastgpu/images/files.py."""
        self.name = "INPUT"
        self.fields = {name: field}
        self.attributes = {}
        self.block_rows = np.ones(len(files), np.int32)
        self.files = files
        self.failed: dict[int, str] = {}
        """{row: why it cannot be read}, of the rows that were read."""

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Decode images to their places. Thread-safe. The row of a broken image is undefined, and noted in `failed`."""
        (images,) = out.values()
        assert isinstance(images, np.ndarray)
        for row, (place,) in reads.ranges():
            try:
                images[place] = self.files.read(row)
            except Exception as error:  # a decoder may raise anything for damaged bytes
                self.failed[row] = f"{self.files.paths[row]} cannot be read: {error}"


def open_inputs(paths: Sequence[str], card: Mapping[str, Any], names: Sequence[str]) -> Dataset:
    """Rows with the fields `names`. Those that the model was trained on are of the same shape and type.

    paths: HDF5 files (`file.h5::/group` and globs, too), one .npy or .npz file, or image files and folders of them; the
    first one says which. card: the content of model.json. Raises UserError if the inputs do not fit.
    """
    trained_on = DescribedSource(card).fields
    fields = {name: trained_on[name] for name in names if name in trained_on}
    source: Dataset
    if paths[0].endswith((".npy", ".npz")):
        source = _open_arrays(paths, names)
    elif "::" in paths[0] or paths[0].endswith((".h5", ".hdf5")):
        datasets = {name: card["fields"][name]["dataset"] if name in fields else name for name in names}
        source = open_store("INPUT", paths, datasets)
    else:
        source = _open_images(paths, card, fields)
        if other := [name for name in names if name not in source.fields]:
            raise UserError(f"--id is {other[0]}, but INPUT are image files, which have no such field; leave it out")
    for name, field in fields.items():
        if source.fields[name].codec and len(field.shape) == 3:
            preprocessing = json.loads(card["attributes"].get("preprocessing", "{}"))
            source = decode_images(source, field.shape[1:], centre_share=preprocessing.get("centre_share"))
        if not _fits(source.fields[name], field):
            cure = "; its columns should be those of item_ids in the training file" if field.is_ragged else ""
            raise UserError(f"{source.name}: {name} is {source.fields[name]}; the model was trained on {field}{cure}")
    return source


def _fits(found: Field, field: Field) -> bool:
    """Whether a field is the one that the model was trained on. Single whole numbers (labels) may have another size."""
    are_numbers = not (found.is_ragged or field.is_ragged or found.shape or field.shape)
    are_whole = {found.dtype.kind, field.dtype.kind} <= {"u", "i"}
    return found.signature == field.signature or (are_numbers and are_whole)


def _open_images(paths: Sequence[str], card: Mapping[str, Any], fields: Mapping[str, Field]) -> ImageRows:
    name, field = next(iter(fields.items()))
    is_image = field.dtype == np.uint8 and len(field.shape) in (2, 3) and field.shape[:-2] in ((), (1,), (3,))
    room = find_spec("fastgpu.images")  # which a project without an image workload lacks
    if len(fields) > 1 or not is_image or not (room and room.origin):
        taken = ", ".join(f"{name}, {field}" for name, field in fields.items())
        raise UserError(f"{paths[0]} is not an HDF5 or NumPy file; the model takes {taken}")
    images = import_module("fastgpu.images.files")
    preprocessing = card["attributes"].get("preprocessing")
    prepared = images.read_preprocessing(preprocessing) if preprocessing else images.Preprocessing()
    files: list[Path] = []
    for path in map(Path, paths):
        found = [path / name for name in images.list_images(path)] if path.is_dir() else [path]
        if not found:
            raise UserError(f"{path} has no images")
        files += found
    return ImageRows(name, field, images.ImageFiles(files, prepared, field.shape))


def _open_arrays(paths: Sequence[str], names: Sequence[str]) -> ArrayDataset:
    if len(paths) > 1:
        raise UserError(f"INPUT is {len(paths)} array files; give one, or an HDF5 file by `python convert.py arrays`")
    try:
        content = np.load(paths[0], mmap_mode="r", allow_pickle=False)
        arrays = {names[0]: content} if isinstance(content, np.ndarray) else dict(content)
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{paths[0]} is not a file of NumPy arrays of numbers: {error}") from None
    if missing := [name for name in names if name not in arrays]:
        raise UserError(f"{paths[0]}: {missing[0]} is missing; it has {', '.join(arrays)}")
    columns = {name: arrays[name] for name in names}
    lengths = {name: len(column) if column.ndim else 0 for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise UserError(f"{paths[0]} has {lengths} rows; each field should have as many, and at least one")
    return ArrayDataset(paths[0], columns)


@contextmanager
def open_pools(source: Dataset, batch_size: int, device: torch.device) -> Iterator[Iterator[Pool]]:
    """All rows once, in their order, read ahead by threads, as pools of whole batches on the device."""
    pool_batches = max(1, POOL_BYTES // (source.row_bytes * batch_size))
    order = BlockSampler(source.block_rows, batch_size, pool_batches=pool_batches, seed=None, drop_last=False)
    order.n_epochs = 1
    with closing(make_feed(source, order, Placement("disk", device, choose_readers("auto", 1)))) as feed:
        yield feed.pools(0)
