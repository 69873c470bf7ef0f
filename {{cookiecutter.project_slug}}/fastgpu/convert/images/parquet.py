"""Images in Parquet files: a column of encoded bytes, as the library `datasets` and others write them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from fastgpu.convert.images.readers import ImageReader, read_file
from fastgpu.convert.parquet import ParquetFiles, RecentGroups
from fastgpu.convert.tables import TextTable, parse_labels
from fastgpu.process.launch import UserError, list_first

BYTES, PATH = "bytes", "path"
"""Members of the struct in which `datasets` writes an image. If its bytes are null, its path names a file."""


class ParquetImages(ImageReader):
    """The images of Parquet files, and labels from other columns, which become what `parse_labels` makes of them.

    An image is a value of bytes, a struct of `bytes` and `path`, or the path of a file from the folder of the Parquet
    file on. A block is a row group.
    """

    def __init__(self, source: str | Path, *, columns: Sequence[str] = (), split_by: str = "", **how: Any):
        """columns: of the image and its labels; empty: the only ones that can be meant. how: see `ImageReader`."""
        self._files = ParquetFiles(source)
        self._image, *names = columns or choose_columns(self._files, split_by)
        self._files.check([self._image, *names, *filter(None, [split_by])])
        self._kind = self._files.schema[self._image]
        if not is_image(self._kind):
            found = f"{source}: {self._image} is {self._kind}"
            raise UserError(f"{found}; images are Binary, a Struct of bytes and path, or a String that is a path")
        self._recent = RecentGroups(self._files, [self._image])
        broken: dict[int, str] = {}
        table = self._files.texts([*names, *filter(None, [split_by])], broken)
        labels, attributes = read_labels(self._files, table, names)
        self.split_by = table.split_column(split_by)
        super().__init__(str(source), self._files.group_rows, labels, broken=broken, **how)
        self.attributes |= attributes

    def read_file(self, row: int) -> bytes:
        (group,), (place,) = self._files.groups_of(np.array([row]))
        value = self._recent[group][self._image][int(place)]
        content, path = (value.get(BYTES), value.get(PATH)) if isinstance(value, dict) else (value, None)
        if isinstance(content, str):
            content, path = None, content
        if content is None and path:
            return read_file(self._files.folder_of(group) / path)
        if content is None:
            raise ValueError(f"{self._image} is null")
        return bytes(content)

    def where(self, row: int) -> str:
        return self._files.where(row)

    def origins(self, row_ids: np.ndarray) -> list[str]:
        return self._files.origins(row_ids)


def is_image(kind: pl.DataType) -> bool:
    """Whether a column of this type can hold image files, or their paths."""
    if isinstance(kind, pl.Struct):
        members = {field.name: field.dtype for field in kind.fields}
        return members.get(BYTES) == pl.Binary and members.get(PATH, pl.String) == pl.String
    return kind in (pl.Binary, pl.String)


def choose_columns(files: ParquetFiles, split_by: str) -> list[str]:
    """The columns of images and of labels, which are printed. Raises UserError if several columns are possible."""
    images = [name for name, kind in files.schema.items() if is_image(kind) and kind != pl.String]
    listed = list_first([f"{name} ({kind})" for name, kind in files.schema.items()])
    cure = f"name the columns of the image and its labels: --columns IMAGE,LABEL, of {listed}"
    if len(images) != 1:
        raise UserError(f"{files.name} has {len(images)} columns of bytes; {cure}")
    others = [name for name in files.schema if name not in (images[0], split_by)]
    labels = others if len(others) == 1 else [name for name in others if name in ("label", "labels")]
    if len(labels) != 1:
        raise UserError(f"{files.name}: which column has the labels? {cure}")
    print(f"columns of {files.name}: {images[0]} has the images, {labels[0]} the labels (--columns names others)")
    return [images[0], labels[0]]


def read_labels(files: ParquetFiles, table: TextTable, names: Sequence[str]) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns, see `parse_labels`; of classes with the names that files have."""
    class_names = files.class_names(names[0]) if len(names) == 1 else None
    if not class_names or not files.schema[names[0]].is_integer():
        return parse_labels(table, names)
    cure = f"; the file names {len(class_names)} classes"
    return table.whole_numbers(names[0], len(class_names) - 1, cure), {"class_names": class_names}
