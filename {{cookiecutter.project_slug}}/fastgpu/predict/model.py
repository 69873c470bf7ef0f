"""A trained model: read it from a checkpoint, or export it to one file."""

import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from pydantic import BaseModel
from safetensors import SafetensorError
from safetensors.torch import load_model as fill
from torch import Tensor, nn

from fastgpu.predict.command import NO_CHECKPOINT
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError
from fastgpu.process.project import install_command, project_folder
from fastgpu.process.tools import check_exist
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field, Ragged, Rows
from fastgpu.run.checkpoint import DESCRIPTION, WEIGHTS, checksum_of_file, newest_first
from fastgpu.training.evaluate import Scorer

__all__ = ["Trained", "load_model"]


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


class Workload(Scorer, Protocol):
    """The part of a workload that a trained model needs. `Workload` in workloads/ documents these methods."""

    options: Any
    inputs: tuple[str, ...]

    def __init__(self, options: Any, train: Dataset, val: Dataset): ...

    def model(self) -> nn.Module: ...

    def predict(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]: ...


class Trained(NamedTuple):
    """A model that is ready to use, on the CPU and in eval mode."""

    model: nn.Module
    workload: Workload
    card: dict[str, Any]  # the content of model.json
    rows: Dataset  # see `training_rows`
    folder: Path  # the checkpoint

    @torch.inference_mode()
    def predict(self, **columns: Any) -> Mapping[str, Tensor]:
        """The values that `predict` of the workload gives.

        columns: the `inputs` of the workload by name, arrays or tensors (rows, *shape); for a ragged field a list with
        an array for each row, or a `Ragged`.
        """
        device = next(self.model.parameters()).device
        rows: dict[str, Tensor | Ragged] = {}
        for name, column in columns.items():
            field = self.rows.fields.get(name)
            if isinstance(column, Ragged):
                rows[name] = column
            elif field and field.is_ragged:
                arrays = [np.asarray(values, field.dtype).reshape(-1, *field.shape) for values in column]
                rows[name] = Ragged.of(arrays)
            else:
                rows[name] = torch.as_tensor(column)
        return self.workload.predict(self.model, Rows(rows).to(device))


def load_model(path: str | Path, *, project: str | Path | None = None) -> Trained:
    """Build the model of a checkpoint, a copy of its model.json and model.safetensors, or the best (or last) of a run.

    project: the folder whose workloads/ has the code of the model. None: the folder of the script that was started,
    or the current folder. Raises UserError if there is no checkpoint or no such code, if one is damaged, or if they do
    not fit.
    """
    run = Path(path)
    check_exist(run, cure=NO_CHECKPOINT)
    saved = [*newest_first(run, "best"), *newest_first(run, "last")]
    folder = run if not saved or (run / DESCRIPTION).exists() else saved[0]
    if not (folder / DESCRIPTION).exists():
        raise UserError(f"{folder} has no checkpoint and no {DESCRIPTION}; {NO_CHECKPOINT}")
    workloads = import_workloads(Path(project) if project else None)
    with _report_damage(folder):
        if (folder / "state.json").exists():  # a copy of two files has no checksums to compare with
            checksums = json.loads((folder / "state.json").read_bytes())["sha256"]
            for name in (DESCRIPTION, WEIGHTS):
                if checksum_of_file(folder / name) != checksums[name]:
                    raise ValueError(f"{name} does not match its checksum")
        card = _Card.model_validate_json((folder / DESCRIPTION).read_bytes()).model_dump()
    kind = workloads.load(card["workload"])
    with _report_damage(folder):
        rows = training_rows(card)
        options = kind.Options.model_validate_json(json.dumps(card["options"]))
        workload = kind(options, rows, rows)
        model = workload.model()
        fill(model, folder / WEIGHTS)
    return Trained(model.eval(), workload, card, rows, folder)


@contextmanager
def _report_damage(folder: Path) -> Iterator[None]:
    """Turn any error that a checkpoint can cause into a UserError."""
    try:
        yield
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{folder} is no run or checkpoint, is damaged, or was saved by other code: {reason}") from None


