"""A trained model: found, read from its checkpoint, and exported as one file."""

import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_model as fill
from torch import Tensor, nn
from torch.export import Dim

import workloads
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field, Ragged, Rows
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
    """A model that is ready to use, on the CPU and in eval mode. card: the content of model.json. rows: see
    `training_rows`. folder: the checkpoint."""

    model: nn.Module
    workload: Workload
    card: dict[str, Any]
    rows: Dataset
    folder: Path


def load_model(path: str | Path) -> Trained:
    """Build the model of a checkpoint from its model.json and model.safetensors. No other file is needed.

    path: a checkpoint, or a copy of these two files; or a run, whose best checkpoint is taken, or else its last one.
    Raises UserError if there is none, if it is damaged, or if it does not fit the code of the workload.
    """
    run = Path(path)
    saved = [run] if (run / DESCRIPTION).exists() else [*newest_first(run, "best"), *newest_first(run, "last")]
    if not saved:
        raise UserError(f"{path} is neither a run nor a checkpoint; name a folder such as runs/first")
    folder = saved[0]
    try:
        if (folder / "state.json").exists():  # a copy of two files has no checksums to compare with
            digests = json.loads((folder / "state.json").read_bytes())["sha256"]
            for name in (DESCRIPTION, WEIGHTS):
                if sha256_of(folder / name) != digests[name]:
                    raise ValueError(f"{name} does not match its checksum")
        card = _Card.model_validate_json((folder / DESCRIPTION).read_bytes()).model_dump()
        rows = training_rows(card)
        kind = workloads.load(card["workload"])
        options = kind.Options.model_validate_json(json.dumps(card["options"]))
        workload = kind(options, rows, rows)
        workload.options = options
        model = workload.model()
        fill(model, folder / WEIGHTS)
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder} is damaged, or of other code than workloads/ has: {reason}") from None
    return Trained(model.eval(), workload, card, rows, folder)


def training_rows(card: Mapping[str, Any]) -> Dataset:
    """The fields and attributes of the rows that a model was trained on, as a source without rows. card: model.json."""
    rows = Dataset()
    rows.name = "the training rows"
    rows.attributes = card["attributes"]
    rows.block_rows = np.empty(0, np.int32)
    rows.fields = {}
    for name, field in card["fields"].items():
        mean_values = 0.0 if field["is_ragged"] else None
        rows.fields[name] = Field(np.dtype(field["dtype"]), tuple(field["shape"]), mean_values, field["n_items"])
    rows.lengths = {name: rows.block_rows for name, field in rows.fields.items() if field.is_ragged}
    return rows


@torch.no_grad()
def export(trained: Trained, path: Path, *, replace: bool = False) -> None:
    """Write the program of the model, which takes any number of rows as they lie in the training file (of ragged rows
    perhaps two or more). Its metadata are model.json: its inputs, how images were prepared, the names of the classes.

    Raises UserError if the model cannot be exported, if the program gives other numbers than the model, or if the file
    exists and `replace` is false.
    """
    model, names = trained.model, trained.workload.inputs
    text = json.dumps({**trained.card, "inputs": names})
    calls: list[tuple[Tensor, ...]] = []  # what `predict` of the workload passes to the model
    with model.register_forward_pre_hook(lambda _, args: calls.append(args)):
        for n_rows in (2, 5):
            trained.workload.predict(model, make_rows(trained, n_rows))
    inputs, others = calls[0], calls[-1]
    with new_file(path, replace=replace) as partial, warnings.catch_warnings(action="ignore"):  # of the exporters
        try:
            program = torch.export.export(model, inputs, dynamic_shapes=[{0: Dim.AUTO}] * len(inputs))
            found, expected = program.module()(*others), model(*others)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
            if path.suffix == ".onnx":
                own_names = names if len(names) == len(inputs) else None  # a ragged field is two inputs
                onnx: Any = torch.onnx.export(program, (), input_names=own_names, dynamo=True, verbose=False)
                onnx.model.metadata_props[DESCRIPTION] = text
                onnx.save(partial, external_data=False)
            else:
                content = io.BytesIO()  # torch's own writer aborts the process if the disk is full
                torch.export.save(program, content, extra_files={DESCRIPTION: text})
                partial.write_bytes(content.getbuffer())
        except Exception as error:  # the exporters raise errors of many kinds
            reason = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
            raise UserError(f"{path} was not written: {reason}") from error


def make_rows(trained: Trained, n_rows: int) -> Rows:
    """Random rows with the inputs of the model, on the CPU, the same at each call. Ragged rows have two values."""
    rng = np.random.default_rng(0)
    columns: dict[str, Tensor | Ragged] = {}
    for name in trained.workload.inputs:
        field = trained.rows.fields[name]
        shape = (2 * n_rows if field.is_ragged else n_rows, *field.shape)
        is_image = field.dtype == np.uint8 and len(field.shape) > 1
        end = field.n_items or (256 if is_image else 2)  # nobody knows how many other whole numbers there may be
        values = rng.standard_normal(shape) if field.dtype.kind == "f" else rng.integers(0, end, shape)
        columns[name] = tensor = torch.from_numpy(values.astype(field.dtype))
        if field.is_ragged:
            offsets = torch.arange(0, 2 * n_rows + 1, 2, dtype=torch.int32)
            columns[name] = Ragged(tensor, offsets, offsets.numpy())
    return Rows(columns)
