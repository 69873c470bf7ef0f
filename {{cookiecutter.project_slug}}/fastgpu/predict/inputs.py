"""HDF5 files, arrays or image files as rows, and the pools that the model takes them from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.predict.model import training_rows
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset, Out, Pool, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import open_store

POOL_BYTES = 64 << 20
"""Size of a pool. Three of them are in memory."""


class ImageRows(Dataset):
    """Rows of one field, decoded in the reader threads as the training images were. Each image file is a block."""

    def __init__(self, name: str, field: Field, paths: Sequence[str], preprocessing: str | None):
        """paths: files, and folders of them. preprocessing: of the training images, as JSON."""
        images = import_module("fastgpu.images.files")  # which a project without an image workload lacks
        self.files: list[Path] = []
        for path in map(Path, paths):
            self.files += [path / name for name in images.list_images(path)] if path.is_dir() else [path]
        prepared = images.read_preprocessing(preprocessing) if preprocessing else images.Preprocessing()
        self._read = partial(images.read_image, preprocessing=prepared, shape=field.shape)
        self.name = "INPUT"
        self.fields = {name: field}
        self.attributes = {}
        self.block_rows = np.ones(len(self.files), np.int32)
        self.failed: dict[int, str] = {}
        """{row: why it cannot be read}, of the rows that were read."""

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Decode images to their places. Thread-safe. The row of a broken image is undefined, and noted in `failed`."""
        (images,) = out.values()
        assert isinstance(images, np.ndarray)
        for row, (place,) in reads.ranges():
            try:
                images[place] = self._read(self.files[row])
            except Exception as error:  # a decoder may raise anything for damaged bytes
                self.failed[row] = f"{self.files[row]} cannot be read: {error}"


def open_inputs(
    paths: Sequence[str], card: Mapping[str, Any], names: Sequence[str], *, labels: bool = False
) -> Dataset:
    """Rows with the fields `names`. Those that the model was trained on are of the same shape and type, but single
    numbers, such as labels, of any type: the workload checks them.

    paths: HDF5 files (`file.h5::/group` and globs, too), one .npy or .npz file, or image files and folders of them; the
    first one says which. card: the content of model.json. labels: whether labels are read, which should number the same
    classes. Raises UserError if the inputs do not fit.
    """
    trained_on = training_rows(card)
    fields = {name: trained_on.fields[name] for name in names if name in trained_on.fields}
    preprocessing = card["attributes"].get("preprocessing")
    source: Dataset
    if "::" in paths[0] or paths[0].endswith((".h5", ".hdf5")):
        source = open_store("INPUT", paths, {name: card["fields"].get(name, {}).get("dataset", name) for name in names})
    elif len(paths) == 1 and paths[0].endswith((".npy", ".npz")):
        source = _open_arrays(paths[0], names)
    elif len(names) == 1 and fields[names[0]].dtype == np.uint8 and len(fields[names[0]].shape) > 1:
        source = ImageRows(names[0], fields[names[0]], paths, preprocessing)
    else:
        raise UserError(f"{paths[0]} is not an HDF5 file, nor a single NumPy file, with {' and '.join(names)}")
    for name, field in fields.items():
        if source.fields[name].codec and len(field.shape) == 3:
            share = json.loads(preprocessing or "{}").get("centre_share")
            decoded = import_module("fastgpu.images.column").decoded
            source = decoded(source, field.shape[1:], centre_share=share)
        if (field.shape or field.is_ragged) and str(source.fields[name]) != str(field):
            raise UserError(f"{source.name}: {name} is {source.fields[name]}; the model was trained on {field}")
    check_meaning("INPUT", trained_on, source, labels=labels)
    return source


def _open_arrays(path: str, names: Sequence[str]) -> ArrayDataset:
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        if isinstance(content, np.ndarray):
            content = {names[0]: content}
        columns = {name: np.asarray(content[name]) for name in names}  # a damaged member is bytes
        (n_rows,) = {len(column) for column in columns.values()}
        assert n_rows, "they have no rows"
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path} should hold NumPy arrays {' and '.join(names)} of equal length: {error}") from None
    return ArrayDataset(path, columns)


@contextmanager
def open_pools(source: Dataset, batch_size: int, device: torch.device) -> Iterator[Iterator[Pool]]:
    """All rows once, in their order, read ahead by threads, as pools of whole batches on the device."""
    pool_batches = max(1, POOL_BYTES // (source.row_bytes * batch_size))
    order = BlockSampler(source.block_rows, batch_size, pool_batches=pool_batches, seed=None, drop_last=False)
    order.n_epochs = 1
    with closing(PrefetchLoader(source, order, device, available_cpus())) as feed:
        yield feed.pools(0)
