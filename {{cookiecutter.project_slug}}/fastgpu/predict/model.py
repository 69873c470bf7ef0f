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
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source
from fastgpu.rows.field import Field
from fastgpu.run.checkpoint import newest_first
from fastgpu.run.model_files import DESCRIPTION, FORMAT, WEIGHTS, DescribedSource, sha256_of
from workloads import Workload

KEYS = ("workload", "options", "attributes", "batch_size", "precision")
"""What model.json must hold besides its fields."""


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

    Raises UserError if there is none.
    """
    if (path / DESCRIPTION).exists():
        return path
    saved = [*newest_first(path, "best"), *newest_first(path, "last")]
    if not saved:
        raise UserError(f"{path} is neither a run nor a checkpoint; name a folder such as runs/first")
    return saved[0]


def read_description(folder: Path) -> dict[str, Any]:
    """The content of model.json.

    Raises UserError if it is missing, damaged or of another format, or if one of both files does not match its checksum
    in state.json. A copy of the two files without state.json is not checked.
    """
    if not (folder / WEIGHTS).exists() or not (folder / DESCRIPTION).exists():
        raise UserError(f"{folder} has no {DESCRIPTION} or no {WEIGHTS}; use another checkpoint")
    if (folder / "state.json").exists():
        sha256 = _read_json(folder / "state.json", "sha256")["sha256"]
        for name in (DESCRIPTION, WEIGHTS):
            if sha256_of(folder / name) != sha256.get(name):
                raise UserError(f"{folder}: {name} does not match its checksum; use another checkpoint")
    description = _read_json(folder / DESCRIPTION, "format")
    if description["format"] != FORMAT:
        raise UserError(f"{folder}/{DESCRIPTION} has format {description['format']}; this version reads {FORMAT}")
    try:
        for key in KEYS:
            description[key]
        DescribedSource(description)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{folder}/{DESCRIPTION} is damaged ({reason}); use another checkpoint") from None
    return description


def _read_json(path: Path, key: str) -> dict[str, Any]:
    """A file that should hold an object with this key. Raises UserError if it does not."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is damaged ({error}); use another checkpoint") from None
    if not isinstance(content, dict) or key not in content:
        raise UserError(f"{path} is damaged (it has no {key}); use another checkpoint")
    return content


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
