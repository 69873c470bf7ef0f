"""Rows to predict: images, HDF5 files and NumPy files, read ahead as batches."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from fastgpu.feed import PrefetchLoader
from fastgpu.feed.sources import image_codecs
from fastgpu.predict.model import Trained
from fastgpu.process.config import LoaderConfig
from fastgpu.process.launch import UserError, without_secrets
from fastgpu.process.machine import available_cpus
from fastgpu.rows import BlockSampler
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import OFFSET_DTYPE, Field, RaggedArray, Rows
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.hdf5 import expand
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.part import one_recording
from fastgpu.storage.store import HDF5Dataset, open_store
from fastgpu.storage.windows import WindowDataset, open_windows


class ImageRows(Dataset):
    """Rows of one field, decoded in the reader threads as the training images were. Each image file is a block."""

    def __init__(self, name: str, field: Field, paths: Sequence[str], preprocessing: str | None):
        """paths: files, and folders of them. preprocessing: of the training images, as JSON. Raises UserError."""
        images = import_module("fastgpu.imagefiles")  # which a project without an image workload lacks
        self.files: list[Path] = []
        for path in map(Path, paths):
            self.files += [path / name for name in images.list_images(path)] if path.is_dir() else [path]
        if not self.files:
            raise UserError(f"there is no image file in {' and '.join(paths)}")
        prepared = images.read_preprocessing(preprocessing)
        self._read = lambda path: images.read_image(path, prepared, field.shape)
        self.name = "INPUT"
        self.fields = {name: field}
        self.attributes = {}
        self.block_rows = np.ones(len(self.files), np.int32)
        self.failed: dict[int, str] = {}  # {row: why it cannot be read}

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Decode images to their places. Thread-safe. The row of a broken image is undefined, and noted in `failed`."""
        images: Any = next(iter(out.values()))
        for row, (place,) in reads.ranges():
            try:
                images[place] = self._read(self.files[row])
            except Exception as error:  # a decoder may raise anything for damaged bytes
                self.failed[row] = f"{self.files[row]} cannot be read: {error}"


class UserRows(ArrayDataset):
    """The items of users in a CSV file, in the order of time."""

    def __init__(self, path: str, name: str, trained_on: Dataset):
        """name: of the field with the items. Raises UserError for a file that does not fit."""
        users: Any = import_module("fastgpu.predict.users")  # which a project without users and items lacks
        field = trained_on.fields[name]
        items = users.read_users(path, field.n_items, trained_on.attributes)
        liked, seen = ([each[number] for each in items.values()] for number in (0, 1))
        super().__init__(path, {name: _to_ragged(liked)}, fields={name: field})
        self.user_ids = np.array([*items], object)
        self._seen = _to_ragged(seen)

    def hide_seen(self, values: Mapping[str, Tensor], rows: range) -> dict[str, Tensor]:
        """The values that `predict` of a workload gives for some rows, with the score -inf for all items that the file
        has of a user. scores: (B, I). Raises UserError if there are no scores."""
        if "scores" not in values:
            raise UserError(f"{self.name} is a table of users, but `predict` of this workload gives no scores of items")
        offsets = self._seen.offsets[rows.start : rows.stop + 1]
        places = np.repeat(np.arange(len(rows)), np.diff(offsets)), self._seen.values[offsets[0] : offsets[-1]]
        scores = values["scores"].clone()
        scores[places] = -torch.inf
        return {**values, "scores": scores}


def _to_ragged(rows: Sequence[Sequence[int]]) -> RaggedArray:
    """Rows of item numbers."""
    offsets = np.cumsum([0, *map(len, rows)])
    return RaggedArray(np.fromiter(chain.from_iterable(rows), OFFSET_DTYPE, offsets[-1]), offsets)


