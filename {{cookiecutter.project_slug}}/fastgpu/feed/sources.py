"""The source that the config names: HDF5 files, or a Dataset of your own. To read another file format, add it here."""

from collections import Counter
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from fastgpu.dataset.source import open_dataset
from fastgpu.process.config import Data, Loader
from fastgpu.process.launch import UserError, warn
from fastgpu.process.world import World
from fastgpu.rows.contract import Source
from fastgpu.rows.selection import Mixture, hold_out
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import expand, open_store


def open_sources(data: Data, loader: Loader, world: World) -> tuple[Source, Source]:
    """The training rows and the validation rows. Raises UserError on every rank if one cannot open them, or has others.

    Each node may have its own copy of the files, under another name.
    """
    identities: dict[str, object] = {}
    with world.raise_on_every_rank():
        source = open_source(data, "train", loader)
        val_source = open_source(data, "val", loader)
        are_decoded = source.decoding and val_source.decoding
        check_meaning("data.val", source, val_source, preparation=not are_decoded)
        _warn_of_shared_files(data)
        if world.world_size > 1:
            for key, rows in (("data.train", source), ("data.val", val_source)):
                identities |= {f"{key}: {name}": value for name, value in rows.identity.items()}
    world.check_same(identities)
    return source, val_source


def _warn_of_shared_files(data: Data) -> None:
    """Say that validation rows are trained on, as by the pattern `photos-*.h5`, which also matches photos-val.h5."""
    has_own_rows = data.val_share is not None or data.val_fields not in ({}, data.fields)
    if data.dataset != "none" or has_own_rows:
        return
    shared = sorted({*_list_files("data.train", data.train)} & {*_list_files("data.val", data.val)})
    if shared:
        name = _short_name(*shared[0])
        more = f" and {len(shared) - 1} more" if len(shared) > 1 else ""
        warn(f"{name}{more} in data.val is also in data.train: the validation metrics are of rows that are trained on")


def _refuse_repeated_files(data: Data) -> None:
    """Raise UserError if data.train names a file twice: rows held out of one copy would be trained on in the other."""
    files = Counter(_list_files("data.train", data.train))
    file, n_times = files.most_common(1)[0]
    if n_times > 1:
        name = _short_name(*file)
        raise UserError(
            f"data.train names {name} {n_times} times and data.val is {data.val}: what one of them holds out would be "
            f"trained on in another; name it once, with a weight if its rows should come more often: {{{name}: 2, ...}}"
        )


def _short_name(path: Path, group: str) -> str:
    """The name of a file, or of a group in it, without the folder."""
    return path.name if group == "/" else f"{path.name}::{group}"


def _list_files(key: str, named: str | list[str] | dict[str, float]) -> list[tuple[Path, str]]:
    """(file, group) of everything that data.train or data.val names."""
    paths = [named] if isinstance(named, str) else named
    return [(Path(file).resolve(), f"/{group.strip('/')}") for path in paths for file, group in expand(key, path)]


def open_source(data: Data, split: Literal["train", "val"], loader: Loader) -> Source:
    """The rows of data.train or data.val. Raises UserError if they cannot be opened."""
    if data.val_share is None:
        source = _open_files(data, split, loader)
    else:
        if data.val_fields:
            raise UserError(f"data.val is {data.val}, a share of data.train, so data.val_fields should be {{}}")
        if data.dataset == "none":
            _refuse_repeated_files(data)
        parts = hold_out(_open_files(data, "train", loader), data.val_share)
        source = parts[0] if split == "train" else parts[1]
    if split == "val":
        source.mixture = None
    elif source.mixture:
        if data.balance == "classes":
            raise UserError("data.balance is classes and data.train has weights; use one of the two")
        lost = np.setdiff1d(np.arange(len(source.mixture.names)), source.mixture.groups)
        if len(lost):
            name = source.mixture.names[lost[0]]
            raise UserError(f"data.val is {data.val}, which leaves no row of {name} to train on; use a smaller share")
    elif data.balance == "classes":
        source.mixture = _balance_classes(source)
    has_codec = any(field.codec for field in source.fields.values())
    if has_codec:
        if not data.image_size:
            raise UserError(
                f"data.image_size is 0, but {source.name} has encoded images; set it to the height and width to train "
                "on, such as 224"
            )
        masks = [f"{name}, {field}" for name, field in source.fields.items() if len(field.shape) == 2]
        if masks and data.min_crop_scale < 1:
            raise UserError(
                f"data.min_crop_scale is {data.min_crop_scale:g}, but {masks[0]} of {source.name} would not be cut "
                "and resized like the images; use 1"
            )
        size = (data.image_size, data.image_size)
        return decode_images(source, size, min_scale=data.min_crop_scale)
    if data.image_size or data.min_crop_scale < 1:
        warn(f"data.image_size and data.min_crop_scale have no effect: {source.name} has no encoded images")
    return source


def decode_images(source: Source, size: tuple[int, int], **options: float | bool | None) -> Source:
    """The source, with pixels in place of its encoded images. options: see `decoded.DecodedImages`.

    Raises UserError if the project has no module that decodes them.
    """
    room = find_spec("fastgpu.images")
    if not (room and room.origin):  # Python takes a folder without modules for a package, too, which has no origin
        raise UserError(f"{source.name} has encoded images, which a project without an image workload does not decode")
    return import_module("fastgpu.images.decoded").DecodedImages(source, size, **options)


def _open_files(data: Data, split: Literal["train", "val"], loader: Loader) -> Source:
    """All rows that data.train or data.val names, mixed at the weights of data.train."""
    key = f"data.{split}"
    named = data.train if split == "train" else data.val
    paths = list(named) if isinstance(named, dict) else named
    fields = data.fields
    if split == "val" and data.val_fields:
        fields = data.val_fields
    if data.dataset != "none":
        if isinstance(named, dict):
            raise UserError("data.train has weights, which work for HDF5 files only; use data.dataset=none")
        return open_dataset(key, paths, fields, factory=data.dataset)
    store = open_store(key, paths, fields)
    if isinstance(named, dict):
        n_files = [len(expand(key, path)) for path in named]
        store.mixture = _mix_sources(named, np.repeat(np.arange(len(named)), n_files), store.file_rows)
    return store


def _mix_sources(weights: Mapping[str, float], source_of_file: np.ndarray, file_rows: list[int]) -> Mixture:
    """A group for each source. weights: {source: weight}. source_of_file: (files,) the number of its source."""
    groups = np.repeat(source_of_file.astype(np.min_scalar_type(len(weights))), file_rows)
    return Mixture(tuple(weights), tuple(weights.values()), groups, by_block=True)


def _balance_classes(source: Source) -> Mixture:
    """A group for each class, of equal weight. Raises UserError if the rows have no field `labels` of whole numbers."""
    labels = source.in_memory("labels")
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "bui":
        found = f"is missing: there are {', '.join(source.fields)}"
        if labels is not None:
            found = f"is {source.fields['labels']}"
        elif "labels" in source.fields:
            found = "is not in memory (a Dataset needs an attribute `labels` or `targets` equal to its items)"
        raise UserError(
            f"data.balance is classes, but the field `labels` of {source.name} {found}; it should have one whole "
            "number for each row"
        )
    classes, groups = np.unique(labels, return_inverse=True)
    groups = groups.astype(np.min_scalar_type(len(classes)))
    return Mixture(tuple(f"class {label}" for label in classes.tolist()), (1,) * len(classes), groups, by_block=False)
