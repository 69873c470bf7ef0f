"""The workload `minimal` and a Dataset for runs that meet faults: they say which phase they are in."""

import time
from pathlib import Path

import h5py
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fastgpu.rows.rows import Rows as Batch
from workloads import minimal


class Workload(minimal.Workload):
    """Writes `phase`, and once, when the first step begins, its time to `steps`."""

    phase = "starting"
    has_stepped = False

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        is_training = torch.is_grad_enabled()
        phase = "training" if is_training else "validating"
        if phase != self.phase:
            Path("phase").write_text(phase)
            self.phase = phase
        if is_training and not self.has_stepped:
            with Path("steps").open("a") as file:
                file.write(f"{time.time()}\n")
            self.has_stepped = True
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
