"""Images in tar and zip archives. Labels are files beside the images, as in WebDataset, or folders of classes."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.convert.images.members import PLACES, Place, list_members, read_member
from fastgpu.convert.images.readers import ClassFolders, ImageReader
from fastgpu.convert.reader import explain_errors
from fastgpu.convert.splits import SPLIT_OF_WORD
from fastgpu.imagefiles.folders import is_image, kind_of, select_images, tell_left_out
from fastgpu.process.launch import UserError, list_first
from fastgpu.storage.hdf5 import expand

CURE = "--columns names the suffixes of the images and of the labels (jpg,cls), or a field of JSON (jpg,age)"

LABELS = "in the form of WebDataset, 1.jpg has its label in 1.cls, 1.json or 1.txt"


class ImageArchives(ImageReader):
    """The images in one or more tar or zip archives, which are read in place: nothing is unpacked.

    In the form of WebDataset, the label of `key.jpg` is in `key.cls`, in a field of `key.json`, or in `key.txt`. If
    there are no such files, the archives hold a folder for each class, as for `ImageFolder`.
    """

    def __init__(self, source: str | Path, *, columns: Sequence[str] = (), split_by: str = "", **how: Any):
        """columns: the suffix of the images, and the suffixes or JSON fields of their labels. Empty: the only ones
        there are. split_by: a suffix or a JSON field; with folders of classes, a pattern of paths. how: see
        `ImageReader`."""
        self._archives = [Path(file) for file, _ in expand("SOURCE", str(source))]
        self._names: list[str] = []
        places = []
        left_out: Counter[str] = Counter()
        samples: Samples | None = None
        for number, archive in enumerate(self._archives):
            members = list_members(archive)
            if not number and (labels := columns[1:] or choose_labels(archive, members)):
                samples = Samples(columns[0] if columns else "", [*labels, *filter(None, [split_by])])
            names = samples.add(archive, members, left_out) if samples else select_images(members, left_out)
            self._names += names
            places.append(np.array([(*members[name], number) for name in names], PLACES))
        if samples and not self._names:
            raise UserError(f"{source} has no images with the suffix {columns[0]}; {CURE}")
        if samples and left_out:
            unused = ", ".join(f"{count:,} {kind}" for kind, count in left_out.most_common(10))
            print(f"files of {source} that are not used: {unused}")
        elif left_out:
            tell_left_out(source, left_out)
        self._places = np.concatenate(places)
        broken: dict[int, str] = {}
        splits = None
        if samples:
            from fastgpu.convert.tables import TextColumns, parse_labels  # polars is of the extra `convert`

            table = TextColumns(samples.texts, self.where, broken)
            values, attributes = parse_labels(table, labels)
            self.split_by = table.split_column(split_by)
        else:
            found = ClassFolders(str(source), without_outer_folders(source, self._names), LABELS)
            self._names = [self._names[place] for place in found.places]
            self._places = self._places[found.places]
            values, attributes, splits = found.labels, {"class_names": found.class_names}, found.splits
        super().__init__(str(source), len(self._names), values, broken=broken, **how)
        self.attributes |= attributes
        self.splits = splits
        if split_by and not samples:
            self.split_by_pattern(split_by, self._names)

    def read_file(self, row: int) -> bytes:
        *place, number = self._places[row].item()
        return read_member(self._archives[number], Place(*place))

    def where(self, row: int) -> str:
        return f"{self._archives[self._places['archive'][row]]}::{self._names[row]}"


class Samples:
    """The samples of WebDataset. Files of a sample have the same name up to its first dot."""

    def __init__(self, image: str, columns: Sequence[str]):
        """image: the suffix of the images; empty: each sample has one image. columns: suffixes or fields of JSON."""
        self._image = image
        self.texts: dict[str, list[str | None]] = {column: [] for column in columns}
        """{column: its text for each sample, or None}"""

    def add(self, archive: Path, members: Mapping[str, Place], left_out: Counter[str]) -> list[str]:
        """The names of the images in an archive, one for each sample. Their columns are added to `texts`.

        Files that are not used are counted in `left_out`. Raises UserError if a sample has several images, or a label
        is damaged.
        """
        names = []
        for files in group_samples(archive, members).values():
            images = [name for suffix, name in files.items() if self._is_image(suffix, name)]
            if len(images) > 1:
                raise UserError(f"{archive} has several images in a sample, {list_first(images)}; {CURE}")
            used = {*images}
            for column, texts in self.texts.items() if images else ():
                file, value = read_column(archive, members, files, column)
                used.add(file)
                texts.append(value)
            names += images
            left_out.update(kind_of(name.rpartition("/")[2]) for name in files.values() if name not in used)
        return names

    def _is_image(self, suffix: str, name: str) -> bool:
        return suffix == self._image if self._image else is_image(name.rpartition("/")[2])


def group_samples(archive: Path, names: Mapping[str, Place]) -> dict[str, dict[str, str]]:
    """{sample: {suffix in lower case: file}}. Raises UserError if two files of a sample have the same suffix."""
    samples: dict[str, dict[str, str]] = {}
    for name in names:
        folder, slash, file = name.rpartition("/")
        stem, _, suffix = file.partition(".")
        files = samples.setdefault(folder + slash + stem, {})
        if other := files.get(suffix.lower()):
            raise UserError(f"{archive} has {other} and {name}; leave one of them out")
        files[suffix.lower()] = name
    return samples


def choose_labels(archive: Path, members: Mapping[str, Place]) -> list[str]:
    """The suffix or JSON field with the labels, which is printed. Empty: the folders are the classes.

    Raises UserError if several fields are possible.
    """
    samples = group_samples(archive, members).values()
    labelled = [files for files in samples if any(is_image(name.rpartition("/")[2]) for name in files.values())]
    suffix = next((kind for kind in ("cls", "json", "txt") if any(kind in files for files in labelled)), "")
    if not suffix:
        return []
    label, where = suffix, f".{suffix}"
    if suffix == "json":
        fields = read_json(archive, members, next(files["json"] for files in labelled if "json" in files))
        label = next(iter(fields)) if len(fields) == 1 else "label"
        where = f"field {label} of .json"
        if label not in fields:
            raise UserError(f"{archive}: the fields of .json are {list_first([*fields])}; {CURE}")
    print(f"labels: {where} beside each image (--columns names others)")
    return [label]


def read_column(
    archive: Path, members: Mapping[str, Place], files: Mapping[str, str], column: str
) -> tuple[str, str | None]:
    """(file, text) of a column of a sample: the text of the file with this suffix, or this field of its JSON file."""
    if name := files.get(column):
        with explain_errors(f"{archive}::{name}", "text in UTF-8"):
            return name, read_member(archive, members[name]).decode()
    if name := files.get("json"):
        value = read_json(archive, members, name).get(column)
        if isinstance(value, list | dict):
            raise UserError(f"{archive}::{name}: {column} is a {type(value).__name__}; labels are numbers or texts")
        return name, None if value is None else str(int(value) if isinstance(value, bool) else value)
    return "", None


def read_json(archive: Path, members: Mapping[str, Place], name: str) -> dict[str, Any]:
    """The fields of a JSON file. Raises UserError if it has none."""
    with explain_errors(f"{archive}::{name}", "JSON"):
        fields = json.loads(read_member(archive, members[name]))
        if not isinstance(fields, dict):
            raise ValueError('it should have fields, such as {"label": "cat"}')
        return fields


def without_outer_folders(source: str | Path, names: Sequence[str]) -> list[str]:
    """Paths without the outer folders that all of them share, such as the one folder of a zip file.

    The outer folders are printed.
    """
    parts = [name.split("/") for name in names]
    depth = 0
    while parts and min(map(len, parts)) > depth + 2 and len({part[depth] for part in parts}) == 1:
        if parts[0][depth].lower() in SPLIT_OF_WORD:
            break
        depth += 1
    if depth:
        print(f"classes of {source} are the folders in {'/'.join(parts[0][:depth])}/")
    return ["/".join(part[depth:]) for part in parts]
