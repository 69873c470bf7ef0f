"""Finds a checkpoint, reads its model.json, and builds and fills its model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_model as fill
from torch import nn

import workloads
from fastgpu.predict.inputs import DescribedSource
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
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
        card = _read_card(folder)
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


def _read_card(folder: Path) -> dict[str, Any]:
    """The content of model.json. A copy of the two files without state.json has no checksums to compare with."""
    if (folder / "state.json").exists():
        digests = json.loads((folder / "state.json").read_bytes())["sha256"]
        for name in (DESCRIPTION, WEIGHTS):
            if sha256_of(folder / name) != digests[name]:
                raise ValueError(f"{name} does not match its checksum")
    return _Card.model_validate_json((folder / DESCRIPTION).read_bytes()).model_dump()
