"""What a run is, in words and numbers: for model.json, for the other ranks, and for a person."""

import hashlib
import json
from collections.abc import Mapping
from operator import methodcaller
from typing import Any

import numpy as np
import torch

from fastgpu import TEMPLATE_VERSION
from fastgpu.feed.sizes import Sizes
from fastgpu.process.launch import UserError
from fastgpu.process.machine import format_bytes
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Mixture

MODEL_FORMAT = 1
MAY_DIFFER = ("data.train", "data.val", "data.tier")
"""Keys that nodes may set differently, besides the section `loader`. Files may have other names: their rows
are compared. The others decide how rows are read, not which."""


def describe_model(config: Mapping[str, Any], train: Dataset, val: Dataset, card: Mapping[str, Any]) -> dict[str, Any]:
    """The part of model.json that is known when a run starts.

    config: {dotted key: value}, without `auto`. train, val: the rows. card: `Workload.card()`. Raises UserError if the
    card is not made of JSON values.
    """
    fields = val.fields | train.fields
    described = dict(train.attributes)
    if val.decoding:  # what is predicted will be decoded like this, perhaps to another size than in training
        fields = train.fields | val.fields
        described["preprocessing"] = val.attributes["preprocessing"]
    try:  # arrays, tensors and NumPy's numbers become lists and numbers
        attributes = json.loads(json.dumps(described | dict(card), default=methodcaller("tolist")))
    except (AttributeError, TypeError, ValueError) as error:
        raise UserError(
            f"workloads/{config['workload']}.py: card(), and the attributes of {train.name}, should be JSON values "
            f"(text, numbers, lists); {error}"
        ) from None
    names = config["data.fields"] | config["data.val_fields"]
    return {
        "format": MODEL_FORMAT,
        "template_version": TEMPLATE_VERSION,
        "workload": config["workload"],
        "config": dict(config),
        "options": {key.removeprefix("model."): value for key, value in config.items() if key.startswith("model.")},
        "fields": {
            name: {
                "dtype": str(field.dtype),
                "shape": list(field.shape),
                "is_ragged": field.is_ragged,
                "n_items": field.n_items,
                "dataset": names.get(name, name).lstrip("/"),
            }
            for name, field in fields.items()
        },
        "attributes": attributes,
        "rows": _digest_of_rows(train),
        "val_rows": _digest_of_rows(val),
        "batch_size": config["data.batch_size"],
        "precision": config["train.precision"],
    }


def _digest_of_rows(source: Dataset) -> str:
    return hashlib.sha256(str(_identity(source)).encode()).hexdigest()[:12]


def _identity(source: Dataset) -> dict[str, object]:
    """What tells rows from others."""
    fields = {f"field {name}": field for name, field in source.fields.items()}
    return {"the number of rows": len(source), **fields, "the digest of the rows": source.digest}


def identify_job(
    config: Mapping[str, object], splits: tuple[Dataset, Dataset], order: BlockSampler, precision: str
) -> dict[str, object]:
    """{what all ranks must have the same: its value}. config: {dotted key: value}."""
    train, val = splits
    settings = {key: value for key, value in config.items() if key not in MAY_DIFFER and not key.startswith("loader.")}
    return {
        **{f"data.train: {name}": value for name, value in _identity(train).items()},
        **{f"data.val: {name}": value for name, value in _identity(val).items()},
        "fastgpu.TEMPLATE_VERSION": TEMPLATE_VERSION,
        "the version of torch": torch.__version__,
        "the version of numpy": np.__version__,
        **settings,
        "the order of rows": order.identity,
        "train.precision": precision,
    }


def describe_feed(source: Dataset, sizes: Sizes, order: BlockSampler) -> str:
    """Where the rows are kept, in which portions they move, and how many of them an epoch has."""
    readers = "worker processes" if sizes.uses_workers else "reader threads"
    free = f"{format_bytes(sizes.free['host'])} of memory free"
    if sizes.free["device"] != sizes.free["host"]:  # the device is not the CPU
        free = f"{format_bytes(sizes.free['device'])} free on its device and {format_bytes(sizes.free['host'])} in RAM"
    lines = [
        f"rows: {source.name}, {format_bytes(sizes.need)} with the validation rows, kept on the {sizes.tier} tier "
        f"(each rank has {free})",
        f"batches: {order.global_batch_size} rows over all ranks, {sizes.batch_size} on each; {sizes.pool_batches} "
        f"batches in a pool; {sizes.canonical_ranks} canonical ranks; {readers} on each rank: {sizes.n_readers}",
    ]
    if source.decoding:
        lines.append(f"images: {source.decoding}")
    if isinstance(source.selection, Mixture):
        lines.append(f"each epoch: {source.selection.describe()}")
    elif order.total_size < len(source):
        lines.append(f"each epoch: {order.total_size:,} of {len(source):,} rows; the rest does not fill a batch")
    return "\n".join(lines)
