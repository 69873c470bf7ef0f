"""Saves in a thread: the loop waits for a copy of the state in host memory, and not for the disk."""

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fastgpu.process.machine import lower_priority
from fastgpu.run import checkpoint


class Saved(NamedTuple):
    """What a save has left on disk."""

    progress: checkpoint.Progress | None
    """That of the last checkpoint. None: the disk refused."""
    has_best: bool
    """Whether the best one was written, too."""


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

        best: what `progress` should remember of the best checkpoint, if this is to be the best one.
        """
        snapshot = checkpoint.take_snapshot(state, self._memory)
        self._saving = self._thread.submit(self._write, replace(at), best, snapshot, card)

    def wait(self) -> Saved | None:
        """Wait for the save that was started last. None: there was none. Raises what the thread has raised."""
        return self._saving.result() if self._saving else None

    def close(self) -> None:
        """Wait for the thread, and end it."""
        self._thread.shutdown()

    def _write(
        self, at: checkpoint.Progress, best: Mapping[str, Any], snapshot: checkpoint.Snapshot, card: Mapping[str, Any]
    ) -> Saved:
        """The best one comes first: a run that is killed in between repeats the steps, and misses no best one."""
        if snapshot.copied:
            snapshot.copied.synchronize()
        saved_best = None
        if best:
            saved_best = checkpoint.save(self._folder, "best", replace(at, **best), snapshot, card=card)
        if saved_best:
            at = replace(at, **best)
        saved = checkpoint.save(self._folder, "last", at, snapshot, card=card, same_model=saved_best)
        return Saved(at if saved else None, bool(saved_best))
