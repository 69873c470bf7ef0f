"""Saves checkpoints on rank 0, in a thread of their own if they may be written while training goes on."""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fastgpu.process.config import Run as RunSettings
from fastgpu.process.launch import warn
from fastgpu.run import checkpoint
from fastgpu.run.checkpoint import HasState, Kind, Progress
from fastgpu.run.model_files import WEIGHTS, ModelToUse
from fastgpu.run.starts import forget_starts


class Saver:
    """Writes the checkpoints of one run, and removes older and worse ones."""

    def __init__(self, folder: Path, settings: RunSettings, order: Mapping[str, int]):
        """folder: of the run. order: the numbers that the order of the rows depends on."""
        self.is_saved = True
        """Whether the last checkpoint that was asked for is on disk, once `wait` has returned."""
        self._folder = folder
        self._settings = settings
        self._order = order
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[bool] | None = None

    def save(
        self, progress: Progress, state: Mapping[str, HasState], to_use: ModelToUse, *, may_be_best: bool = False
    ) -> None:
        """Save a checkpoint, and note in `progress` when. may_be_best: an epoch ends, whose metric counts.

        With run.save_in_background, the caller goes on once the state is copied.
        """
        self.wait()
        progress.saved_at = max(time.time(), progress.saved_at + 0.001)
        kinds: dict[Kind, int] = {}
        if may_be_best and checkpoint.is_among_best(self._folder, progress, self._settings.keep_best):
            kinds["best"] = self._settings.keep_best
        kinds["last"] = checkpoint.KEEP_LAST  # a run that is killed before it repeats the epoch: no best one is missed
        if not self._settings.save_in_background:
            self.is_saved = self._write(kinds, progress, state, to_use)
            return
        try:
            copies = copy_to_host({**state, WEIGHTS: to_use.model})
        except RuntimeError as error:
            warn(f"step {progress.step} was not saved: {error}. Training goes on")
            self.is_saved = False
            return
        to_use = to_use._replace(model=copies.pop(WEIGHTS))
        self._writing = self._thread.submit(self._write, kinds, replace(progress), copies, to_use)

    def wait(self) -> None:
        """Wait until no checkpoint is being written."""
        if self._writing:
            writing, self._writing = self._writing, None
            self.is_saved = writing.result()

    def close(self) -> None:
        """End the thread when it has written its checkpoint. `wait` then tells whether that is on disk."""
        self._thread.shutdown()

    def _write(
        self, kinds: Mapping[Kind, int], progress: Progress, state: Mapping[str, HasState], to_use: ModelToUse
    ) -> bool:
        """Write a checkpoint of each kind, and remove older or worse ones. kinds: {kind: how many to keep}.

        Returns whether the last one is on disk.
        """
        is_saved = False
        for kind, keep in kinds.items():
            is_saved = checkpoint.save(self._folder, kind, progress, state, order=self._order, to_use=to_use)
            if is_saved:
                checkpoint.prune(self._folder, kind, keep)
                forget_starts(self._folder)
        return is_saved


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
