"""The model as a program for torch.export (.pt2) or ONNX (.onnx), compared with the model before it gets its name."""

import io
import logging
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.utils._pytree import tree_leaves

from fastgpu.predict.model import Trained
from fastgpu.process.atomic import atomic_replace
from fastgpu.process.launch import UserError
from fastgpu.rows.field import Field
from fastgpu.rows.rows import Ragged, Rows

TOLERANCE = 1e-4
"""Largest difference that is accepted, as a share of the largest output of the model."""


@torch.no_grad()
def export(trained: Trained, path: Path) -> str:
    """Write the program and return a line about it. It normalises its input like the model.

    The number of rows is free; some models (of ragged rows) need two or more. Raises UserError if the model cannot be
    exported, or if the program gives other numbers than the model.
    """
    if path.suffix == ".onnx" and not all(find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        raise UserError(f"--export {path} needs ONNX: pip install -c constraints.txt -e '.[export]'")
    inputs = [_model_inputs(trained, n_rows) for n_rows in (2, 5, 1)]
    partial = path.with_name(f".partial-{path.name}")
    try:
        with warnings.catch_warnings(action="ignore"):  # of the exporters, about themselves
            _write(trained.model, inputs, partial)
            difference = max(_difference(trained.model, partial, each) for each in inputs[:2])
            rows = "two or more rows"
            with suppress(Exception):  # the program may refuse to take one row
                difference = max(difference, _difference(trained.model, partial, inputs[2]))
                rows = "any number of rows"
        if not difference <= TOLERANCE:
            raise UserError(f"it would differ from the model by {difference:.2g} of its largest output")
        atomic_replace(partial, path)
    except Exception as error:  # the exporters raise errors of many kinds
        cause = error.__cause__ or error
        reason = next((line for line in str(cause).splitlines() if line.strip()), type(cause).__name__)
        raise UserError(f"{path} was not written: {reason}") from error
    finally:
        partial.unlink(missing_ok=True)
    return f"{path}: takes {rows}; differs from the model by {difference:.2g} of the largest output"


def _write(model: nn.Module, inputs: Sequence[tuple[Tensor, ...]], path: Path) -> None:
    """inputs: for two different numbers of rows. The dimensions in which they differ are those of any size."""
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
        torch.onnx.export(program, (), path, dynamo=True, external_data=False, verbose=False)
    else:
        content = io.BytesIO()  # torch's own writer aborts the process if the disk is full
        torch.export.save(program, content)
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
