"""A map-style `torch.utils.data.Dataset` as a source of rows, read by worker processes.

A reader thread asks an idle worker for about 4 MiB of rows, takes the rows out of shared memory, and copies them to
their places in a pool, which moves to the device as a whole. Each worker has two such threads: while one thread copies,
the worker reads for the other.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from copy import copy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from inspect import isclass, isfunction, signature
from pathlib import Path
from typing import Any, get_origin, get_type_hints

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset
from torch.utils.data._utils.worker import WorkerInfo

from fastgpu.dataset.draws import read_items, seeded
from fastgpu.dataset.items import NO_ARRAY, Columns, describe_value, field_of, to_array, to_column
from fastgpu.dataset.workers import SLOW_S, Workers, describe_error
from fastgpu.process.launch import UserError, read_launch
from fastgpu.process.project import project_folder
from fastgpu.process.seeds import make_seed
from fastgpu.rows.classes import read_classes
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged, RaggedArray, Rows

ASK_BYTES = 4 << 20
"""Bytes of a request to a worker."""
ASKS_PER_POOL = 64
"""A request is at most 1/64 of a pool, so that every worker has work, but at least one batch."""
N_SAMPLES = 8
"""Number of items that are compared to find out which fields are ragged."""
MAX_ROWS = 2**31 - 1
"""Maximum number of rows: the numbers of blocks have 32 bits, and here each row is a block."""


class ItemSource(Dataset):
    """Rows that are read one at a time: each block has one row, and the length of a row is known after it was read."""

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Columns:
        """{field: (n, *shape), or ragged} of these rows, (n,), in their order. Used instead of `read`.

        seed, epoch, repeats: determine the random numbers. repeats: (n,) earlier occurrences of each row in the epoch.
        """
        raise NotImplementedError


class ItemDataset(ItemSource):
    """The rows of a map-style Dataset, as blocks of one row.

    Its items are mappings, or sequences in the order of `names`, of arrays, tensors or numbers. A field is ragged if
    its values differ in their first dimension. The attributes `class_names` (or torchvision's `classes`) and
    `n_classes` of the Dataset are used, and arrays with the name of a field (or `targets`) if they have the values of
    the items.
    """

    def __init__(
        self, name: str, dataset: TorchDataset, names: Mapping[str, str], *, seed: int = 0, workers_key: str = ""
    ):
        """names: {field: its key in the items}. seed: of the run. Raises UserError if the items cannot be rows.

        workers_key: the setting of the number of workers, for messages. A worker reads the first items, so that files
        which they open are not shared by all processes. Empty: this process reads the first items.
        """
        self.name = name
        self._seed = seed
        self._workers_key = workers_key or "loader.num_workers"
        self.dataset = dataset
        self._names = names
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise UserError(f"data.dataset: {name} is no map-style Dataset; rows need a length and numbers")
        n_rows = len(dataset)
        if not n_rows:
            raise UserError(f"data.dataset: {name} is empty; is this what data.train or data.val should name?")
        if n_rows > MAX_ROWS:
            raise UserError(f"data.dataset: {name} has {n_rows:,} rows; use at most {MAX_ROWS:,}")
        self.block_rows = np.ones(n_rows, np.int32)
        self.attributes = read_classes(f"data.dataset: {name}", dataset)
        self._workers: Workers | None = None
        samples = np.linspace(0, n_rows - 1, min(N_SAMPLES, n_rows)).astype(int)
        self.drawn: set[str]
        """The generators from which the first items draw random numbers."""
        with closing(self._start_workers(self._read_samples, 1 if workers_key else 0, SLOW_S)) as workers:
            arrays, self.drawn = workers.call(samples) if workers_key else self._read_samples(samples)
        self._seeded = {*self.drawn, "torch"}  # an item may call torch.initial_seed(), which draws nothing
        self._first = {field: each[0] for field, each in arrays.items()}
        """The item of row 0."""
        ragged = getattr(dataset, "ragged", ())
        self.fields = {field: field_of(each, is_ragged=field in ragged) for field, each in arrays.items()}

    def _rows(self, row_ids: np.ndarray) -> Rows:
        columns: dict[str, Tensor | Ragged] = {}
        for name, each in self.read_rows(row_ids, 0, 0, np.zeros_like(row_ids)).items():
            if isinstance(each, RaggedArray):
                columns[name] = Ragged.of(np.split(each.values, each.offsets[1:-1]))
            else:
                columns[name] = torch.from_numpy(each)
        return Rows(columns)

    def _read_samples(self, rows: np.ndarray) -> tuple[dict[str, list[np.ndarray]], set[str]]:
        """{field: arrays of these rows, without values that are no arrays}, and the generators that they draw from."""
        drawn: set[str] = set()
        samples = {}
        with seeded(self._seed):
            columns = self._values([(row,) for row in rows.tolist()], drawn)
        for field, values in zip(self._names, columns, strict=True):
            if to_array(values[0]) is None:
                found = describe_value(values[0])
                cure = "use numbers, or arrays and dense tensors of numbers on the CPU"
                raise UserError(f"data.dataset: {self.name} has {field} as {found}; {cure}")
            samples[field] = [array for value in values if (array := to_array(value)) is not None]
        return samples, drawn

    def _item(self, row: int) -> Any:
        try:
            return self.dataset[row]
        except Exception as error:
            error.add_note(f"in row {row} of {self.name}")
            raise

    def _values(self, keys: Sequence[tuple[int, ...]], drawn: set[str]) -> list[Sequence[Any]]:
        """For each field, the values of these rows. See `read_items`."""
        items = read_items(self._item, keys, drawn)
        if {*map(type, items)} == {dict}:  # most Datasets
            with suppress(KeyError):  # reported below
                return [[item[name] for item in items] for name in self._names.values()]
        return [*zip(*map(self._in_order, items), strict=True)]

    def _in_order(self, item: Any) -> Sequence[Any]:
        """The values of an item, in the order of the fields."""
        names = self._names.values()
        values = item if isinstance(item, list | tuple) else [item]  # a tensor is one value
        if isinstance(item, Mapping):
            values = [item[name] for name in names if name in item]
        if len(values) == len(names):
            return values
        found, cure = f"{len(values)} values", "name each of them, in their order"
        if isinstance(item, Mapping):
            found, cure = f"the keys {', '.join(map(str, item))}", "name keys that they have"
        raise UserError(
            f"data.dataset: the items of {self.name} have {found}; data.fields (--fields of convert.py) asks for "
            f"{', '.join(names)}: {cure}"
        )

    def with_workers(self, n_workers: int, timeout_s: float) -> "ItemDataset":
        """The same rows, read by worker processes until `close`. Copies of the result share the workers."""
        other = copy(self)
        other._workers = self._start_workers(self._read_here, n_workers, timeout_s)
        return other

    def _start_workers(self, answer: Callable[..., object], n_workers: int, timeout_s: float) -> Workers:
        """Processes that call `answer`."""
        rank = read_launch().rank
        infos = [
            WorkerInfo(id=n, num_workers=n_workers, seed=make_seed(self._seed, rank, n), dataset=self.dataset)
            for n in range(n_workers)
        ]
        return Workers(self.name, answer, infos, timeout_s, key=self._workers_key)

    @property
    def n_workers(self) -> int:
        """Number of worker processes that read. 0: rows are read in this process."""
        return len(self._workers.processes) if self._workers else 0

    def close(self) -> None:
        """End the workers, also for copies of this source."""
        if self._workers:
            self._workers.close()

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Columns:
        """See `ItemSource` and `to_column`. With workers, an idle worker reads, and any thread may call this.

        The random numbers of an item follow from its row, seed, epoch and repeat. The process that reads it, and the
        other rows of the request, have no influence. Raises UserError if a worker died, or rows differ in type or
        shape.
        """
        if self._workers:
            columns: Columns = self._workers.call(rows, seed, epoch, repeats)
            return columns
        with seeded(seed):  # the training loop may use the generators, too
            return self._read_here(rows, seed, epoch, repeats)

    def _read_here(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Columns:
        """`read_rows` without workers."""
        keys = [(row, repeat, seed, epoch) for row, repeat in zip(rows.tolist(), repeats.tolist(), strict=True)]
        columns = zip(self.fields.items(), self._values(keys, self._seeded), strict=True)
        return {name: to_column(name, field, values, rows, source=self.name) for (name, field), values in columns}

    def stored_column(self, name: str) -> np.ndarray | None:
        """One field of all rows, from an attribute of the Dataset that begins with the value of row 0. Other attributes
        may be file names, or classes with other numbers than in the items."""
        for attribute in (name, "targets") if name in self.fields else ():
            with suppress(*NO_ARRAY):
                first = self._first[name]
                values = np.asarray(getattr(self.dataset, attribute, None))
                if values.shape == (len(self.block_rows), *first.shape):
                    rounded = values[0].astype(first.dtype) if first.dtype.kind == "f" else values[0]
                    if np.array_equal(rounded, first, equal_nan=True):
                        return values
        return None


def rows_per_ask(source: Dataset, sampler: BlockSampler) -> int:
    """Number of rows in a request to a worker."""
    of_pool = max(sampler.batch_size, sampler.max_pool_rows // ASKS_PER_POOL)
    return max(1, min(of_pool, ASK_BYTES // source.row_bytes))


def open_dataset(
    key: str, path: str | Sequence[str], names: Mapping[str, str], *, factory: str, seed: int = 0, workers_key: str = ""
) -> ItemDataset:
    """The rows of `make_dataset`. names, seed, workers_key: see `ItemDataset`."""
    name, dataset = make_dataset(key, path, factory=factory, seed=seed)
    return ItemDataset(name, dataset, names, seed=seed, workers_key=workers_key)


def make_dataset(key: str, path: str | Sequence[str], *, factory: str, seed: int = 0) -> tuple[str, TorchDataset]:
    """(name, Dataset): calls `factory` with `path`. Raises UserError if the result would be no map-style Dataset.

    A config may come from anybody, so it must not be able to run a command. key: the config key of `path`, for
    messages. factory: "package.module:Class". Its random numbers follow from the seed, so two calls split rows alike.
    """
    module, _, name = factory.partition(":")
    sys.path.append(str(Path.cwd()))  # torchrun adds only the folder of the script
    refusal = UserError(
        f"data.dataset is {factory}, which is no map-style Dataset; use a class (__getitem__ and __len__) or a "
        "function of a file beside train.py, or an installed class that is a torch.utils.data.Dataset"
    )
    # The standard library has no Dataset, and importing some of its modules starts a program.
    is_program = module.partition(".")[0] in {*sys.stdlib_module_names, "test"} or module.endswith(".__main__")
    if is_program and not _is_of_project(module):
        raise refusal
    try:
        with seeded(seed):
            make = getattr(import_module(module), name, None)
    except (Exception, SystemExit) as error:  # a user's module may do anything while it is imported
        is_missing = isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}.")
        reason = f"{error}; name a class as package.module:Class" if is_missing else describe_error(error)
        raise UserError(f"data.dataset is {factory}: {reason}") from None
    if make is None:
        raise UserError(f"data.dataset is {factory}: {module} has no {name or 'class'}; use package.module:Class")
    # A function is called unless its annotation has another return type, as all functions of this project have.
    called: Any = make.func if isinstance(make, partial) else make
    is_function = isfunction(called) and _is_of_project(called.__module__)
    kind = get_type_hints(called).get("return", TorchDataset) if is_function else called
    kind = get_origin(kind) or kind
    is_allowed = isclass(kind) and (issubclass(kind, TorchDataset) or _is_of_project(kind.__module__))
    has_length = is_function or hasattr(kind, "__len__")
    if not is_allowed or not has_length or not hasattr(kind, "__getitem__") or issubclass(kind, IterableDataset):
        raise refusal
    try:
        signature(make).bind(path)
    except TypeError as error:
        cure = f"give its __init__ one argument, which is the value of {key}"
        raise UserError(f"data.dataset: {name}({path!r}) cannot be called: {error}; {cure}") from None
    try:
        with seeded(seed):
            dataset = make(path)
    except Exception as error:
        if _is_of_project(called.__module__):  # the user's own code: the traceback is needed
            raise
        cure = "if it takes no path, name a function beside train.py that makes it of one"
        raise UserError(f"data.dataset: {name}({path!r}) fails: {describe_error(error)}; {cure}") from None
    return f"{name}({path!r}) of {key}", dataset


def _is_of_project(module: str) -> bool:
    """Whether a module belongs to the engine, or its package is in the project's folder or in the current folder."""
    top = module.partition(".")[0]
    spec = None if top == "__main__" else find_spec(top)  # find_spec does not import the module
    places = (spec.submodule_search_locations or [str(spec.origin)]) if spec else []
    return top == "fastgpu" or any(Path(place).parent in (project_folder(), Path.cwd()) for place in places)
