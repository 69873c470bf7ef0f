"""A Dataset for runs that meet faults."""

import h5py
import torch
from torch import Tensor
from torch.utils.data import Dataset


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