def open_inputs(paths: Sequence[str], trained: Trained, *, ids: Sequence[str] = (), labels: bool = False) -> Dataset:
    """Rows with the inputs of the model and the fields `ids`; or with labels: all fields that it was trained on.

    paths: see INPUT in predict.py. Raises UserError if they do not fit; single numbers may have any type.
    """
    stored = {name: field["dataset"] for name, field in trained.card["fields"].items()}
    inputs = trained.workload.inputs
    names = list(stored) if labels else [*inputs, *ids]
    fields = {name: trained.rows.fields[name] for name in names if name in stored}
    preprocessing = trained.rows.attributes.get("preprocessing")
    length, stride = (trained.card.get("config", {}).get(f"data.{key}", 0) for key in ("window", "stride"))
    source: Dataset
    if len(paths) == 1 and paths[0].endswith((".npy", ".npz")) and "::" not in paths[0]:
        source = arrays = _open_arrays(paths[0], names)
        if length:
            source = WindowDataset(arrays, one_recording(len(arrays)), length, stride or length)
    elif paths[0].endswith(".csv") and len(inputs) == 1 and trained.rows.fields[inputs[0]].n_items:
        if len(paths) > 1 or labels or ids:
            raise UserError(f"{paths[0]} is a table of users: give it alone, without --id and --evaluate")
        source = UserRows(paths[0], inputs[0], trained.rows)
    elif "::" in paths[0] or paths[0].endswith((".h5", ".hdf5")) or _is_hdf5(expand("INPUT", paths[0])[0][0]):
        sizes = {name: field.shape[1:] for name, field in fields.items() if len(field.shape) == 3}
        codecs = image_codecs(sizes, centre_share=_centre_share(preprocessing))
        named = {name: stored.get(name, name) for name in names}
        if length:
            source = open_windows("INPUT", paths, named, length, stride=stride)
        else:
            source = open_store("INPUT", paths, named, codecs)
    elif len(names) == 1 and fields[names[0]].dtype == np.uint8 and len(fields[names[0]].shape) > 1 and not labels:
        source = ImageRows(names[0], fields[names[0]], paths, preprocessing)
    else:
        cure = "python convert.py arrays or dataset writes one"
        raise UserError(f"{paths[0]} is not an HDF5 file, nor a single NumPy file, with {' and '.join(names)}; {cure}")
    for name, field in fields.items():
        if (field.shape or field.is_ragged) and not source.fields[name].fits(field):
            raise UserError(f"{source.name}: {name} is {source.fields[name]}; the model was trained on {field}")
    check_meaning("INPUT", trained.rows, source, labels=labels)
    if labels:
        type(trained.workload)(trained.workload.options, trained.rows, source)  # checks the labels as in training
    if ragged := [name for name in ids if source.fields[name].is_ragged]:
        raise UserError(f"{source.name}: {ragged[0]} has any number of values in a row; --id takes fields of one")
    return source


def places_of(rows: Dataset) -> dict[str, np.ndarray]:
    """{column: (rows,)} that name each row: its `user`, in a table of users. Else its `file`, if there are several; the
    `row` in that file, or for a window its `first_step`; and the `source` that convert.py noted, if there is one."""
    if isinstance(rows, UserRows):
        return {"user": rows.user_ids}
    if isinstance(rows, ImageRows):
        return {"file": np.array(list(map(str, rows.files)), object)}
    row_ids, column = np.arange(len(rows)), "row"
    if isinstance(rows, WindowDataset):
        row_ids, column = rows.first_steps(), "first_step"
    stored = rows.whole or rows
    if not isinstance(stored, HDF5Dataset):
        return {column: row_ids}
    files = ["::".join(file) if file[1] != "/" else file[0] for file in stored.files]
    names = np.array(list(map(without_secrets, files)), object)
    numbers = np.searchsorted(stored.first_rows, row_ids, "right") - 1
    places = {column: row_ids - np.array(stored.first_rows)[numbers]}
    if len(names) > 1:
        places = {"file": names[numbers], **places}
    if any(origins := stored.origins(row_ids)):
        places["source"] = np.array(origins, object)
    return places


def _is_hdf5(path: str) -> bool:
    """Whether a file with any suffix, such as rows.mat, is HDF5. Only regular files are opened."""
    return Path(path).is_file() and h5py.is_hdf5(path)


def _centre_share(preprocessing: str | None) -> float | None:
    """The `centre_share` of `ImageCodec` in validation. None: the model was trained on pixels."""
    try:
        return json.loads(preprocessing or "")["centre_share"]
    except (ValueError, TypeError, KeyError):
        return None


def _open_arrays(path: str, names: Sequence[str]) -> ArrayDataset:
    try:
        content = np.load(path, mmap_mode="r", allow_pickle=False)
        arrays = {names[0]: content} if isinstance(content, np.ndarray) else content
        columns = {name: np.asarray(arrays[name]) for name in names}  # a damaged member is bytes
        lengths = [len(column) for column in columns.values()]
        if len({*lengths}) > 1 or 0 in lengths:
            raise ValueError(f"they have {lengths} rows")
    except Exception as error:  # a damaged file can raise anything
        cure = "python convert.py arrays makes rows of other files, such as sparse matrices"
        text = f"{path} should hold NumPy arrays {' and '.join(names)} of equal length: {error}; {cure}"
        raise UserError(text) from None
    return ArrayDataset(path, columns)


@contextmanager
def open_batches(source: Dataset, batch_size: int, device: torch.device) -> Iterator[Iterator[Rows]]:
    """Batches on the device of all rows, once and in order. Threads read ahead; a terminal shows a progress bar."""
    pool_batches = max(1, (64 << 20) // (source.row_bytes * batch_size))  # 64 MiB; three pools are in memory
    sampler = BlockSampler(source, batch_size, pool_batches=pool_batches, seed=None)
    loader = LoaderConfig(num_readers=available_cpus())
    with closing(PrefetchLoader(source, sampler, device, loader, n_epochs=1)) as feed:
        yield iter(tqdm(feed.batches(0), total=ceil(len(source) / batch_size), unit=" batches", disable=None))
