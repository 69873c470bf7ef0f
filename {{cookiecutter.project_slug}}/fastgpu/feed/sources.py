"""Opens the rows that the config names: HDF5 files, or your own Dataset. To read another file format, add it here."""

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fastgpu.dataset.source import open_dataset
from fastgpu.process.config import Config, Data, LoaderConfig, share_of
from fastgpu.process.launch import UserError, read_launch, warn
from fastgpu.process.machine import cpus_of_rank
from fastgpu.rows.contract import Dataset
from fastgpu.rows.selection import Groups, Mixture, Subset, hold_out
from fastgpu.storage.columns import Codec
from fastgpu.storage.hdf5 import expand
from fastgpu.storage.meaning import check_meaning
from fastgpu.storage.store import HDF5Dataset, open_store
from fastgpu.storage.windows import WindowDataset, hold_out_steps, open_windows


class Splits(NamedTuple):
    """The rows to train on, and the rows to validate on."""

    train: Dataset
    val: Mapping[str, Dataset]
    """{group of the metrics: rows}. A single set has the group `val`, several sets have `val/<name>`."""
    error: UserError | None = None
    """The error of opening, see `open_rows`. If there is one, there are no rows."""


def open_rows(config: Config) -> Splits:
    """Call `open_splits`, and keep its error, so that it can be raised where all ranks end together.

    Rows are opened before the process group exists, because the workers of a Dataset are forks.
    """
    try:
        return Splits(*open_splits(config.data, config.loader, config.run.seed))
    except UserError as error:
        return Splits(Dataset(), {}, error)


def open_splits(data: Data, loader: LoaderConfig, seed: int) -> tuple[Dataset, dict[str, Dataset]]:
    """The training rows, and {group of the metrics: validation rows}.

    This starts the worker processes of a torch Dataset: call it before the process uses CUDA or NCCL. `close` of the
    rows ends the workers. The same workers read a validation share of data.train. seed: of the order of rows in a
    mixture, and of random numbers in a user's function that makes a Dataset. Raises UserError if rows cannot be opened,
    or do not fit together.
    """
    if data.stride and not data.window:
        raise UserError(f"data.stride is {data.stride}, but data.window is 0: rows are samples; set data.window, too")
    train = _open("data.train", data.train, data, loader, seed=seed)
    drawn = sorted(getattr(train, "drawn", ()))
    val: dict[str, Dataset] = {}
    for tag, paths in data.val_sets.items():
        if share_of(paths) is None:
            val[tag] = _open(_key_of(tag), paths, data, loader, seed=seed)
        else:
            if drawn:
                warn(
                    f"{_key_of(tag)} is {paths}, but the items of {train.name} draw random numbers "
                    f"({', '.join(drawn)}), so validation items are random, too: augment in `transform` of the workload"
                )
            train, val[tag] = _hold_out(f"{_key_of(tag)} is {paths}", data, train)
    for tag, rows in val.items():
        _warn_of_shared_rows(data, train, tag, rows)
        check_meaning(_key_of(tag), train, rows)
    return _mixed(data, train, seed), val


def _key_of(tag: str) -> str:
    """The config key of a validation set, for messages: data.val, or data.val.<name>."""
    return f"data.{tag.replace('/', '.')}"


