"""A trained model to use: model.json says what it is, model.safetensors has its weights. Every checkpoint has both.

They need no other file: neither the training data nor model.pt, which is for resuming. Tensors that share memory (tied
weights) are stored once, under one of their names; `safetensors.torch.load_model` fills all of them.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor

from fastgpu import TEMPLATE_VERSION
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field
from fastgpu.storage.meaning import check_meaning

DESCRIPTION = "model.json"
WEIGHTS = "model.safetensors"
FORMAT = 1


class ModelToUse(NamedTuple):
    """What is written to the two files."""

    model: Any
    """A module, or another object with its state_dict."""
    description: Mapping[str, Any]
    """The content of model.json: that of `describe_model`, and epoch, step and metrics of the checkpoint."""


def describe_model(
    config: Mapping[str, Any], sources: tuple[Dataset, Dataset], card: Mapping[str, Any], best: tuple[str, str]
) -> dict[str, Any]:
    """The part of model.json that is known when a run starts.

    config: {dotted key: value}, without `auto`. sources: training and validation rows. card: `Workload.card()`.
    best: see `Workload.best`. Raises UserError if the card is not made of JSON values.
    """
    train, val = sources
    fields = val.fields | train.fields
    described = dict(train.attributes)
    if val.decoding:  # what is predicted will be decoded like this, perhaps to another size than in training
        fields = train.fields | val.fields
        described["preprocessing"] = val.attributes["preprocessing"]
    try:
        attributes = json.loads(json.dumps(described | dict(card), default=_to_python))
    except (TypeError, ValueError) as error:
        raise UserError(
            f"workloads/{config['workload']}.py: card(), and the attributes of {train.name}, should be JSON values "
            f"(text, numbers, lists); {error}"
        ) from None
    names = config["data.fields"] | config["data.val_fields"]
    return {
        "format": FORMAT,
        "template_version": TEMPLATE_VERSION,
        "workload": config["workload"],
        "config": dict(config),
        "options": {key.removeprefix("model."): value for key, value in config.items() if key.startswith("model.")},
        "fields": {name: _field(field, names.get(name, name)) for name, field in fields.items()},
        "attributes": attributes,
        "rows": _digest_of_rows(train),
        "val_rows": _digest_of_rows(val),
        "best": list(best),
        "batch_size": config["data.batch_size"],
        "precision": config["train.precision"],
    }


def _field(field: Field, dataset: str) -> dict[str, Any]:
    return {
        "dtype": str(field.dtype),
        "shape": list(field.shape),
        "is_ragged": field.is_ragged,
        "n_items": field.n_items,
        "dataset": dataset.lstrip("/"),
    }


def _to_python(value: Any) -> Any:
    """Arrays, tensors and NumPy's numbers as lists and numbers."""
    if isinstance(value, np.ndarray | np.generic | Tensor):
        return value.tolist()
    raise TypeError(f"it has a {type(value).__name__}")


def _digest_of_rows(source: Dataset) -> str:
    return hashlib.sha256(str(source.identity).encode()).hexdigest()[:12]


def read_description(folder: Path) -> dict[str, Any]:
    """The content of model.json in an intact checkpoint."""
    description: dict[str, Any] = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    return description


def refuse_other_meaning(folder: Path, description: Mapping[str, Any]) -> None:
    """Raise UserError if classes or items have other numbers than those that a checkpoint was trained with.

    folder: of the checkpoint. description: see `describe_model`.
    """
    saved, now = Dataset(), Dataset()
    saved.name, now.name = str(folder), "data.train"
    saved.attributes = read_description(folder)["attributes"]
    now.attributes = dict(description["attributes"])
    check_meaning("run.resume", saved, now, preparation=False)


def write_model(folder: Path, to_use: ModelToUse) -> None:
    """Write both files. Raises OSError if the disk refuses."""
    (folder / DESCRIPTION).write_text(json.dumps(to_use.description, indent=1), encoding="utf-8")
    try:
        save_model(to_use.model, str(folder / WEIGHTS))
    except SafetensorError as error:
        raise OSError(str(error)) from None
    (folder / WEIGHTS).chmod((folder / DESCRIPTION).stat().st_mode)  # safetensors lets nobody else read it


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as state.json has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
