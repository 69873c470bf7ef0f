"""The source that the config names: HDF5 files, or a Dataset of your own. To read another file format, add it here."""

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np

from fastgpu.dataset.source import open_dataset
from fastgpu.process.config import Data, Loader
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.contract import Dataset
from fastgpu.rows.selection import Groups, Mixture, hold_out
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import HDF5Dataset, expand, open_store


def _warn_of_shared_files(data: Data) -> None:
    """Say that validation rows are trained on, as by the pattern `photos-*.h5`, which also matches photos-val.h5."""
    if data.val_fields not in ({}, data.fields):
        return
    if data.dataset != "none":
        if data.train == data.val:
            warn(
                f"data.val is data.train, {data.val}: the validation metrics are of rows that are trained on; "
                "data.val=10% holds rows out"
            )
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


def open_splits(data: Data, loader: Loader, seed: int) -> tuple[Dataset, Dataset]:
    """The training rows and the validation rows. Raises UserError if one cannot open them, or if they do not fit.

    A share of data.train is the same rows, of which each part has a selection. seed: of the order of rows in a mixture.
    """
    train = decoded(data, _open_files(data, "train", loader))
    if data.val_share is None:
        _warn_of_shared_files(data)
        val = decoded(data, _open_files(data, "val", loader))
    else:
        train, val = _hold_out(data, train)
    are_decoded = train.decoder and val.decoder
    check_meaning("data.val", train, val, preparation=not are_decoded)
    return _mixed(data, train, seed), val


def _hold_out(data: Data, rows: Dataset) -> tuple[Dataset, Dataset]:
    """The rows to train on, and the share that is for validation."""
    if data.val_fields:
        raise UserError(f"data.val is {data.val}, a share of data.train, so data.val_fields should be {{}}")
    if data.dataset == "none":
        _refuse_repeated_files(data)
    n_rows = len(rows)
    n_val = round((data.val_share or 0) * n_rows)
    if not 0 < n_val < n_rows:
        raise UserError(
            f"data.val is {data.val}, which is {n_val} of the {n_rows} rows of {rows.name}; use a "
            "share that leaves rows to train on and rows to validate on"
        )
    train_share, val_share = hold_out(rows.block_rows, n_val)
    name = f"{rows.name} ({n_rows - n_val:,} of its rows; {n_val:,} are for validation)"
    return rows.select(train_share, name), rows.select(val_share, f"{rows.name} ({n_val:,} of its rows)")


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
    if source.selection:
        is_member = np.zeros(len(groups.groups), bool)
        is_member[source.selection.rows()] = True
        groups = groups._replace(groups=np.where(is_member, groups.groups, -1))
        lost = np.setdiff1d(np.arange(len(groups.names)), groups.groups)
        if len(lost):
            name = groups.names[lost[0]]
            raise UserError(f"data.val is {data.val}, which leaves no row of {name} to train on; use a smaller share")
    return source.select(Mixture(groups, source.block_rows, data.batch_size, seed), source.name)


def decoded(data: Data, source: Dataset) -> Dataset:
    """The source, with pixels in place of its encoded images, if there are any."""
    if any(field.codec for field in source.fields.values()):
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


def decode_images(source: Dataset, size: tuple[int, int], **options: float | bool | None) -> Dataset:
    """The source, with pixels in place of its encoded images. options: see `decoded.ImageDecoder`.

    Raises UserError if the project has no module that decodes them.
    """
    room = find_spec("fastgpu.images")
    if not (room and room.origin):  # Python takes a folder without modules for a package, too, which has no origin
        raise UserError(f"{source.name} has encoded images, which a project without an image workload does not decode")
    return import_module("fastgpu.images.column").ImageDecoder(size, **options).decoded(source)


def _open_files(data: Data, split: Literal["train", "val"], loader: Loader) -> Dataset:
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
        return open_dataset(key, paths, fields, factory=data.dataset, timeout_s=loader.timeout_s)
    return open_store(key, paths, fields)


def _mix_sources(weights: Mapping[str, float], source: HDF5Dataset) -> Groups:
    """A group for each source of data.train. weights: {source: weight}."""
    n_files = [len(expand("data.train", path)) for path in weights]
    source_of_file = np.repeat(np.arange(len(weights), dtype=np.int16), n_files)
    return Groups(tuple(weights), tuple(weights.values()), np.repeat(source_of_file, source.part_rows), by_block=True)


def _balance_classes(source: Dataset) -> Groups:
    """A group for each class, of equal weight. Raises UserError if the rows have no field `labels` of whole numbers."""
    labels = None
    with suppress(KeyError):
        labels = source.column("labels")
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
    names = tuple(f"class {label}" for label in classes.tolist())
    return Groups(names, (1,) * len(classes), groups.astype(np.int32), by_block=False)
