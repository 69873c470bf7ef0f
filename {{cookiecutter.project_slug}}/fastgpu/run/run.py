"""One training run: its folder, its lock, its position, its checkpoints and the signals to it."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from math import nan
from types import SimpleNamespace
from typing import Any

from torch import nn

from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError, read_launch, warn
from fastgpu.process.signals import Agreement
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.run import checkpoint, folder
from fastgpu.run.record import describe_model
from fastgpu.storage.meaning import check_meaning
from fastgpu.training.parallel import average_statistics

STOPPED = "stopped.json"
"""File in the folder of a run that was asked to stop and has not been resumed: a job script may look for it."""


class Run(AbstractContextManager["Run"]):
    """A run in progress, as the training loop uses it. Every rank has one; only rank 0 writes files."""

    def __init__(self, parts: Any, state: Mapping[str, Any], world: World):
        """Lock the folder of the run, load its last checkpoint into `state` if it is to be resumed, and write what is
        needed to repeat it. Signals are noticed from here on.

        parts: those of train.py. state: {name: what a checkpoint keeps}. Raises UserError on every rank if the folder
        cannot be written, or if it or a checkpoint is that of another run.
        """
        self._parts = parts
        self._state = state
        self._world = world
        self._settings = parts.config.run
        self._lock: FolderLock | None = None
        self._is_saved = True
        self.config: Mapping[str, Any] = parts.config.flat()
        self._card = describe_model(self.config, parts.train_rows, parts.val_rows, parts.workload.card())
        order = parts.loader.order
        self._order = order.identity | {"content": self._card["rows"]}
        found = None
        with world.together():
            if world.is_main:
                is_new = self._settings.resume == "never"
                path = folder.find_folder(self._settings)
                self._lock = folder.lock(path, is_new=is_new)
                found = path, None if is_new else checkpoint.find_intact(path)
        self.folder, intact = world.broadcast(found)
        at = checkpoint.Progress()
        with world.together():
            if intact:
                saved = json.loads((intact / checkpoint.DESCRIPTION).read_text(encoding="utf-8"))
                is_named = self._settings.name != "auto"
                for change in folder.find_changes(self.folder, saved["config"], self.config, is_named=is_named):
                    world.print_once(f"resumed with {change}")
                then = SimpleNamespace(name=str(intact), attributes=saved["attributes"])
                now = SimpleNamespace(name="data.train", attributes=self._card["attributes"])
                check_meaning("run.resume", then, now)  # the numbers of classes and items
                at = checkpoint.load(intact, state, self._order, world.device)
        cure = f"put run.folder ({self._settings.folder}) on a file system that all nodes share"
        world.check_same({"the last checkpoint": at}, cure)
        if world.is_main:
            (self.folder / STOPPED).unlink(missing_ok=True)
            folder.write_record(self.folder, parts.config.model_dump(), str(world), parts.workload.best)
        self.progress = at
        self._infinite = checkpoint.not_finite(state)  # a mask, for instance
        self._saved_step = at.step
        self._agreement = Agreement(world, at.step)
        self.is_asked_to_stop = False
        """Whether a signal to any rank asks for a stop: at the same step on every rank. If so, call `stop`."""
        self.first_step = at.step
        self.first_row = order.rows_before(at.epoch, at.pool)
        """Fresh rows of all ranks before this process began."""
        world.print_once(f"{self.folder}: {world}, {parts.precision.name}, at step {at.step}")

    def __exit__(self, *error: object) -> None:
        """End the loaders, and unlock the folder."""
        self._parts.loader.close()
        self._parts.val_loader.close()
        if self._lock:
            self._lock.close()

    def count(self) -> None:
        """Count one optimizer step, and ask all ranks for signals."""
        self.progress.step += 1
        self.progress.pool_steps += 1
        self.is_asked_to_stop = self._agreement.is_asked_to_stop(self.progress.step)

    def end_pool(self) -> None:
        """Go on to the next pool. Save if run.checkpoint_every_steps steps have passed since the last checkpoint."""
        self.progress.pool += 1
        self.progress.pool_steps = 0
        every = self._settings.checkpoint_every_steps
        if every and self.progress.step - self._saved_step >= every:
            self._save()

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Go on to the next epoch, and save. metrics: {"val/<name>": value}."""
        at = self.progress
        name, direction = self._parts.workload.best
        if f"val/{name}" not in metrics:
            warn(f"`best` of the workload is {name}, but `metrics` gives {', '.join(metrics)}: there is no best one")
        score = metrics.get(f"val/{name}", nan)
        at.end_epoch(score, direction, f"{name} ({direction}) on {self._card['val_rows']}")
        # The best one first: a run that is killed in between repeats the epoch, and misses no best one.
        kinds: tuple[checkpoint.Kind, ...] = ("best", "last") if at.best_epoch == at.epoch else ("last",)
        self._save(*kinds, metrics={key.removeprefix("val/"): value for key, value in metrics.items()})

    def until_asked_to_stop(self, pools: Iterable[Pool]) -> Iterator[Pool]:
        """The pools, up to the one after which a signal to any rank has asked for a stop."""
        for pool in pools:
            yield pool
            self.is_asked_to_stop = self._agreement.is_asked_to_stop(self.progress.step, at_once=True)
            if self.is_asked_to_stop:
                return

    def stop(self) -> int:
        """Save this step, and say that the run was asked to stop, in its folder, too. Returns the exit code.

        It is 128 + the number of the signal, but 0 if torchrun started all ranks on this machine: it would restart
        them. On several machines it should, so that the others go on when one of them leaves (--nnodes=1:2).
        """
        self._save()
        step = self.progress.step
        if self._world.is_main:
            folder.write_or_warn(self.folder / STOPPED, json.dumps({"step": step, "time": time.time()}))
        self._end(f"asked to stop at step {step}, which is saved; run.resume=auto continues from there")
        is_one_machine = self._world.world_size == self._world.local_world_size
        return 0 if read_launch().is_launched and is_one_machine else 128 + self._agreement.stop_signal

    def finish(self) -> int:
        """Print the end of the run. Returns the exit code."""
        at = self.progress
        logs = f"charts: tensorboard --logdir {self._settings.folder}"
        self._end(f"done: epoch {at.epoch}, step {at.step}; {self.folder}; {logs}")
        return 0

    def _end(self, text: str) -> None:
        """Print the last words. Raises UserError on every rank if the last checkpoint is not on disk."""
        with self._world.together():
            if not self._is_saved:
                raise UserError(
                    f"the run is over, but its last checkpoint is not in {self.folder}: make room, and resume it"
                )
        self._world.print_once(text)

    def _save(self, *kinds: checkpoint.Kind, metrics: Mapping[str, float] | None = None) -> None:
        """Save the state, on rank 0, as checkpoints of these kinds, or the last one.

        The running statistics of all ranks are made equal before. Raises UserError on every rank if there is nothing
        worth saving, or if the folder is no longer that of this run.
        """
        for part in self._state.values():
            if isinstance(part, nn.Module):
                average_statistics(part, self._world)
        at = self.progress
        card = {**self._card, "epoch": at.epoch, "step": at.step, "metrics": metrics or {}}
        with self._world.together():
            if bad := checkpoint.not_finite(self._state) - self._infinite:
                raise UserError(
                    f"{min(bad)} is not finite at step {at.step}; nothing is saved; run.resume=auto with a lower "
                    "optim.lr or optim.clip_grad_norm continues from the last checkpoint"
                )
            if self._lock:
                self._lock.check()
        self._saved_step = at.step
        if self._world.is_main:
            for kind in kinds or ("last",):
                self._is_saved = checkpoint.save(self.folder, kind, at, self._state, order=self._order, card=card)
