"""The workload `minimal` and a Dataset for runs that meet faults: they say which phase they are in."""

from pathlib import Path

import h5py
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fastgpu.rows.rows import Rows as Batch
from workloads import minimal


class Workload(minimal.Workload):
    """Writes `phase`."""

    phase = "starting"

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        phase = "training" if torch.is_grad_enabled() else "validating"
        if phase != self.phase:
            Path("phase").write_text(phase)
            self.phase = phase
        return super().loss(model, batch)


class Rows(Dataset[dict[str, Tensor]]):
    """The rows of `file.h5::/group`."""

    def __init__(self, path: str):
        name, _, group = path.partition("::")
        with h5py.File(name) as file:
            self.columns = {field: torch.from_numpy(file[group][field][:]) for field in ("x", "y")}

    def __len__(self) -> int:
        return len(self.columns["x"])

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {field: column[row] for field, column in self.columns.items()}