def _open(
    key: str, named: str | list[str] | dict[str, float], data: Data, loader: LoaderConfig, *, seed: int
) -> Dataset:
    """All rows that a key names, with pixels in place of encoded images."""
    is_train = key == "data.train"
    fields = data.fields if is_train else data.val_fields or data.fields
    source: Dataset
    if data.dataset != "none" and data.window:
        raise UserError(
            f"data.window is {data.window}, which is for HDF5 files, but data.dataset is {data.dataset}: let its items "
            "be windows, or write its series to a file (python convert.py arrays)"
        )
    if data.dataset == "none":
        paths = list(named) if isinstance(named, dict) else named
        size = (data.image_size, data.image_size)
        sizes = dict.fromkeys(fields, size) if data.image_size else {}
        codecs = image_codecs(sizes, min_scale=data.min_crop_scale)
        if data.window:
            source = open_windows(key, paths, fields, data.window, stride=data.stride, cache=data.cache)
        else:
            source = open_store(key, paths, fields, codecs, cache=data.cache)
    elif isinstance(named, dict):
        raise UserError("data.train has weights, which work for HDF5 files only; use data.dataset=none")
    else:
        n_local = read_launch().local_world_size
        n_workers = cpus_of_rank(n_local) if loader.num_workers == "auto" else loader.num_workers
        if n_workers and not is_train:  # the sets are read in turn, so together they need the processes of one
            n_workers = max(1, n_workers // len(data.val_sets))
        workers_key = "loader.num_workers" if n_workers else ""
        source = items = open_dataset(key, named, fields, factory=data.dataset, seed=seed, workers_key=workers_key)
        if n_workers:
            source = items.with_workers(n_workers, loader.timeout_s)
    _check_images(data, source)
    return source


def image_codecs(sizes: Mapping[str, tuple[int, int]], **options: float | None) -> dict[str, Codec]:
    """{field: codec for image files}. sizes: {field: (height, width) of its pixels}. options: of `ImageCodec`."""
    # Only projects with an image workload have the package fastgpu.images.
    if not sizes or not find_spec("fastgpu.images"):
        return {}
    column = import_module("fastgpu.images.column")
    return {field: column.ImageCodec(size, **options) for field, size in sizes.items()}


def _check_images(data: Data, source: Dataset) -> None:
    """Raise UserError if the images cannot be decoded as the config says."""
    if any(field.codec for field in source.fields.values()):
        if data.image_size:
            raise UserError(f"{source.name} has encoded images, which this project cannot decode")
        raise UserError(f"{source.name} has encoded images; set data.image_size to their height and width, such as 224")
    if not source.decoding:
        if data.image_size or data.min_crop_scale < 1:
            warn(f"data.image_size and data.min_crop_scale have no effect: {source.name} has no encoded images")
        return
    if not find_spec("simplejpeg"):
        warn("without simplejpeg, JPEG files take longer to decode; install it")
    masks = [f"{name}, {field}" for name, field in source.fields.items() if len(field.shape) == 2]
    if masks and data.min_crop_scale < 1:
        raise UserError(
            f"data.min_crop_scale is {data.min_crop_scale:g}, but {masks[0]} of {source.name} would not be cut "
            "and resized like the images; use 1"
        )


def _warn_of_shared_rows(data: Data, train: Dataset, tag: str, val: Dataset) -> None:
    """Warn if validation rows are trained on, as with the pattern `photos-*.h5`, which also matches photos-val.h5."""
    if data.val_fields not in ({}, data.fields):  # other fields of the same rows
        return
    named = data.val_sets[tag]
    names = _names_of_files(data.train, train)
    shared = names.keys() & _names_of_files(named, val).keys()
    if share_of(named) is not None:  # if a file is named twice, a row held out of one copy is trained on in the other
        shared = {file for file, copies in names.items() if len(copies) > 1}
    if shared:
        warn(
            f"{_key_of(tag)} ({named}) has rows of {', '.join(sorted(names[file][0] for file in shared))} that are "
            "trained on, too: its metrics are too good; name each file once, and hold rows out with data.val=10%"
        )


def _names_of_files(named: object, source: Dataset) -> dict[tuple[Path, str], list[str]]:
    """{(resolved path, group) of each file: names under which the config has it}"""
    stored = source.whole or source
    files = stored.files if isinstance(stored, HDF5Dataset) else [(str(named), "/")]
    names: dict[tuple[Path, str], list[str]] = {}
    for path, group in files:
        text = path if group == "/" else f"{path}::{group}"
        names.setdefault((Path(path).resolve(), group.strip("/")), []).append(text)
    return names


def _hold_out(asked: str, data: Data, source: Dataset) -> tuple[Dataset, Dataset]:
    """(training rows, validation rows) of a share of data.train. asked: the key and its value, for messages."""
    if data.val_fields:
        raise UserError(f"{asked}, a share of data.train, so data.val_fields should be {{}}")
    if isinstance(source, WindowDataset):
        return _hold_out_steps(asked, data, source)
    n_rows = len(source)
    n_val = round((data.val_share or 0) * n_rows)
    if not 0 < n_val < n_rows:
        raise UserError(f"{asked}, which is {n_val} of the {n_rows} rows of {source.name}; use another share")
    subsets = hold_out(source.block_rows, n_val)
    train, val = (source.select(subset, f"{source.name} ({len(subset):,} of its rows)") for subset in subsets)
    return train, val


def _hold_out_steps(asked: str, data: Data, windows: WindowDataset) -> tuple[Dataset, Dataset]:
    length, name = windows.length, windows.name
    split = hold_out_steps(windows.recordings, data.val_share or 0)
    for recordings, purpose in zip(split, ("train", "validate"), strict=True):
        if recordings.runs.counts.max(initial=0) < length:
            raise UserError(
                f"{asked}, which leaves no {length} neighbouring steps (data.window) of {name} to {purpose} on; "
                "use another share, or a smaller window"
            )
    if n_lost := sum(int(each.runs.counts[each.runs.counts < length].sum()) for each in split):
        warn(f"{asked}, which cuts a recording: {n_lost:,} of its steps are too few for a window of {length} steps")
    train, val = (WindowDataset(windows.steps, recordings, length, windows.stride) for recordings in split)
    return train, val


def _mixed(data: Data, source: Dataset, seed: int) -> Dataset:
    """The training rows, mixed as the weights of data.train or data.balance say."""
    if isinstance(data.train, dict):
        if data.balance == "classes":
            raise UserError("data.balance is classes and data.train has weights; use one of the two")
        groups = _group_by_file(data.train, source)
    elif data.balance == "classes":
        groups = _group_by_class(source)
    else:
        return source
    if isinstance(source.selection, Subset):
        members = source.selection.rows()
        of_row = np.full_like(groups.groups, -1)  # held-out rows are in no group
        of_row[members] = groups.groups[members]
        groups = groups._replace(groups=of_row)
    if len(lost := np.setdiff1d(np.arange(len(groups.names)), groups.groups)):
        name = groups.names[lost[0]]
        if data.val_share is None:
            raise UserError(f"data.train: {name} has no {data.window} neighbouring steps (data.window); leave it out")
        raise UserError(f"data.val is {data.val}, which leaves no row of {name} to train on; use a smaller share")
    return source.select(Mixture(groups, source.block_rows, data.batch_size, seed))


def _group_by_file(weights: Mapping[str, float], source: Dataset) -> Groups:
    """A group for each path in `weights`, with the rows of all files that the path matches."""
    assert isinstance(source, HDF5Dataset | WindowDataset)
    n_files = [len(expand("data.train", path)) for path in weights]
    group_of_file = np.repeat(np.arange(len(n_files), dtype=np.int16), n_files)
    return Groups(tuple(weights), tuple(weights.values()), group_of_file.repeat(source.part_rows))


def class_labels(source: Dataset) -> np.ndarray | None:
    """(rows,) whole numbers: the field `labels` of all rows. None: no such field is in memory."""
    labels = source.stored_column("labels")
    return labels if labels is not None and labels.ndim == 1 and labels.dtype.kind in "bui" else None


def _group_by_class(source: Dataset) -> Groups:
    labels = class_labels(source)
    if labels is None:
        raise UserError(
            f"data.balance is classes, which needs a field `labels` with a whole number for each row of {source.name}; "
            "a Dataset also needs them as an attribute `labels` or `targets`"
        )
    classes, groups = np.unique(labels, return_inverse=True)
    names = tuple(f"class {label}" for label in classes.tolist())
    return Groups(names, (1,) * len(classes), groups.astype(np.int32))
