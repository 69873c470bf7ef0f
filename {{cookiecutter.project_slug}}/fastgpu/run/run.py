"""One training run: its folder, its lock, its position, its checkpoints and the signals to it."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime
from math import isfinite, nan
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import nn

from fastgpu.process import config
from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError, read_launch, warn
from fastgpu.process.signals import Agreement
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.run import checkpoint
from fastgpu.run.record import describe_model, write_or_warn, write_record
from fastgpu.storage.meaning import check_meaning
from fastgpu.training.parallel import average_statistics


def lock_folder(settings: config.Run) -> tuple[Path, FolderLock]:
    """Create the folder of a run, and lock it. What a process that was killed while it saved has left is removed.

    The name `auto` means the run that saved last when resuming, else date and time. Raises UserError if the folder
    cannot be written, if another process has it, or if a new run would mix its checkpoints with those of an older one.
    """
    name = settings.name
    if name == "auto":
        saved = Path(settings.folder).glob("*/checkpoints/last-*") if settings.resume == "auto" else ()
        newest = max(saved, key=os.path.getmtime, default=None)
        name = newest.parents[1].name if newest else f"{datetime.now():%Y%m%d-%H%M%S-%f}"
    path = Path(settings.folder) / name
    try:
        (path / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = FolderLock(path)
    except OSError as error:
        raise UserError(f"run.folder: cannot write to {path} ({error.strerror}); use another run.folder") from None
    if settings.resume == "never" and any(path.glob("checkpoints/*-[0-9]*")):
        lock.close()
        raise UserError(f"run.name: {path} holds a run; run.resume=auto continues it, or use another run.name")
    for partial in path.glob(f"checkpoints/{checkpoint.PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)
    return path, lock


class Run(AbstractContextManager["Run"]):
    """A run in progress, as the training loop uses it. Every rank has one; only rank 0 writes files."""

    def __init__(self, parts: Any, world: World):
        """Lock the folder of the run, and load its last checkpoint, if any. Signals are noticed from here on.

        parts: those of train.py; a checkpoint keeps whatever has a state_dict, such as a second optimizer. Raises
        UserError on every rank if the folder cannot be written, or if it or a checkpoint is that of another run.
        """
        copies = ("ddp",) if parts.config.train.ema else ("ddp", "ema")  # of the weights of the model
        kept = {name: part for name, part in parts._asdict().items() if hasattr(part, "state_dict")}
        self._state = {"scaler": parts.precision.scaler} | {name: kept[name] for name in kept if name not in copies}
        self._parts = parts
        self._world = world
        self._lock: FolderLock | None = None
        self._is_saved = True
        self.config: Mapping[str, Any] = parts.config.flat()
        self._card = describe_model(self.config, parts.train_rows, parts.val_rows, parts.workload.card())
        order = parts.loader.order
        self._card["order"] = order.identity | {"content": self._card["rows"]}
        found = None
        with world.together():
            if world.is_main:
                path, self._lock = lock_folder(parts.config.run)
                found = path, checkpoint.find_intact(path)
        self.folder, intact = world.broadcast(found)
        at = checkpoint.Progress()
        with world.together():
            if intact:
                saved = json.loads((intact / checkpoint.DESCRIPTION).read_text(encoding="utf-8"))
                if parts.config.run.name == "auto" and saved["rows"] != self._card["rows"]:
                    raise UserError(f"run.name: the newest run, {self.folder}, has other rows; name the one to resume")
                for key, old in saved["config"].items():
                    is_learned = key == "run.seed" or not key.startswith(("run.", "log.", "loader.", "dist."))
                    if is_learned and str(self.config.get(key, old)) != str(old):
                        world.print_once(f"resumed with {key}={self.config[key]} (was {old})")
                then = SimpleNamespace(name=str(intact), attributes=saved["attributes"])
                now = SimpleNamespace(name="data.train", attributes=self._card["attributes"])
                check_meaning("run.resume", then, now)  # the numbers of classes and items
                at = checkpoint.load(intact, self._state, self._card["order"], world.device)
        world.check_same({"the last checkpoint in run.folder, which all nodes should share,": at})
        if world.is_main:
            (self.folder / "stopped.json").unlink(missing_ok=True)
            write_record(self.folder, parts.config.model_dump(), str(world), parts.workload.best)
        self.progress = at
        self._infinite = checkpoint.not_finite(self._state)  # a mask, for instance
        self._saved_step = at.step
        self._agreement = Agreement(world, at.step)
        self.is_asked_to_stop = False
        """Whether a signal to any rank asks for a stop: at the same step on every rank. If so, call `finish`."""
        self.first_step = at.step
        self.first_row = order.rows_before(at.epoch, at.pool)
        """Fresh rows of all ranks before this process began."""
        self.planned_rows = order.rows_before(parts.config.train.epochs, 0)
        """Fresh rows of all ranks in the whole run."""
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
        every = self._parts.config.run.checkpoint_every_steps
        if every and self.progress.step - self._saved_step >= every:
            self._save()

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Go on to the next epoch, and save. metrics: {"val/<name>": value}."""
        at = self.progress
        at.epoch += 1
        at.pool = 0
        at.pool_steps = 0
        name, direction = self._parts.workload.best
        if f"val/{name}" not in metrics:
            warn(f"`best` of the workload is {name}, but `metrics` gives {', '.join(metrics)}: there is no best one")
        score = metrics.get(f"val/{name}", nan)
        metric = f"{name} ({direction}) on {self._card['val_rows']}"
        if at.metric != metric:
            at.metric = metric
            at.best = None
        sign = 1 if direction == "higher" else -1
        if isfinite(score) and (at.best is None or sign * score > sign * at.best):
            at.best = score
            at.best_epoch = at.epoch
        self._save(metrics, is_best=at.best_epoch == at.epoch)

    def val_pools(self) -> Iterator[Pool]:
        """The pools of the validation rows, up to the one after which a signal to any rank has asked for a stop."""
        for pool in self._parts.val_loader.pools(self.progress.epoch):
            yield pool
            self.is_asked_to_stop = self._agreement.is_asked_to_stop(self.progress.step, at_once=True)
            if self.is_asked_to_stop:
                return

    def finish(self) -> int:
        """Print how the run ended; if it was asked to stop, save this step before. Returns the exit code.

        After a signal it is 128 + its number, but 0 if torchrun started all ranks on this machine: it would restart
        them. On several machines it should: the others go on when one of them leaves (--nnodes=1:2). Raises UserError
        on every rank if the last checkpoint is not on disk.
        """
        at = self.progress
        code = 0
        text = (
            f"done: epoch {at.epoch}, step {at.step}; {self.folder}; charts: tensorboard --logdir {self.folder.parent}"
        )
        if self.is_asked_to_stop:
            text = f"asked to stop at step {at.step}, which is saved; run.resume=auto continues from there"
            self._save()
            if self._world.is_main:
                write_or_warn(self.folder / "stopped.json", json.dumps({"step": at.step}))  # for the script of a job
            is_one_machine = self._world.world_size == self._world.local_world_size
            code = 0 if read_launch().is_launched and is_one_machine else 128 + self._agreement.stop_signal
        with self._world.together():
            if not self._is_saved:
                raise UserError(f"the last checkpoint is not in {self.folder}: make room, and resume the run")
        self._world.print_once(text)
        return code

    def _save(self, metrics: Mapping[str, float] = MappingProxyType({}), *, is_best: bool = False) -> None:
        """Save the state on rank 0. The running statistics of all ranks are made equal before.

        Raises UserError on every rank if a value is not finite, or if the folder is no longer that of this run.
        """
        for part in self._state.values():
            if isinstance(part, nn.Module):
                average_statistics(part, self._world)
        at = self.progress
        scores = {key.removeprefix("val/"): value for key, value in metrics.items()}
        card = {**self._card, "epoch": at.epoch, "step": at.step, "metrics": scores}
        with self._world.together():
            if bad := checkpoint.not_finite(self._state) - self._infinite:
                raise UserError(
                    f"{min(bad)} is not finite at step {at.step}; nothing is saved; resume with lower optim.lr"
                )
            if self._lock:
                self._lock.check()
        self._saved_step = at.step
        if self._world.is_main:
            if is_best:  # first: a run that is killed in between repeats the epoch, and misses no best one
                checkpoint.save(self.folder, "best", at, self._state, card=card)
            self._is_saved = checkpoint.save(self.folder, "last", at, self._state, card=card)
