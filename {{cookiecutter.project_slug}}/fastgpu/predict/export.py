"""A trained model as one file: for torch.export (.pt2) or ONNX (.onnx)."""

import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.export import Dim

from fastgpu.predict.model import DescribedSource, Trained
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Ragged, Rows
from fastgpu.run.checkpoint import DESCRIPTION


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
    described = DescribedSource(trained.card).fields
    fields = {name: described[name] for name in trained.workload.inputs}
    rows = Rows.empty(fields, n_rows, torch.device("cpu"), n_values=dict.fromkeys(fields, 2 * n_rows))
    for column in rows.columns.values():
        values = column
        if isinstance(column, Ragged):
            values = column.values
            column.host_offsets[:] = np.arange(0, 2 * n_rows + 1, 2)  # which are those on the device, a CPU
        values.random_(2)
    return rows
