"""What convert.py writes: a source of rows and its splits; `Reader`, whose items may be broken; parts of messages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.dataset.items import Columns
from fastgpu.dataset.source import ItemSource
from fastgpu.process.files import not_found
from fastgpu.process.launch import UserError, list_first
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.rows.selection import Subset

SPLITS = ("train", "val", "test")
WORDS = ("train training", "val valid validation dev publictest", "test testing privatetest")
"""What data sets call each split, in small letters. PublicTest and PrivateTest are those of Kaggle."""
SPLIT_OF_WORD = {word: number for number, words in enumerate(WORDS) for word in words.split()}


class Reader(ItemSource):
    """A map-style Dataset that can be converted, or trained on as `data.dataset`.

    A reader of your own has `__getitem__`, which gives {field: value} of one row to any thread. It may raise an
    exception of any kind if the row is broken.
    """

    splits: np.ndarray | None = None
    """(rows,) train, val or test, if the source says it."""
    encoded = False
    """Whether `images` are the bytes of image files."""

    def __init__(self, name: str, n_rows: int, labels: np.ndarray | None = None):
        """name: where the rows come from, for messages. labels: (rows,) or (rows, K)."""
        self.name = name
        self.labels = labels
        self.attributes = {}
        self.block_rows = np.ones(n_rows, np.int32)
        # Of the rows that were read: why they cannot be, and what whole rows do not keep of their source.
        self.broken: dict[int, str] = {}
        self.losses: dict[int, list[str]] = {}

    @property
    def class_names(self) -> list[str] | None:
        """What `data.dataset` takes of the attributes."""
        return self.attributes.get("class_names")

    def __getitem__(self, row: int) -> dict[str, Any]:
        raise NotImplementedError

    def stored_column(self, name: str) -> np.ndarray | None:
        return self.labels if name == "labels" else None

    def where(self, row: int) -> str:
        """Where a row comes from."""
        return f"{self.name}: row {row}"

    def sources(self, row_ids: np.ndarray) -> list[str]:
        """Where rows come from, for their file."""
        return list(map(self.where, row_ids.tolist()))

    def facts(self) -> dict[str, Any]:
        """Attributes that are known when all rows have been read."""
        return {}

    @cached_property
    def fields(self) -> dict[str, Field]:  # type: ignore[override]
        """The types of the fields, as the first whole row has them. Raises UserError if all rows are broken."""
        n_rows = int(self.block_rows.sum())
        first = next(filter(None, (self._try(row, {}) for row in range(n_rows))), None)
        if not first:
            reasons = list_first([*self.broken.values()], "\n  ")
            raise UserError(f"{self.name}: none of the rows can be read:\n  {reasons}")
        fields = {name: Field(value.dtype, value.shape) for name, value in first.items()}
        if self.encoded:  # some rows tell how long they are
            items = [self._try(row, {}) for row in np.linspace(0, n_rows - 1, min(32, n_rows)).astype(int).tolist()]
            mean_bytes = float(np.mean([len(item["images"]) for item in items if item] or len(first["images"])))
            fields["images"] = Field(np.dtype(np.uint8), (), mean_bytes, codec="encoded")
        return fields

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> Columns:
        """See `ItemSource`. Broken rows are zeros, or have no values. Any thread may call this."""
        zeros = {name: np.zeros(0 if each.is_ragged else each.shape, each.dtype) for name, each in self.fields.items()}
        items = [self._try(row, self.fields) or zeros for row in rows.tolist()]
        columns: Columns = {}
        for name, field in self.fields.items():
            values = [item[name] for item in items]
            if field.is_ragged:
                columns[name] = RaggedArray(np.concatenate(values), np.cumsum([0, *map(len, values)]))
            else:
                columns[name] = np.array(values, field.dtype)
        return columns

    def _try(self, row: int, fields: Mapping[str, Field]) -> dict[str, np.ndarray] | None:
        """The item of a row, of these fields. None: it is broken."""
        try:
            item = {name: np.asarray(value) for name, value in self[row].items()}
            for name, field in fields.items():
                found = Field(item[name].dtype, item[name].shape)
                if found != field and not field.is_ragged:
                    raise ValueError(f"{name} are {found}, in the first row {field} (--size makes images alike)")
        except Exception as error:  # a decoder may raise anything for damaged bytes
            self.broken[row] = f"{self.where(row)} cannot be read: {error}"
            self.losses.pop(row, None)
            return None
        return item


def split_rows(source: Dataset, shares: Sequence[float] | None, seed: int) -> dict[str, Dataset]:
    """{split: its rows}, or {"": all rows}. shares: of a split that is drawn at random; see `draw_splits`.

    Raises UserError if the source is already split, or if a split gets no rows.
    """
    splits = getattr(source, "splits", None)
    if shares:
        if splits is not None:
            raise UserError(f"--split is given, but {source.name} is split already; drop one")
        labels = source.stored_column("labels")
        splits = draw_splits(np.zeros(len(source)) if labels is None else labels, shares, seed)
    if splits is None:
        return {"": source}
    parts = {
        name: source.select(Subset(source.block_rows, splits == number))
        for number, name in enumerate(SPLITS)
        if number in splits
    }
    if shares and len(parts) < len(shares):
        raise UserError(f"--split leaves rows for {', '.join(parts)} alone: there are {len(source):,} rows")
    return parts


def draw_splits(labels: np.ndarray, shares: Sequence[float], seed: int) -> np.ndarray:
    """(rows,) uint8, places in SPLITS, drawn at random: of each class alike if the labels are integers (rows,)."""
    classes = labels if labels.ndim == 1 and labels.dtype.kind in "bui" else np.zeros(len(labels), np.int64)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    _, counts = np.unique(classes, return_counts=True)
    splits = np.empty(len(classes), np.uint8)
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        borders = [round(len(rows) * share) for share in np.cumsum(shares)[:-1]]
        splits[rows] = np.searchsorted(borders, np.arange(len(rows)), side="right")
    return splits


def read_splits(where: str, words: Iterable[str]) -> np.ndarray:
    """(rows,) uint8, places in SPLITS. words: what `where` calls the split of each row. Raises UserError for others."""
    if unknown := sorted({word for word in words if word.lower() not in SPLIT_OF_WORD}):
        raise UserError(f"{where}: the splits are {list_first(unknown)}; allowed are {', '.join(SPLIT_OF_WORD)}")
    return np.array([SPLIT_OF_WORD[word.lower()] for word in words], np.uint8)


@contextmanager
def explain_errors(path: str | Path, expected: str) -> Iterator[None]:
    """Turn the errors of a file that is missing or damaged into a UserError. expected: what the file should be."""
    try:
        yield
    except (UserError, ModuleNotFoundError):
        raise
    except FileNotFoundError:
        raise not_found(path) from None
    except Exception as error:  # parsers raise anything for damaged bytes
        raise UserError(f"{path} cannot be read as {expected}: {' '.join(str(error).split())[:200]}") from None
