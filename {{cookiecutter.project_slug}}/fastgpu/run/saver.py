"""Saves in a thread: the loop waits until the state is copied to host memory, but not for the disk."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fastgpu.process.machine import lower_priority
from fastgpu.run import checkpoint


class Saved(NamedTuple):
    """The result of a save."""

    progress: checkpoint.Progress | None
    """The progress in the last checkpoint. None: the disk refused it."""
    has_best: bool
    """Whether a best checkpoint was written, too."""


class Saver:
    """Writes the checkpoints of a run, one save at a time."""

    def __init__(self, folder: Path):
        """folder: of the run."""
        self._folder = folder
        self._memory: list[Tensor] = []
        self._thread = ThreadPoolExecutor(1, "save", initializer=lower_priority)
        self._saving: Future[Saved] | None = None

    def start(
        self, at: checkpoint.Progress, best: Mapping[str, Any], state: checkpoint.State, card: Mapping[str, Any]
    ) -> None:
        """Copy the state, and begin to write it. Call `wait` before.

        best: the values of `progress` for the best checkpoint, if this save is the best one; else empty.
        """
        snapshot = checkpoint.take_snapshot(state, self._memory)
        self._saving = self._thread.submit(self._write, replace(at), best, snapshot, card)

    def wait(self) -> Saved | None:
        """Wait for the save that was started last. None: there was no save. Raises the error of the thread."""
        return self._saving.result() if self._saving else None

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._thread.shutdown()

    def _write(
        self, at: checkpoint.Progress, best: Mapping[str, Any], snapshot: checkpoint.Snapshot, card: Mapping[str, Any]
    ) -> Saved:
        """Write the best checkpoint first: a run that is killed in between repeats steps, but loses no best model."""
        if snapshot.copied:
            snapshot.copied.synchronize()
        saved_best = None
        if best:
            saved_best = checkpoint.save(self._folder, "best", replace(at, **best), snapshot, card=card)
        if saved_best:
            at = replace(at, **best)
        saved = checkpoint.save(self._folder, "last", at, snapshot, card=card, same_model=saved_best)
        return Saved(at if saved else None, bool(saved_best))
