"""The rows that config.yaml names: kinds, values, and that validation rows are not trained on."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from fastgpu.feed import Loader
from fastgpu.rows import Ragged, Rows

MAX_ROWS = 5_000
"""Rows of each split that are looked at, fewer if they are large."""
MAX_BYTES = 64 << 20


def first_batches(loader: Loader, max_rows: int = MAX_ROWS) -> Iterator[Rows]:
    """Batches from the beginning of an epoch. Each is valid until the next one is asked for."""
    n_rows = n_bytes = 0
    for batch in loader.batches(0):
        yield batch.slice(0, min(len(batch), max_rows - n_rows))
        n_rows += len(batch)
        n_bytes += sum(values_of(column).nbytes for column in batch.columns.values())
        if n_rows >= max_rows or n_bytes >= MAX_BYTES * max_rows / MAX_ROWS:
            return


def values_of(column: torch.Tensor | Ragged) -> torch.Tensor:
    """All values of a column."""
    return column.values if isinstance(column, Ragged) else column


def row_keys(rows: Rows, names: list[str]) -> list[int]:
    """A number for the bytes of each row."""
    columns = [rows[name] for name in names]
    keys = []
    for number in range(len(rows)):
        row = [values_of(column[number : number + 1]).contiguous().numpy().tobytes() for column in columns]
        keys.append(hash(tuple(row)))
    return keys


def test_the_first_block_of_each_file_is_as_it_was_written(config):
    """convert.py writes the SHA-256 of each block of rows; `convert.py check` checks all of them."""
    if config.data.dataset != "none":
        pytest.skip("the rows come from a Dataset")
    for named in (config.data.train, *config.data.val_sets.values()):
        for path in [named] if isinstance(named, str) else named:
            name, _, group = path.partition("::")
            for file_name in sorted(Path().glob(name)) if not Path(name).is_absolute() else [Path(name)]:
                with h5py.File(file_name) as file:
                    check_first_blocks(file[group or "/"])


def check_first_blocks(group: h5py.Group) -> None:
    """Compare the first block of each dataset with its checksum, if it has one."""
    for name in group.get("fastgpu_sha256", {}):
        rows = group[name]
        if isinstance(rows, h5py.Dataset) and rows.chunks:
            block = rows[: rows.chunks[0]]
            assert hashlib.sha256(block.tobytes()).digest() == bytes(group["fastgpu_sha256"][name][0]), rows


def test_both_splits_have_the_fields_of_the_config(parts):
    data = parts.config.data
    assert parts.splits.train.fields.keys() == data.fields.keys()
    for val in parts.splits.val.values():
        assert val.fields.keys() == (data.val_fields or data.fields).keys()
        for name in parts.splits.train.fields.keys() & val.fields.keys():
            assert parts.splits.train.fields[name].dtype == val.fields[name].dtype


def test_no_value_is_nan_or_infinite(parts):
    for loader in (parts.loader, *parts.val_loaders.values()):
        for rows in first_batches(loader):
            for name in rows.columns:
                values = values_of(rows[name])
                assert not values.is_floating_point() or bool(values.isfinite().all()), name


def test_labels_that_are_whole_numbers_fit_the_class_names(parts):
    names = parts.splits.train.attributes.get("class_names")
    for loader in (parts.loader, *parts.val_loaders.values()):
        for rows in first_batches(loader):
            if "labels" not in rows.columns or rows["labels"].is_floating_point():
                pytest.skip("the rows have no labels that are whole numbers")
            assert int(rows["labels"].min()) >= 0
            assert not names or rows["labels"].dim() > 1 or int(rows["labels"].max()) < len(names)


def test_most_validation_rows_are_not_trained_on(build):
    """A few equal rows are no mistake: pictures repeat, and users like the same two items. 5 % are a leak."""
    parts = build("data.min_crop_scale=1", "data.echo=1")  # of encoded images, both splits have the centre
    train, val = parts.splits.train, next(iter(parts.splits.val.values()))
    shared = sorted(train.fields.keys() & val.fields.keys())
    names = [name for name in shared if train.fields[name].shape or train.fields[name].is_ragged] or shared
    trained_on = [key for rows in first_batches(parts.loader, 4 * MAX_ROWS) for key in row_keys(rows, names)]
    first = next(iter(parts.val_loaders.values()))  # of several sets, the first one usually decides
    validated = [key for rows in first_batches(first) for key in row_keys(rows, names)]
    equal = np.flatnonzero(np.isin(validated, trained_on))
    # Of a large file, only a part of the training rows was looked at.
    leaked_pct = 100 * len(equal) / len(validated) * max(1, len(train) / len(trained_on))
    assert leaked_pct < 5, f"{leaked_pct:.0f} % of the validation rows are trained on, such as {equal[:9].tolist()}"
