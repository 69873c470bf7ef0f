"""What the readers of other formats share: missing or damaged files, broken rows, --on-error, and splits."""

import csv
import re
import zipfile
import zlib
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError
from typing import Literal

import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset, Out, PoolPlan, Reads
from fastgpu.rows.rows import Field
from fastgpu.storage.file import not_found

OnError = Literal["stop", "skip"]
"""What is done with a broken image or line: stop, or leave it out and list it."""
MAX_SKIPPED_SHARE = 0.01
"""If a larger share is broken, the data is not what it should be, and conversion stops."""
MAX_LISTED = 20
"""Broken rows that an error lists."""
MAX_COUNTED = 1000
"""Broken rows after which a conversion that would fail at its end stops at once."""
MAX_ERROR_CHARS = 200
DAMAGE = (
    *(OSError, ValueError, LookupError, EOFError, ArithmeticError, MemoryError, SyntaxError, RuntimeError),
    *(csv.Error, TokenError, zipfile.BadZipFile, zlib.error),
)
"""What parsers raise for damaged bytes. NotImplementedError, for a compression that is not known, is a RuntimeError."""


class BrokenRowError(UserError):
    """One row cannot be decoded. The others may be whole."""


class DecodedRows(Dataset):
    """Rows that are decoded one at a time, each a block of its own, and that may turn out to be broken.

    Broken rows are collected in `failed`. on_error: `stop` means that nothing is written if there is one; `skip`, that
    they are left out. Reading ends at once if more than 1 % are broken, but for `stop` not before there are 1,000.
    """

    def __init__(self, name: str, n_rows: int, columns: Mapping[str, np.ndarray], *, on_error: OnError):
        """columns: the fields that are in memory, {field: (rows, ...)}."""
        self.name = name
        self.block_rows = np.ones(n_rows, np.int32)
        self.failed: dict[int, str] = {}
        """{row: why it cannot be read}. `read` leaves the place of such a row undefined; whoever takes rows from this
        source must leave it out."""
        self.on_error = on_error
        self.fields = {field: Field(column.dtype, column.shape[1:]) for field, column in columns.items()}
        self._columns = columns

    @property
    def reasons(self) -> list[str]:
        """Why rows are broken, in the order of the rows."""
        return [reason for _, reason in sorted(self.failed.copy().items())]  # other threads add to it

    @property
    def remarks(self) -> Sequence[str]:
        """Lines about the rows that were read, such as what decoding has changed besides their size."""
        return ()

    @abstractmethod
    def decode(self, row: int) -> Mapping[str, np.ndarray]:
        """The other fields of one row. Thread-safe. Raises BrokenRowError if it cannot be decoded."""

    def column(self, name: str) -> np.ndarray:
        """One field of all rows that is in memory. Raises KeyError for the others."""
        return self._columns[name]

    def read_row(self, row: int) -> Mapping[str, np.ndarray]:
        """All fields of one row; none if it is broken. Thread-safe. Raises UserError if too many are broken."""
        try:
            decoded = self.decode(row)
        except BrokenRowError as error:
            self.failed[row] = str(error)
            if len(self.failed) > max(1 if self.on_error == "skip" else MAX_COUNTED, MAX_SKIPPED_SHARE * len(self)):
                raise describe_broken(self.reasons, len(self), ", more than 1 %") from None
            return {}
        return {field: column[row] for field, column in self._columns.items()} | dict(decoded)

    def read(self, plan: PoolPlan, reads: Reads, out: Mapping[str, Out]) -> None:
        """Decode rows to their places (see `read_row`)."""
        for row, (place,) in reads.ranges():
            for field, value in self.read_row(row).items():
                column = out[field]
                assert isinstance(column, np.ndarray)
                column[place] = value


def list_first(items: Sequence[str], separator: str = ", ") -> str:
    """The first of some texts, and how many more there are."""
    n_more = len(items) - MAX_LISTED
    return separator.join([*items[:MAX_LISTED], *([f"and {n_more:,} more"] if n_more > 0 else [])])


