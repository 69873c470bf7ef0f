"""A map-style `torch.utils.data.Dataset` as a source of pools: its items are made by worker processes.

The rows go the same way as those of a file: a batch from a worker is copied to the staging memory of a pool, and the
pool moves to the device as a whole. The workers run on from epoch to epoch, so no epoch begins with idle ones.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset

from fastgpu.dataset.items import NO_ARRAY, Items, to_array, type_of
from fastgpu.dataset.workers import WorkerPool
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import BlockRead, PoolReader, Source
from fastgpu.rows.order import BlockSampler


class DatasetSource(Source):
    """The rows of a map-style Dataset, as blocks of one row.

    Its items are mappings, or sequences in the order of `fields`, of arrays, tensors or numbers with a fixed shape. The
    attribute `class_names` (or torchvision's `classes`) is used if the Dataset has it, and so are arrays with the name
    of a field (or `targets`) if they have the values of the items (see `column`).
    """

    def __init__(self, name: str, dataset: Dataset, fields: Mapping[str, str]):
        self.name = name
        self.items = Items(name, dataset, fields)
        try:
            n_rows = len(dataset)  # type: ignore[arg-type]
        except TypeError:
            raise UserError(f"data.dataset: {name} has no length; a map-style Dataset with __len__ is needed") from None
        if not n_rows:
            raise UserError(f"data.dataset: {name} has no rows")
        self.block_rows = np.ones(n_rows, np.int32)
        self.fields = self.items.types = {}
        self._first_row = self.items.read(0)
        for field, value in self._first_row.items():
            found = type_of(value)
            if isinstance(found, str):
                raise UserError(
                    f"data.dataset: {name} has {field} as {found}; use numbers, arrays or tensors of the CPU"
                )
            self.fields[field] = found
        class_names = getattr(dataset, "class_names", getattr(dataset, "classes", None))
        self.attributes: dict[str, Any] = {"class_names": list(class_names)} if class_names else {}

    def __len__(self) -> int:
        return len(self.block_rows)

    def column(self, name: str) -> np.ndarray:
        """One field of all rows, if the Dataset has it as an attribute. Raises KeyError if it has not.

        An attribute counts only if it has numbers of the shape of the field, and what the item of the first row has:
        others are file names, names of classes, or classes that the items number in another way.
        """
        for attribute in (name, "targets"):
            with suppress(*NO_ARRAY):
                values = np.asarray(getattr(self.items.dataset, attribute, None))
                if self._agrees(values, name):
                    return values[self.items.row_ids]
        raise KeyError(name)

    def _agrees(self, values: np.ndarray, name: str) -> bool:
        """Whether an array can be a field of all rows, as far as the first row tells."""
        field = self.fields[name]
        is_float = field.dtype.kind == "f"
        n_rows = len(self.items.dataset)  # type: ignore[arg-type]
        if values.shape != (n_rows, *field.shape) or values.dtype.kind not in ("buif" if is_float else "bui"):
            return False
        first = values[0].astype(field.dtype) if is_float else values[0]
        return np.array_equal(first, to_array(self._first_row[name]), equal_nan=True)

    def read(self, reads: Iterable[BlockRead], out: Mapping[str, Any]) -> None:
        """Rows as they are in epoch 0 of run.seed=0, read in this process. Training reads through `open_reader`."""
        for row, _, places in reads:
            for place in places:  # one, or none
                self.items.fill({name: out[name][place:] for name in self.fields}, [row])

    def take(self, name: str, row_ids: np.ndarray) -> "DatasetSource":
        """Some rows of this source: (n,) row ids. Each gives the same items as before."""
        part = copy(self)
        part.name = name
        part.items = copy(self.items)
        part.items.row_ids = row_ids
        part.block_rows = self.block_rows[row_ids]
        return part

    def open_reader(self, order: BlockSampler, n_readers: int) -> PoolReader:
        """A pool of `n_readers` worker processes; 0: read in this process."""
        return WorkerPool(self.items, order, n_readers)


def open_dataset(key: str, path: str | Sequence[str], fields: Mapping[str, str], *, factory: str) -> DatasetSource:
    """Call `factory` ("package.module:Class") with `path`. Raises UserError if there is no such class.

    key: the config key that holds `path`, for messages.
    """
    module, _, name = factory.partition(":")
    sys.path.insert(0, str(Path.cwd()))  # torchrun puts only the folder of the script on sys.path
    try:
        make = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise UserError(f"data.dataset is {factory}: {error}; name a class as package.module:Class") from None
    finally:
        sys.path.pop(0)
    dataset = make(path)
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Dataset):
        raise UserError(
            f"data.dataset is {factory}, which is not a map-style Dataset; rows need numbers to be shuffled"
        )
    return DatasetSource(f"{name}({path!r}) of {key}", dataset, fields)
