"""A copy of a run's state in host memory, which can be written while training goes on."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgpu.telemetry.checkpoint import HasState


class Snapshot(NamedTuple):
    """The copied state of one object."""

    state: dict[str, Any]

    def state_dict(self) -> dict[str, Any]:
        return self.state


def copy_to_host(parts: Mapping[str, HasState]) -> dict[str, Snapshot]:
    """Copies of the states. Afterwards the loop may change the originals.

    Tensors that share memory share it in the copies, too, so the files are those of the originals. A GPU copies to
    page-locked memory, which torch keeps for the next time. Raises RuntimeError if there is no room.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    snapshots = {}
    for name, part in parts.items():
        state = part.state_dict()
        tensors = [leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor)]
        copies = {id(tensor): _copy(tensor, storages) for tensor in tensors}
        snapshots[name] = Snapshot(deepcopy(state, copies))
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()
    return snapshots


def _copy(tensor: Tensor, storages: dict[int, torch.UntypedStorage]) -> Tensor:
    """A tensor of the same type and layout. storages: {address of a storage: its copy}, which is filled."""
    storage = tensor.untyped_storage()
    if storage._cdata not in storages:
        source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        copy = torch.empty(len(source), dtype=torch.uint8, pin_memory=tensor.is_cuda)
        storages[storage._cdata] = copy.copy_(source, non_blocking=True).untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype)
    return host.set_(storages[storage._cdata], tensor.storage_offset(), tensor.shape, tensor.stride())
