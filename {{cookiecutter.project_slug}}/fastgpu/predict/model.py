"""Finds a checkpoint, reads its model.json, and builds and fills its model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_model as fill
from torch import nn

import workloads
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field
from fastgpu.run.checkpoint import DESCRIPTION, WEIGHTS, newest_first, sha256_of
from workloads import Workload


class _Card(BaseModel, extra="allow"):
    """What model.json must hold; fastgpu/run/record.py describes it."""

    format: Literal[1]
    workload: str
    options: dict[str, Any]
    fields: dict[str, dict[str, Any]]
    attributes: dict[str, Any]
    epoch: int
    metrics: dict[str, float]
    batch_size: int
    precision: Literal["bf16", "fp16", "fp32"]


class Trained(NamedTuple):
    """A model that is ready to use, on the CPU and in eval mode."""

    model: nn.Module
    workload: Workload
    card: dict[str, Any]
    """The content of model.json."""


class DescribedSource(Dataset):
    """The rows that a model was trained on, by their fields and attributes: there are no rows."""

    def __init__(self, description: Mapping[str, Any]):
        self.name = "the training rows"
        self.attributes = description["attributes"]
        self.block_rows = np.empty(0, np.int32)
        self.fields = {}
        for name, field in description["fields"].items():
            mean_values = 0.0 if field["is_ragged"] else None
            self.fields[name] = Field(np.dtype(field["dtype"]), tuple(field["shape"]), mean_values, field["n_items"])
        self.lengths = {name: self.block_rows for name, field in self.fields.items() if field.is_ragged}


def find_checkpoint(path: Path) -> Path:
    """The folder itself if it holds a model; of the folder of a run the best checkpoint, or else the last one.

    Raises UserError if there is none.
    """
    if (path / DESCRIPTION).exists():
        return path
    saved = [*newest_first(path, "best"), *newest_first(path, "last")]
    if not saved:
        raise UserError(f"{path} is neither a run nor a checkpoint; name a folder such as runs/first")
    return saved[0]


def load_model(folder: str | Path) -> Trained:
    """Build the model of a checkpoint from its model.json and model.safetensors. No other file is needed.

    Raises UserError if the files are missing or damaged, or do not fit the code of the workload.
    """
    folder = Path(folder)
    try:
        if (folder / "state.json").exists():  # a copy of two files has no checksums to compare with
            digests = json.loads((folder / "state.json").read_bytes())["sha256"]
            for name in (DESCRIPTION, WEIGHTS):
                if sha256_of(folder / name) != digests[name]:
                    raise ValueError(f"{name} does not match its checksum")
        card = _Card.model_validate_json((folder / DESCRIPTION).read_bytes()).model_dump()
        workload = make_workload(card)
        model = workload.model()
        fill(model, folder / WEIGHTS)
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder} is damaged, or of other code than workloads/ has: {reason}") from None
    return Trained(model.eval(), workload, card)


def make_workload(card: Mapping[str, Any], val: Dataset | None = None) -> Workload:
    """The workload of a checkpoint. val: rows with labels, which it checks as in training; None: there are none.

    Raises UserError if it refuses them.
    """
    kind = workloads.load(card["workload"])
    options = kind.Options.model_validate_json(json.dumps(card["options"]))
    train = DescribedSource(card)
    return kind(options, train, train if val is None else val)
