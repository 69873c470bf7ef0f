"""Finds a checkpoint, and builds and fills its model."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as fill
from torch import nn

import workloads
from fastgpu.process.config import Section
from fastgpu.process.launch import UserError, warn
from fastgpu.rows.contract import Source
from fastgpu.rows.field import Field
from fastgpu.rows.rows import Ragged, Rows
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
    return Trained(model.eval(), workload, card)


def check_labelled(trained: Trained, source: Source) -> None:
    """Let the workload check rows with labels as it checks validation rows. Raises UserError if it refuses them."""
    workloads.load(trained.card["workload"])(_read_options(trained.card), DescribedSource(trained.card), source)


def _read_options(card: Mapping[str, Any]) -> Section:
    return workloads.load(card["workload"]).Options.model_validate_json(json.dumps(card["options"]))


def rehearse(
    call: Callable[[nn.Module, Rows], Mapping[str, Any]], trained: Trained
) -> tuple[dict[str, Field], Mapping[str, Any]]:
    """The fields that `Workload.predict` or `Workload.score` takes from a batch, and its result for two made-up rows.

    Raises UserError if it takes a field that the training rows did not have.
    """
    columns = _Recorder(make_rows(trained.fields, 2).columns)
    try:
        with torch.no_grad():
            result = call(trained.model, Rows(columns))
    except KeyError as error:
        raise UserError(
            f"workloads/{trained.card['workload']}.py takes {error}, which model.json does not have"
        ) from None
    return {name: field for name, field in trained.fields.items() if name in columns.read}, result


class _Recorder(dict[str, Any]):
    """Columns that remember which of them were taken."""

    def __init__(self, columns: Mapping[str, Any]):
        super().__init__(columns)
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)


def make_rows(fields: Mapping[str, Field], n_rows: int, *, random: bool = False) -> Rows:
    """Made-up rows on the CPU: zeros, and in ragged fields the values 0, 1 and 2.

    random: pixels and floats are random instead. Other integers may number something, so they stay zeros.
    """
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {}
    for name, field in fields.items():
        if field.is_ragged:
            values = np.tile(np.arange(min(3, field.n_items or 3)), n_rows).astype(field.dtype)
            offsets = np.linspace(0, len(values), n_rows + 1).astype(np.int32)
            columns[name] = Ragged(torch.from_numpy(values), torch.from_numpy(offsets), offsets)
            continue
        array = np.zeros((n_rows, *field.shape), field.dtype)
        if random and field.dtype.kind == "f":
            array = np.asarray(rng.standard_normal(array.shape), field.dtype)
        elif random and len(field.shape) > 1:
            array = rng.integers(0, 256, array.shape).astype(field.dtype)
        columns[name] = torch.from_numpy(array)
    return Rows(columns)
