"""The source that the config names: HDF5 files, or a Dataset of your own. To read another file format, add it here."""

import os
from collections import Counter
from collections.abc import Mapping
from copy import copy
from importlib import import_module
from typing import Literal

import numpy as np

from fastgpu.dataset.source import open_dataset
from fastgpu.process.config import Data, Loader
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.contract import Dataset
from fastgpu.rows.selection import Groups, Mixture, Share, hold_out
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import HDF5Dataset, expand, open_store


def open_splits(data: Data, loader: Loader, seed: int) -> tuple[Dataset, Dataset]:
    """The training rows and the validation rows. Raises UserError if one cannot open them, or if they do not fit.

    A share of data.train is the same rows, of which each part has a selection. seed: of the order of rows in a mixture.
    """
    train = _decoded(data, _open(data, "train", loader))
    if data.val_share is None:
        _warn_of_shared_rows(data)
        val = _decoded(data, _open(data, "val", loader))
    else:
        train, val = _hold_out(data, train)
    check_meaning("data.val", train, val)
    return _mixed(data, train, seed), val


def _open(data: Data, split: Literal["train", "val"], loader: Loader) -> Dataset:
    """All rows that data.train or data.val names."""
    key = f"data.{split}"
    named = data.train if split == "train" else data.val
    paths = list(named) if isinstance(named, dict) else named
    fields = data.val_fields if split == "val" and data.val_fields else data.fields
    if data.dataset == "none":
        return open_store(key, paths, fields)
    if isinstance(named, dict):
        raise UserError("data.train has weights, which work for HDF5 files only; use data.dataset=none")
    return open_dataset(key, paths, fields, factory=data.dataset, timeout_s=loader.timeout_s)


def _decoded(data: Data, source: Dataset) -> Dataset:
    """The source, with pixels in place of its encoded images, if there are any."""
    if not any(field.codec for field in source.fields.values()):
        if data.image_size or data.min_crop_scale < 1:
            warn(f"data.image_size and data.min_crop_scale have no effect: {source.name} has no encoded images")
        return source
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
    return decode_images(source, (data.image_size, data.image_size), min_scale=data.min_crop_scale)


def decode_images(source: Dataset, size: tuple[int, int], **options: float) -> Dataset:
    """The source, with pixels in place of its encoded images. options: see `decoded` of that room.

    Raises UserError if the project has no module that decodes them.
    """
    try:
        column = import_module("fastgpu.images.column")  # projects without an image workload have no such room
    except ModuleNotFoundError as error:
        raise UserError(f"{source.name} has encoded images, which this project cannot decode: {error}") from None
    pixels: Dataset = column.decoded(source, size, **options)
    return pixels


def _list_files(key: str, named: str | list[str] | dict[str, float]) -> list[str]:
    """The files, and the groups in them, that data.train or data.val names."""
    paths = [named] if isinstance(named, str) else named
    files = [(os.path.relpath(file), group.strip("/")) for path in paths for file, group in expand(key, path)]
    return [f"{file}::{group}" if group else file for file, group in files]


def _warn_of_shared_rows(data: Data) -> None:
    """Say that validation rows are trained on, as by the pattern `photos-*.h5`, which also matches photos-val.h5."""
    if data.val_fields not in ({}, data.fields):
        return
    if data.dataset == "none":
        shared = sorted({*_list_files("data.train", data.train)} & {*_list_files("data.val", data.val)})
    else:
        shared = [str(data.val)] if data.train == data.val else []
    if shared:
        warn(
            f"data.val has {', '.join(shared)} of data.train: the validation metrics are of rows that are trained on; "
            "data.val=10% holds rows out"
        )


def _hold_out(data: Data, rows: Dataset) -> tuple[Dataset, Dataset]:
    """The rows to train on, and the share that is for validation."""
    if data.val_fields:
        raise UserError(f"data.val is {data.val}, a share of data.train, so data.val_fields should be {{}}")
    if data.dataset == "none":  # rows held out of one copy would be trained on in the other
        file, n_times = Counter(_list_files("data.train", data.train)).most_common(1)[0]
        if n_times > 1:
            raise UserError(
                f"data.train names {file} {n_times} times and data.val is {data.val}; name it once, with a weight if "
                f"its rows should come more often: {{{file}: 2, ...}}"
            )
    n_rows = len(rows)
    n_val = round((data.val_share or 0) * n_rows)
    if not 0 < n_val < n_rows:
        raise UserError(
            f"data.val is {data.val}, which is {n_val} of the {n_rows} rows of {rows.name}; use a "
            "share that leaves rows to train on and rows to validate on"
        )
    train, val = copy(rows), copy(rows)
    train.selection, val.selection = hold_out(rows.block_rows, n_val)
    train.name += f" ({n_rows - n_val:,} of its rows; {n_val:,} are for validation)"
    val.name += f" ({n_val:,} of its rows)"
    return train, val


def _mixed(data: Data, source: Dataset, seed: int) -> Dataset:
    """The training rows, mixed as the weights of data.train or data.balance say."""
    groups = None
    if isinstance(data.train, dict):
        if data.balance == "classes":
            raise UserError("data.balance is classes and data.train has weights; use one of the two")
        assert isinstance(source, HDF5Dataset)
        groups = _mix_sources(data.train, source)
    elif data.balance == "classes":
        groups = _balance_classes(source)
    if not groups:
        return source
    if isinstance(source.selection, Share):
        is_member = np.zeros(len(groups.groups), bool)
        is_member[source.selection.rows()] = True
        groups = groups._replace(groups=np.where(is_member, groups.groups, -1))
        lost = np.setdiff1d(np.arange(len(groups.names)), groups.groups)
        if len(lost):
            name = groups.names[lost[0]]
            raise UserError(f"data.val is {data.val}, which leaves no row of {name} to train on; use a smaller share")
    mixed = copy(source)
    mixed.selection = Mixture(groups, source.block_rows, data.batch_size, seed)
    return mixed


def _mix_sources(weights: Mapping[str, float], source: HDF5Dataset) -> Groups:
    """A group for each source of data.train. weights: {source: weight}."""
    n_files = [len(expand("data.train", path)) for path in weights]
    source_of_file = np.repeat(np.arange(len(weights), dtype=np.int16), n_files)
    return Groups(tuple(weights), tuple(weights.values()), np.repeat(source_of_file, source.part_rows), by_block=True)


def _balance_classes(source: Dataset) -> Groups:
    """A group for each class, of equal weight. Raises UserError if the rows have no field `labels` of whole numbers."""
    labels = source.column("labels")
    if labels is None or labels.ndim != 1 or labels.dtype.kind not in "bui":
        raise UserError(
            f"data.balance is classes, which needs a field `labels` with one whole number for each row; {source.name} "
            f"has {', '.join(f'{name}, {field}' for name, field in source.fields.items())} (a Dataset needs an "
            "attribute `labels` or `targets` equal to its items)"
        )
    classes, groups = np.unique(labels, return_inverse=True)
    names = tuple(f"class {label}" for label in classes.tolist())
    return Groups(names, (1,) * len(classes), groups.astype(np.int32), by_block=False)
