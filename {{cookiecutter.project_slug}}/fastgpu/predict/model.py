"""Finds a checkpoint, and builds and fills its model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as fill
from torch import nn

import workloads
from fastgpu.process.config import Section
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.contract import Source
from fastgpu.rows.field import Field
from fastgpu.run.checkpoint import newest_first
from fastgpu.run.model_files import DESCRIPTION, WEIGHTS, DescribedSource, read_description
from workloads import Workload


class Trained(NamedTuple):
    """A model that is ready to use, on the CPU and in eval mode."""

    model: nn.Module
    workload: Workload
    card: dict[str, Any]
    """The content of model.json."""

    @property
    def fields(self) -> dict[str, Field]:
        """The fields of the training and validation rows."""
        return DescribedSource(self.card).fields


def find_checkpoint(path: Path) -> Path:
    """The folder itself if it holds a model; of the folder of a run the best checkpoint, or else the last one.

    Checkpoints of older versions, which have no model.json, are passed over if there is another one. Raises UserError
    if there is none.
    """
    if (path / DESCRIPTION).exists() or (path / "model.pt").exists():
        return path
    saved = [*newest_first(path, "best"), *newest_first(path, "last")]
    if not saved:
        raise UserError(f"{path} is neither a run nor a checkpoint; name a folder such as runs/first")
    chosen = next((folder for folder in saved if (folder / DESCRIPTION).exists()), saved[0])
    if chosen != saved[0]:
        warn(f"{saved[0]} is of an older version and has no {DESCRIPTION}; {chosen} is used")
    return chosen


def load_model(folder: str | Path) -> Trained:
    """Build the model of a checkpoint from its model.json and model.safetensors. No other file is needed.

    Raises UserError if the files are missing or damaged, or do not fit the code of the workload.
    """
    folder = Path(folder)
    card = read_description(folder)
    where = f"{folder} does not fit workloads/{card['workload']}.py"
    make = workloads.load(card["workload"])
    described = DescribedSource(card)
    try:
        workload = make(_read_options(card), described, described)
        model = workload.model()
        fill(model, folder / WEIGHTS)
    except ValidationError as error:
        problem = error.errors()[0]
        raise UserError(f"{where}: model.{'.'.join(map(str, problem['loc']))}: {problem['msg']}") from None
    except (RuntimeError, SafetensorError) as error:
        raise UserError(f"{where}: {' '.join(str(error).split())[:200]}") from None
    for name in workload.inputs:
        if name not in described.fields:
            raise UserError(
                f"{where}: it declares the input {name}, which is no field of the rows; there are "
                f"{', '.join(described.fields)}"
            )
    return Trained(model.eval(), workload, card)


def check_labelled(trained: Trained, source: Source) -> None:
    """Let the workload check rows with labels as it checks validation rows. Raises UserError if it refuses them."""
    workloads.load(trained.card["workload"])(_read_options(trained.card), DescribedSource(trained.card), source)


def _read_options(card: Mapping[str, Any]) -> Section:
    return workloads.load(card["workload"]).Options.model_validate_json(json.dumps(card["options"]))