def import_workloads(project: Path | None = None) -> Any:
    """The module `workloads` of a project. See `load_model`. Raises UserError if this process has imported the
    workloads of another project, because their code would be used in place of this project's."""
    folder = (project or project_folder()).resolve()
    module = sys.modules.get("workloads")
    if (folder / "workloads/__init__.py").is_file():
        if not module:
            if str(folder) not in sys.path:
                sys.path.insert(0, str(folder))  # a workload may import other modules of its project
            module = import_module("workloads")
        found = Path(str(module.__file__))
        if not found.samefile(folder / "workloads/__init__.py"):
            other = f"this process has imported the workloads of {found.parents[1]}"
            raise UserError(f"{other}; use another process for the modules of {folder}")
    elif project or not module:
        raise UserError(f"{folder} has no workloads/__init__.py; load_model(..., project=FOLDER) names a project")
    return module


def training_rows(card: Mapping[str, Any]) -> Dataset:
    """The fields and attributes of the rows that a model was trained on, as a source without rows. card: model.json."""
    rows = Dataset()
    rows.name = "the training rows"
    rows.attributes = card["attributes"]
    rows.block_rows = np.empty(0, np.int32)
    rows.fields = {
        name: Field(np.dtype(each["dtype"]), tuple(each["shape"]), 0.0 if each["is_ragged"] else None, each["n_items"])
        for name, each in card["fields"].items()
    }
    rows.stored_lengths = {name: rows.block_rows for name, field in rows.fields.items() if field.is_ragged}
    return rows


@torch.no_grad()
def export(trained: Trained, path: Path, *, replace: bool = False) -> None:
    """Write the program of the model with model.json in it. It takes any number of rows, or two or more if ragged.

    Raises UserError if it cannot be exported, gives other numbers than the model, or exists and `replace` is false.
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
            program = torch.export.export(model, inputs, dynamic_shapes=[{0: torch.export.Dim.AUTO}] * len(inputs))
            found, expected = program.module()(*others), model(*others)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
            if path.suffix == ".onnx":
                logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns if torchvision is missing
                own_names = names if len(names) == len(inputs) else None  # a ragged field is two inputs
                onnx: Any = torch.onnx.export(program, (), input_names=own_names, dynamo=True, verbose=False)
                onnx.model.metadata_props[DESCRIPTION] = text
                onnx.save(partial, external_data=False)
            else:
                content = io.BytesIO()  # torch's own writer aborts the process if the disk is full
                torch.export.save(program, content, extra_files={DESCRIPTION: text})
                partial.write_bytes(content.getbuffer())
        except Exception as error:  # the exporters raise errors of many kinds
            cause = error.__cause__ or error
            reason = " ".join(str(cause).split())[:300] or type(error).__name__
            cure = f"; {install_command('export')}" if isinstance(cause, ImportError) else ""
            raise UserError(f"{path} was not written: {reason}{cure}") from error


def make_rows(trained: Trained, n_rows: int) -> Rows:
    """Random rows with the inputs of the model, on the CPU, the same at each call. Ragged rows have two values."""
    rng = np.random.default_rng(0)
    columns: dict[str, Tensor | Ragged] = {}
    for name in trained.workload.inputs:
        field = trained.rows.fields[name]
        shape = (2 * n_rows if field.is_ragged else n_rows, *field.shape)
        end = field.n_items or (256 if field.dtype == np.uint8 and len(field.shape) > 1 else 2)  # 2 if it is unknown
        values = rng.standard_normal(shape) if field.dtype.kind == "f" else rng.integers(0, end, shape)
        tensor = torch.from_numpy(values.astype(field.dtype))
        offsets = torch.arange(0, 2 * n_rows + 1, 2, dtype=torch.int32)
        columns[name] = Ragged(tensor, offsets, offsets.numpy()) if field.is_ragged else tensor
    return Rows(columns)
