"""A trained model as one file: for torch.export (.pt2) or ONNX (.onnx)."""

import io
import json
import logging
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils._pytree import tree_leaves

from fastgpu.predict.inputs import DescribedSource
from fastgpu.predict.model import Trained
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Field, Ragged, Rows
from fastgpu.run.checkpoint import DESCRIPTION

TOLERANCE = 1e-4
"""Largest difference that is accepted, as a share of the largest output of the model."""


@torch.no_grad()
def export(trained: Trained, path: Path, *, replace: bool = False) -> None:
    """Write the program of the model. It takes any number of rows, as they lie in the training file.

    Some models of ragged rows take two rows or more. The file has the content of model.json in its metadata: what the
    inputs are, how images were prepared, the names of the classes. A .pt2 file is read again, and has to give the
    numbers of the model. Raises UserError if it does not, if the model cannot be exported, or if the file exists and
    `replace` is false.
    """
    if path.suffix == ".onnx" and not (find_spec("onnx") and find_spec("onnxscript")):
        raise UserError(f"--export {path} needs ONNX: pip install -c constraints.txt -e '.[export]'")
    inputs, others = _model_inputs(trained, 2), _model_inputs(trained, 5)
    dims = [
        {dim: Dim.DYNAMIC for dim in range(one.ndim) if one.shape[dim] != other.shape[dim]}
        for one, other in zip(inputs, others, strict=True)
    ]
    try:
        with new_file(path, replace=replace) as partial, warnings.catch_warnings(action="ignore"):  # of the exporters
            program = _trace(trained.model, inputs, dims)
            text = json.dumps({**trained.card, "inputs": trained.workload.inputs})
            if path.suffix == ".onnx":
                _write_onnx(program, text, trained.workload.inputs, partial)
            else:
                content = io.BytesIO()  # torch's own writer aborts the process if the disk is full
                torch.export.save(program, content, extra_files={DESCRIPTION: text})
                partial.write_bytes(content.getbuffer())
                _compare(trained, partial, others)
    except UserError:
        raise
    except Exception as error:  # the exporters raise errors of many kinds
        reason = " ".join(str(error.__cause__ or error).split())[:300] or type(error).__name__
        raise UserError(f"{path} was not written: {reason}") from error


def _trace(model: nn.Module, inputs: tuple[Tensor, ...], dims: list[Any]) -> ExportedProgram:
    try:
        return torch.export.export(model, inputs, dynamic_shapes=dims)
    except Exception:  # of many kinds; models of ragged rows are traced by the other way alone
        return torch.export.export(model, inputs, dynamic_shapes=dims, strict=True)


def _write_onnx(program: ExportedProgram, text: str, names: Sequence[str], path: Path) -> None:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    is_dense = len(names) == len(program.graph_signature.user_inputs)  # ragged rows are two tensors each
    made: Any = torch.onnx.export(
        program, (), input_names=list(names) if is_dense else None, dynamo=True, verbose=False
    )
    made.model.metadata_props[DESCRIPTION] = text
    made.save(path, external_data=False)


def _compare(trained: Trained, path: Path, inputs: tuple[Tensor, ...]) -> None:
    """Raise ValueError if the program in a file gives other numbers than the model."""
    expected = tree_leaves(trained.model(*inputs))
    found = tree_leaves(torch.export.load(path).module()(*inputs))
    largest = max(float(each.abs().max()) for each in expected)
    difference = max(float((one - other).abs().max()) for one, other in zip(expected, found, strict=True))
    if not difference <= TOLERANCE * max(largest, 1e-12):
        raise ValueError(
            f"its numbers differ from those of the model, which are up to {largest:.2g}, by {difference:.2g}"
        )


def _model_inputs(trained: Trained, n_rows: int) -> tuple[Tensor, ...]:
    """What `predict` of the workload passes to the model for made-up rows."""
    calls: list[tuple[Tensor, ...]] = []
    hook = trained.model.register_forward_pre_hook(lambda _, args: calls.append(args))
    trained.workload.predict(trained.model, make_rows(trained, n_rows))
    hook.remove()
    return calls[0]


def make_rows(trained: Trained, n_rows: int) -> Rows:
    """Made-up rows with the inputs of the model, on the CPU."""
    fields = DescribedSource(trained.card).fields
    return Rows({name: _make_column(fields[name], n_rows) for name in trained.workload.inputs})


def _make_column(field: Field, n_rows: int) -> Tensor | Ragged:
    """Random pixels and floats, the values 0, 1 and 2 in ragged rows, otherwise zeros, which may number something."""
    if field.is_ragged:
        values = np.tile(np.arange(min(3, field.n_items or 3)), n_rows).astype(field.dtype)
        offsets = np.linspace(0, len(values), n_rows + 1).astype(np.int32)
        return Ragged(torch.from_numpy(values), torch.from_numpy(offsets), offsets)
    rng = np.random.default_rng(0)
    values = np.zeros((n_rows, *field.shape))
    if field.dtype.kind == "f":
        values = rng.standard_normal(values.shape)
    elif len(field.shape) > 1:
        values = rng.uniform(0, 256, values.shape)
    return torch.from_numpy(values.astype(field.dtype))
