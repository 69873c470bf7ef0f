"""HDF5 files, arrays or image files as rows, and the pools that the model takes them from."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import torch

from fastgpu.feed.prefetch import PrefetchLoader
from fastgpu.predict.model import Trained
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset, Out, Pool, PoolPlan, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import open_store


class ImageRows(Dataset):
    """Rows of one field, decoded in the reader threads as the training images were. Each image file is a block."""

    def __init__(self, name: str, field: Field, paths: Sequence[str], preprocessing: str | None):
        """paths: files, and folders of them. preprocessing: of the training images, as JSON. Raises UserError."""
        images = import_module("fastgpu.images.files")  # which a project without an image workload lacks
        files: list[Path] = []
        for path in map(Path, paths):
            files += [path / name for name in images.list_images(path)] if path.is_dir() else [path]
        if not files:
            raise UserError(f"there is no image file in {' and '.join(paths)}")
        prepared = images.read_preprocessing(preprocessing) if preprocessing else images.Preprocessing()
        self._read = partial(images.read_image, preprocessing=prepared, shape=field.shape)
        self.files = [*map(str, files)]
        self.name = "INPUT"
        self.fields = {name: field}
        self.attributes = {}
        self.block_rows = np.ones(len(files), np.int32)
        self.failed: dict[int, str] = {}
        """{row: why it cannot be read}, of the rows that were read."""

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Decode images to their places. Thread-safe. The row of a broken image is undefined, and noted in `failed`."""
        (images,) = out.values()
        assert isinstance(images, np.ndarray)
        for row, (place,) in reads.ranges():
            try:
                images[place] = self._read(Path(self.files[row]))
            except Exception as error:  # a decoder may raise anything for damaged bytes
                self.failed[row] = f"{self.files[row]} cannot be read: {error}"


def open_inputs(paths: Sequence[str], trained: Trained, *, ids: Sequence[str] = (), labels: bool = False) -> Dataset:
    """Rows with the inputs of the model and the fields `ids`, or with labels: all fields that it was trained on.

    These should have the same shape and type, but single numbers any type, and labels number the same classes. paths:
    see INPUT in predict.py. Raises UserError if they do not fit.
    """
    datasets = {name: field["dataset"] for name, field in trained.card["fields"].items()}
    names = list(datasets) if labels else [*trained.workload.inputs, *ids]
    fields = {name: trained.rows.fields[name] for name in names if name in datasets}
    preprocessing = trained.rows.attributes.get("preprocessing")
    source: Dataset
    if "::" in paths[0] or paths[0].endswith((".h5", ".hdf5")):
        source = open_store("INPUT", paths, {name: datasets.get(name, name) for name in names})
    elif len(paths) == 1 and paths[0].endswith((".npy", ".npz")):
        source = _open_arrays(paths[0], names)
    elif len(names) == 1 and fields[names[0]].dtype == np.uint8 and len(fields[names[0]].shape) > 1:
        source = ImageRows(names[0], fields[names[0]], paths, preprocessing)
    else:
        raise UserError(f"{paths[0]} is not an HDF5 file, nor a single NumPy file, with {' and '.join(names)}")
    for name, field in fields.items():
        if source.fields[name].codec and len(field.shape) == 3:
            share = json.loads(preprocessing or "{}").get("centre_share")
            source = import_module("fastgpu.images.column").decoded(source, field.shape[1:], centre_share=share)
        if (field.shape or field.is_ragged) and str(source.fields[name]) != str(field):
            raise UserError(f"{source.name}: {name} is {source.fields[name]}; the model was trained on {field}")
    check_meaning("INPUT", trained.rows, source, labels=labels)
    if labels:
        type(trained.workload)(trained.workload.options, trained.rows, source)  # which checks them as in training
    for name in ids:
        if source.fields[name].is_ragged:
            raise UserError(f"{source.name}: {name} has any number of values in a row; --id takes a field that has one")
    return source


def _open_arrays(path: str, names: Sequence[str]) -> ArrayDataset:
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {names[0]: content} if isinstance(content, np.ndarray) else content
        columns = {name: np.asarray(arrays[name]) for name in names}  # a damaged member is bytes
        lengths = [len(column) for column in columns.values()]
        if len({*lengths}) > 1 or 0 in lengths:
            raise ValueError(f"they have {lengths} rows")
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{path} should hold NumPy arrays {' and '.join(names)} of equal length: {error}") from None
    return ArrayDataset(path, columns)


@contextmanager
def open_pools(source: Dataset, batch_size: int, device: torch.device) -> Iterator[Iterator[Pool]]:
    """All rows once, in their order, read ahead by threads, as pools of whole batches on the device."""
    pool_batches = max(1, (64 << 20) // (source.row_bytes * batch_size))  # 64 MiB; three pools are in memory
    order = BlockSampler(source.block_rows, batch_size, pool_batches=pool_batches, seed=None, drop_last=False)
    order.n_epochs = 1
    with closing(PrefetchLoader(source, order, device, available_cpus())) as feed:
        yield feed.pools(0)
