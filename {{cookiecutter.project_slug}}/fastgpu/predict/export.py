"""A trained model as one file: for torch.export (.pt2) or ONNX (.onnx)."""

import io
import json
import logging
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from fastgpu.predict.inputs import DescribedSource
from fastgpu.predict.model import Trained
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Ragged, Rows
from fastgpu.run.checkpoint import DESCRIPTION


@torch.no_grad()
def export(trained: Trained, path: Path, *, replace: bool = False) -> None:
    """Write the program of the model. It takes any number of rows, as they lie in the training file.

    Some models of ragged rows take two rows or more. The file has the content of model.json in its metadata: what the
    inputs are, how images were prepared, the names of the classes. A .pt2 file is read again, and has to give the
    numbers of the model. Raises UserError if it does not, if the model cannot be exported, or if the file exists and
    `replace` is false.
    """
    inputs, others = _model_inputs(trained, 2), _model_inputs(trained, 5)
    dims = [
        {dim: Dim.DYNAMIC for dim in range(one.ndim) if one.shape[dim] != other.shape[dim]}
        for one, other in zip(inputs, others, strict=True)
    ]
    text = json.dumps({**trained.card, "inputs": trained.workload.inputs})
    with new_file(path, replace=replace) as partial, warnings.catch_warnings(action="ignore"):  # of the exporters
        try:
            program = _trace(trained.model, inputs, dims)
            if path.suffix == ".onnx":
                _write_onnx(program, text, trained.workload.inputs, partial)
            else:
                content = io.BytesIO()  # torch's own writer aborts the process if the disk is full
                torch.export.save(program, content, extra_files={DESCRIPTION: text})
                partial.write_bytes(content.getbuffer())
                found, expected = torch.export.load(partial).module()(*others), trained.model(*others)
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
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


def _model_inputs(trained: Trained, n_rows: int) -> tuple[Tensor, ...]:
    """What `predict` of the workload passes to the model for made-up rows."""
    calls: list[tuple[Tensor, ...]] = []
    hook = trained.model.register_forward_pre_hook(lambda _, args: calls.append(args))
    trained.workload.predict(trained.model, make_rows(trained, n_rows))
    hook.remove()
    return calls[0]


def make_rows(trained: Trained, n_rows: int) -> Rows:
    """Made-up rows with the inputs of the model, on the CPU: zeros and ones, two of them in each ragged row."""
    fields = DescribedSource(trained.card).fields
    rng = np.random.default_rng(0)
    columns: dict[str, Tensor | Ragged] = {}
    for name in trained.workload.inputs:
        field = fields[name]
        n_values = 2 * n_rows if field.is_ragged else n_rows
        values = torch.from_numpy(rng.integers(0, 2, (n_values, *field.shape)).astype(field.dtype))
        offsets = np.arange(0, n_values + 1, 2, dtype=np.int32)
        columns[name] = Ragged(values, torch.from_numpy(offsets), offsets) if field.is_ragged else values
    return Rows(columns)
