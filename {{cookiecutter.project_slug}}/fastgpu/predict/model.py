"""Finds a checkpoint, builds and fills its model, and exports it for torch.export (.pt2) or ONNX (.onnx)."""

import io
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_model as fill
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

import workloads
from fastgpu.process.config import Section
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field, Ragged, Rows
from fastgpu.run.checkpoint import newest_first
from fastgpu.run.model_files import DESCRIPTION, FORMAT, WEIGHTS, DescribedSource, sha256_of
from workloads import Workload


class _FieldCard(BaseModel):
    """A field of the rows, as model.json describes it."""

    dtype: str
    shape: list[int]
    is_ragged: bool
    n_items: int | None


class _Card(BaseModel, extra="allow"):
    """What model.json must hold."""

    format: int
    workload: str
    options: dict[str, Any]
    fields: dict[str, _FieldCard]
    attributes: dict[str, Any]
    batch_size: int
    precision: str


class _State(BaseModel, extra="allow"):
    """What state.json must hold."""

    sha256: dict[str, str]


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
        sha256 = _read_json(folder / "state.json", _State)["sha256"]
        for name in (DESCRIPTION, WEIGHTS):
            if sha256_of(folder / name) != sha256.get(name):
                raise UserError(f"{folder}: {name} does not match its checksum; use another checkpoint")
    card = _read_json(folder / DESCRIPTION, _Card)
    if card["format"] != FORMAT:
        raise UserError(f"{folder}/{DESCRIPTION} has format {card['format']}; this version reads {FORMAT}")
    try:
        DescribedSource(card)
    except (TypeError, ValueError) as error:  # NumPy knows no such type
        raise UserError(f"{folder}/{DESCRIPTION} is damaged ({error}); use another checkpoint") from None
    return card


def _read_json(path: Path, kind: type[BaseModel]) -> dict[str, Any]:
    """The object in a file. Raises UserError if it is not of this kind."""
    try:
        text = path.read_text(encoding="utf-8")
        kind.model_validate_json(text)
    except ValidationError as error:
        problem = error.errors()[0]
        reason = f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}".removeprefix(": ")
        raise UserError(f"{path} is damaged ({reason}); use another checkpoint") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error}); use another checkpoint") from None
    content: dict[str, Any] = json.loads(text)
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


def check_labelled(trained: Trained, source: Dataset) -> None:
    """Let the workload check rows with labels as it checks validation rows. Raises UserError if it refuses them."""
    workloads.load(trained.card["workload"])(_read_options(trained.card), DescribedSource(trained.card), source)


def _read_options(card: Mapping[str, Any]) -> Section:
    return workloads.load(card["workload"]).Options.model_validate_json(json.dumps(card["options"]))


TOLERANCE = 1e-4
"""Largest difference that is accepted, as a share of the largest output of the model."""


@torch.no_grad()
def export(trained: Trained, path: Path, *, replace: bool = False) -> str:
    """Write the program and return a line about it. It normalises its input like the model.

    The number of rows is free; some models (of ragged rows) need two or more. The file has the content of model.json
    with it: what the inputs are, how images were prepared, the names of the classes. Raises UserError if the model
    cannot be exported, if the program gives other numbers than the model, or if the file exists and `replace` is false.
    """
    if path.suffix == ".onnx" and not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        raise UserError(f"--export {path} needs ONNX: pip install -c constraints.txt -e '.[export]'")
    inputs = [_model_inputs(trained, n_rows) for n_rows in (2, 5, 1)]
    try:
        with new_file(path, replace=replace) as partial, warnings.catch_warnings(action="ignore"):  # of the exporters
            _write(trained, inputs, partial)
            difference = max(_difference(trained.model, partial, each) for each in inputs[:2])
            rows = "two or more rows"
            with suppress(Exception):  # the program may refuse to take one row
                difference = max(difference, _difference(trained.model, partial, inputs[2]))
                rows = "any number of rows"
            if not difference <= TOLERANCE:
                raise RuntimeError(f"it would differ from the model by {difference:.2g} of its largest output")
    except UserError:
        raise
    except Exception as error:  # the exporters raise errors of many kinds
        cause = error.__cause__ or error
        reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise UserError(f"{path} was not written: {reason}") from error
    return f"{path}: takes {rows}; differs from the model by {difference:.2g} of the largest output"


def _write(trained: Trained, inputs: Sequence[tuple[Tensor, ...]], path: Path) -> None:
    """inputs: for two different numbers of rows. The dimensions in which they differ are those of any size."""
    model, workload, card = trained
    text = json.dumps({**card, "inputs": workload.inputs})
    dims = [
        {dim: Dim.DYNAMIC for dim in range(one.ndim) if one.shape[dim] != other.shape[dim]}
        for one, other in zip(*inputs[:2], strict=True)
    ]
    try:
        program = torch.export.export(model, inputs[0], dynamic_shapes=dims)
    except Exception:  # of many kinds; some models are traced by one way, and some by the other
        program = torch.export.export(model, inputs[0], dynamic_shapes=dims, strict=True)
    if path.suffix == ".onnx":
        logging.getLogger("torch.onnx").setLevel(logging.ERROR)
        names = workload.inputs if len(workload.inputs) == len(inputs[0]) else None  # ragged rows are two tensors each
        made: Any = torch.onnx.export(program, (), input_names=names, dynamo=True, verbose=False)
        made.model.metadata_props[DESCRIPTION] = text
        made.save(path, external_data=False)
    else:
        content = io.BytesIO()  # torch's own writer aborts the process if the disk is full
        torch.export.save(program, content, extra_files={DESCRIPTION: text})
        path.write_bytes(content.getbuffer())


def _model_inputs(trained: Trained, n_rows: int) -> tuple[Tensor, ...]:
    """What `predict` passes to the model for made-up rows."""
    model, workload, card = trained
    rows = make_rows({name: trained.fields[name] for name in workload.inputs}, n_rows)
    calls: list[Any] = []
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: calls.append((args, kwargs)), with_kwargs=True)
    workload.predict(model, rows)
    hook.remove()
    if [kwargs for _, kwargs in calls][:1] != [{}]:
        raise UserError(f"workloads/{card['workload']}.py: predict should call model(...) with arguments by position")
    args: tuple[Tensor, ...] = calls[0][0]
    return args


def _difference(model: nn.Module, path: Path, inputs: tuple[Tensor, ...]) -> float:
    """The largest difference to the model, as a share of the largest output."""
    expected = tree_leaves(model(*inputs))
    if path.suffix == ".onnx":
        onnxruntime = import_module("onnxruntime")  # of the extra `export`
        session = onnxruntime.InferenceSession(path)
        names = [each.name for each in session.get_inputs()]
        arrays = [each.numpy() for each in inputs]
        outputs = [torch.from_numpy(each) for each in session.run(None, dict(zip(names, arrays, strict=True)))]
    else:
        outputs = tree_leaves(torch.export.load(path).module()(*inputs))
    largest = max(float(each.abs().max()) for each in expected)
    return max(float((one - other).abs().max()) for one, other in zip(expected, outputs, strict=True)) / max(
        largest, 1e-12
    )


def make_rows(fields: Mapping[str, Field], n_rows: int) -> Rows:
    """Made-up rows on the CPU: random pixels and floats, in ragged fields the values 0, 1 and 2.

    Other integers may number something, so they are zeros.
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
        if field.dtype.kind == "f":
            array = np.asarray(rng.standard_normal(array.shape), field.dtype)
        elif len(field.shape) > 1:
            array = rng.integers(0, 256, array.shape).astype(field.dtype)
        columns[name] = torch.from_numpy(array)
    return Rows(columns)
