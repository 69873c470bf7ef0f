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
    """A model that is ready to use, on the CPU and in eval mode."""

    model: nn.Module
    workload: Workload
    card: dict[str, Any]
    """The content of model.json."""


def training_rows(card: Mapping[str, Any]) -> Dataset:
    """The rows that a model was trained on, by their fields and attributes: there are no rows."""
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
    train = training_rows(card)
    return kind(options, train, train if val is None else val)


# ---------------------------------------------------------------------------------------------- export


@torch.no_grad()
def export(trained: Trained, path: Path, *, replace: bool = False) -> None:
    """Write the program of the model. It takes any number of rows, as they lie in the training file.

    Some models of ragged rows take two rows or more. The file has the content of model.json in its metadata: what the
    inputs are, how images were prepared, the names of the classes. Raises UserError if the model cannot be exported, if
    the program gives other numbers than the model, or if the file exists and `replace` is false.
    """
    inputs, others = _model_inputs(trained, 2), _model_inputs(trained, 5)
    names = trained.workload.inputs
    text = json.dumps({**trained.card, "inputs": names})
    with new_file(path, replace=replace) as partial, warnings.catch_warnings(action="ignore"):  # of the exporters
        try:
            program = torch.export.export(trained.model, inputs, dynamic_shapes=[{0: Dim.AUTO}] * len(inputs))
            torch.testing.assert_close(program.module()(*others), trained.model(*others), rtol=1e-4, atol=1e-4)
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


def _model_inputs(trained: Trained, n_rows: int) -> tuple[Tensor, ...]:
    """What `predict` of the workload passes to the model for made-up rows."""
    calls: list[tuple[Tensor, ...]] = []
    hook = trained.model.register_forward_pre_hook(lambda _, args: calls.append(args))
    trained.workload.predict(trained.model, make_rows(trained, n_rows))
    hook.remove()
    return calls[0]


def make_rows(trained: Trained, n_rows: int) -> Rows:
    """Made-up rows with the inputs of the model, on the CPU: zeros and ones, two of them in each ragged row."""
    described = training_rows(trained.card).fields
    fields = {name: described[name] for name in trained.workload.inputs}
    rows = Rows.empty(fields, n_rows, torch.device("cpu"), n_values=dict.fromkeys(fields, 2 * n_rows))
    for column in rows.columns.values():
        values = column
        if isinstance(column, Ragged):
            values = column.values
            column.host_offsets[:] = np.arange(0, 2 * n_rows + 1, 2)  # which are those on the device, a CPU
        values.random_(2)
    return rows