def describe_broken(reasons: Sequence[str], n_rows: int, cure: str) -> UserError:
    """An error that lists the first broken rows of `n_rows`."""
    lines = list_first(reasons, "\n  ")
    return UserError(f"{len(reasons):,} of {n_rows:,} rows are broken{cure}:\n  {lines}")


@contextmanager
def explain_errors(path: object, expected: str) -> Iterator[None]:
    """Turn the errors of a file that is missing or damaged into a UserError. expected: what the file should be.

    A fifo, a socket or a device is refused, since it might be waited for without end.
    """
    file = Path(str(path).partition("::")[0])
    try:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UserError(f"{file} is a fifo, a socket or a device; give a regular file")
        yield
    except UserError:  # which is a ValueError, too
        raise
    except FileNotFoundError:
        raise not_found(path) from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except DAMAGE as error:
        text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        cure = "fetch it again"
        if isinstance(error, UnicodeDecodeError):
            cure = "save it as UTF-8, such as by `iconv -f CP949 -t UTF-8` for Korean text"
        elif "Object arrays" in text or "Python objects" in text:  # in .npz and .npy files
            cure = "save it with a dtype of numbers, such as by array.astype('float32')"
        raise UserError(f"{path} is not {expected}: {text}; {cure}") from None


WORDS = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "publictest"),
    "test": ("test", "testing", "privatetest"),
}
"""{split: what data sets call it, in small letters}. PublicTest and PrivateTest are those of Kaggle."""
SPLITS = tuple(WORDS)
MAX_SPLITS = 20
"""Files that a column of splits may lead to."""
SPLIT_OF_WORD = {word: split for split, words in WORDS.items() for word in words}


def draw_split(labels: np.ndarray, shares: Sequence[float], seed: int) -> dict[str, np.ndarray]:
    """{"train": row numbers, "val": ..., "test": ...}, ascending, drawn at random.

    labels: (rows, ...). If they are integers (rows,), each class is split by these shares. Raises UserError if a split
    gets no rows.
    """
    is_class = labels.ndim == 1 and labels.dtype.kind in "bui"
    classes = labels if is_class else np.zeros(len(labels), np.int64)
    order = np.random.default_rng(seed).permutation(len(classes))
    order = order[np.argsort(classes[order], kind="stable")]
    _, counts = np.unique(classes, return_counts=True)
    split_of_row = np.empty(len(classes), np.int64)
    for rows in np.split(order, np.cumsum(counts)[:-1]):
        borders = [round(len(rows) * share) for share in np.cumsum(shares)[:-1]]
        split_of_row[rows] = np.searchsorted(borders, np.arange(len(rows)), side="right")
    parts = {name: np.flatnonzero(split_of_row == number) for number, name in enumerate(SPLITS[: len(shares)])}
    for name, rows in parts.items():
        if not len(rows):
            raise UserError(f"--split leaves no rows for {name}: {len(classes):,} rows of {len(counts):,} classes")
    return parts


def group_splits(path: Path, words: Sequence[str], lines: Sequence[int]) -> dict[str, np.ndarray]:
    """{split: row numbers, ascending}: train, val and test first. Prints which word means which split.

    words: what a column of `path` calls the split of each row. lines: the line of each row. Raises UserError for a word
    that cannot be part of the name of a file.
    """
    names = {word: SPLIT_OF_WORD.get(word.lower(), word) for word in dict.fromkeys(words)}
    if len(names) > MAX_SPLITS:
        raise UserError(f"{path}: {len(names):,} splits, such as {list_first(list(names)[:3])}: is it another column?")
    for word, name in names.items():
        if not re.fullmatch(r"[\w-]+", name):
            line = lines[words.index(word)]
            raise UserError(f"{path}:{line}: the split {word!r} cannot be part of the name of a file")
    print("splits:", ", ".join(word if word == name else f"{word} -> {name}" for word, name in names.items()))
    name_of_row = np.array([names[word] for word in words])
    others = sorted(set(names.values()) - set(SPLITS))
    parts = {name: np.flatnonzero(name_of_row == name) for name in (*SPLITS, *others)}
    return {name: rows for name, rows in parts.items() if len(rows)}
