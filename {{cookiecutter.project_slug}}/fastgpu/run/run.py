"""One training run: its folder, its lock, its position, its checkpoints and the signals to it."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Set
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError, warn
from fastgpu.process.signals import Agreement
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.run import checkpoint, folder
from fastgpu.run.model_files import ModelToUse, describe_model
from fastgpu.run.record import write_or_warn, write_record
from fastgpu.training.parallel import average_statistics

STOPPED = "stopped.json"
"""File in the folder of a run that was asked to stop and has not been resumed: a job script may look for it."""


class Run:
    """A run in progress, as the training loop uses it. Every rank has one; only rank 0 writes files."""

    def __init__(self, parts: Any, world: World):
        """Find the folder of the run, and load its last checkpoint into parts.state if it is to be resumed.

        Writes nothing. parts: those of train.py. Raises UserError on every rank if the folder or a checkpoint is that
        of another run.
        """
        settings = self._settings = parts.config.run
        config = parts.config.flat()
        self.config: Mapping[str, Any] = config
        workload = parts.workload
        rows = parts.train_rows, parts.val_rows
        description = self._description = describe_model(config, rows, workload.card(), workload.best)
        self._parts = parts
        self._state: dict[str, checkpoint.Stateful] = parts.state
        self.order: BlockSampler = parts.loader.order
        self._world = world
        self._best, self._direction = description["best"]
        self._metrics: dict[str, float] = {}
        self._is_saved = True
        self._lock: FolderLock | None = None
        self._agreement = Agreement(world)
        is_resumed = settings.resume == "auto"
        found = None
        with world.together():
            if world.is_main:
                path = folder.find_folder(settings)
                if is_resumed and path.exists():
                    self._lock = folder.lock(path)  # before its checkpoints are read
                changes = folder.find_changes(path, config) if is_resumed else {}
                folder.refuse_another(path, settings, changes)
                found = path, changes, checkpoint.find_intact(path) if is_resumed else None
        self.folder: Path
        self.folder, changes, intact = world.broadcast(found)
        world.print_once(folder.describe_choice(self.folder, settings))
        self.progress = checkpoint.Progress()
        with world.together():
            if intact:
                hint = folder.trained_with(self.folder, changes, "model.")
                identity = self.order.identity
                self.progress = checkpoint.load(
                    intact, self._state, identity, world.device, description=description, hint=hint
                )
        self._finite = {key for key, value in _buffers(self._state).items() if bool(value.isfinite().all())}
        at = self.progress
        self._saved_step = at.step
        self.first_step = at.step
        self.first_row = at.epoch * self.order.total_size + self.order.rows_before(at.pool)
        """Fresh rows of all ranks before this process began."""
        world.print_once(f"{self.folder}: {world}, {parts.precision.name}, at step {at.step}")
        cure = f"put run.folder ({settings.folder}) on a file system that all nodes share"
        world.check_same({"the last checkpoint": self.progress}, cure)
        world.print_once(folder.describe_changes(changes))
        if self.progress.validate_on(description["val_rows"]):
            warn("resumed with other validation rows: the best value so far was measured on others and is forgotten")
        if (epochs := config["train.epochs"]) <= self.progress.epoch:
            world.print_once(
                f"{self.folder}: epoch {self.progress.epoch} is done, so nothing is left to train; raise train.epochs "
                f"({epochs})"
            )

    def __enter__(self) -> Self:
        """Create the folder, write what is needed to repeat the run, and listen to signals. Raises UserError on every
        rank if the folder cannot be written."""
        with self._world.together():
            if self._world.is_main:
                folder.create_folder(self.folder)
                if self._lock is None:
                    self._lock = folder.lock(self.folder)
                    folder.refuse_begun(self.folder)
                checkpoint.remove_partial(self.folder)
                (self.folder / STOPPED).unlink(missing_ok=True)
                self.progress.saved_at = max(folder.save_times(self.folder.parent).values(), default=0.0)
                write_record(self.folder, self.config, (self._best, self._direction))
        self._agreement.listen(self.progress.step)
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the loaders, handle signals as before, and unlock the folder."""
        self._parts.loader.close()
        self._parts.val_loader.close()
        self._agreement.close()
        if self._lock:
            self._lock.close()
            self._lock = None

    def count(self) -> None:
        """Count one optimizer step."""
        self.progress.step += 1
        self.progress.pool_steps += 1

    def end_pool(self) -> None:
        """Go on to the next pool. Save if run.checkpoint_every_steps steps have passed since the last checkpoint."""
        self.progress.pool += 1
        self.progress.pool_steps = 0
        every = self._settings.checkpoint_every_steps
        if every and self.progress.step - self._saved_step >= every:
            self._save()

    def end_epoch(self, metrics: Mapping[str, float]) -> None:
        """Go on to the next epoch, and save. metrics: {"val/<name>": value}."""
        name = f"val/{self._best}"
        self._metrics = {key.removeprefix("val/"): value for key, value in metrics.items()}
        self.progress.end_epoch(name, metrics[name], self._direction)
        self._save(may_be_best=True)

    def is_asked_to_stop(self) -> bool:
        """Whether a signal to any rank asks for a stop: at the same step on every rank. If so, call `stop`."""
        return self._agreement.is_asked_to_stop(self.progress.step)

    def until_asked_to_stop(self, pools: Iterable[Pool]) -> Iterator[Pool]:
        """The pools, up to the one after which a signal to any rank has asked for a stop."""
        for pool in pools:
            yield pool
            if self._agreement.is_asked_to_stop_now():
                return

    def stop(self) -> int:
        """Save this step, and say that the run was asked to stop, in its folder, too. Returns the exit code.

        It is 128 + the number of the signal, but 0 if torchrun started all ranks on this machine: it would restart
        them. On several machines it should: where one of them leaves, the others go on as soon as another one joins, or
        without it (--nnodes=1:2). A machine that leaves starts nothing again, whatever its ranks end with.
        """
        self._save()
        self._agreement.outlive_run()
        step = self.progress.step
        if self._world.is_main:
            write_or_warn(self.folder / STOPPED, json.dumps({"step": step, "time": time.time()}))
        with self._world.together():
            if not self._is_saved:
                raise UserError(f"asked to stop at step {step}, which could not be saved in {self.folder}")
        self._world.print_once(f"asked to stop at step {step}, which is saved; run.resume=auto continues from there")
        is_one_machine = self._world.world_size == self._world.local_world_size
        return 0 if self._world.is_launched and is_one_machine else 128 + self._agreement.stop_signal

    def finish(self) -> int:
        """Print the end of the run. Returns the exit code. Raises UserError if the last checkpoint is not written."""
        self._agreement.outlive_run()
        with self._world.together():
            if not self._is_saved:
                raise UserError(
                    f"the run is over, but its last checkpoint is not in {self.folder}: make room, and resume it"
                )
        self._world.print_once(
            f"done: epoch {self.progress.epoch}, step {self.progress.step}; {self.folder}; "
            f"charts: tensorboard --logdir {self._settings.folder}"
        )
        return 0

    def _save(self, *, may_be_best: bool = False) -> None:
        """Save the state, on rank 0.

        The running statistics of all ranks are made equal before. Raises UserError on every rank if there is nothing
        worth saving.
        """
        for part in self._state.values():
            if isinstance(part, nn.Module):
                average_statistics(part, self._world)
        at = self.progress
        with self._world.together():
            if not _is_finite(self._state, self._finite):
                raise UserError(
                    f"weights, statistics or the state of the optimizer are not finite at step {at.step}; nothing is "
                    "saved; run.resume=auto with a lower optim.lr or optim.clip_grad_norm continues from the last "
                    "checkpoint"
                )
            if self._lock:
                self._lock.check()
        self._saved_step = at.step
        if not self._world.is_main:
            return
        metrics = {} if at.pool or at.pool_steps else self._metrics
        description = {**self._description, "epoch": at.epoch, "step": at.step, "metrics": metrics}
        to_use = ModelToUse(self._parts.model_to_use(), description)
        at.saved_at = max(time.time(), at.saved_at + 0.001)
        kinds: list[checkpoint.Kind] = ["last"]
        if may_be_best and at.best_epoch == at.epoch:
            kinds.insert(0, "best")  # a run that is killed before it repeats the epoch: no best one is missed
        for kind in kinds:
            self._is_saved = checkpoint.save(
                self.folder, kind, at, self._state, order=self.order.identity, to_use=to_use
            )


def _buffers(state: Mapping[str, checkpoint.Stateful]) -> dict[str, Tensor]:
    """{name: buffer of floats} of all modules."""
    modules = [(name, part) for name, part in state.items() if isinstance(part, nn.Module)]
    buffers = {f"{name}.{key}": buffer for name, part in modules for key, buffer in part.named_buffers()}
    return {key: buffer for key, buffer in buffers.items() if buffer.is_floating_point()}


def _is_finite(state: Mapping[str, checkpoint.Stateful], finite_buffers: Set[str]) -> bool:
    """Whether no weight and no value of the optimizer is NaN or infinite, nor one of these buffers.

    finite_buffers: those that were finite at the start. Others may be: a mask, for instance.
    """
    values: list[Any] = [buffer for key, buffer in _buffers(state).items() if key in finite_buffers]
    for part in state.values():
        values += part.parameters() if isinstance(part, nn.Module) else tree_leaves(part.state_dict())
    finite: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            extremes = torch.stack(value.aminmax())  # NaN if one is; many times faster than isfinite of every value
            finite.setdefault(value.device, []).append(extremes.isfinite().all())
    return all(bool(torch.stack(flags).all()) for flags in finite.values())
