"""One training run: its folder, its position, its checkpoints and its log."""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fastgpu.process.config import Run as RunSettings
from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError, warn
from fastgpu.process.signals import Agreement
from fastgpu.process.world import World
from fastgpu.rows.contract import Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.run import checkpoint, folder
from fastgpu.run.model_files import ModelToUse
from fastgpu.run.record import Record, describe_metrics, write_or_warn
from fastgpu.telemetry.clock import Clock, Throughput
from fastgpu.telemetry.log import Log
from fastgpu.telemetry.monitor import Monitor, machine_counters
from fastgpu.training.parallel import average_statistics
from fastgpu.training.step import Losses

STOPPED = "stopped.json"
"""File in the folder of a run that was asked to stop and has not been resumed: a job script may look for it."""


class Run:
    """A run in progress, as the training loop uses it. Every rank has one; only rank 0 writes files."""

    def __init__(
        self,
        settings: RunSettings,
        state: Mapping[str, checkpoint.Stateful],
        order: BlockSampler,
        world: World,
        *,
        config: Mapping[str, Any],
        description: Mapping[str, Any],
    ):
        """Find the folder of the run, and load its last checkpoint into `state` if it is to be resumed. Writes nothing.

        state: objects with a state_dict, by name. config: {dotted key: value}, without `auto`. description: see
        `describe_model`. Raises UserError on every rank if the folder or a checkpoint is that of another run.
        """
        self._settings = settings
        self._state = state
        self._order = order
        self._world = world
        self._config = dict(config)
        self._description = description
        metric, self._direction = description["best"]
        self._metric = f"val/{metric}"
        self._epochs = config["train.epochs"]
        is_resumed = settings.resume == "auto"
        self._lock: FolderLock | None = None
        self._agreement = Agreement(world)
        found = None
        with world.together():
            if world.is_main:
                path = folder.find_folder(settings)
                if is_resumed and path.exists():
                    self._lock = folder.lock(path)  # before its checkpoints are read
                changes = folder.find_changes(path, config) if is_resumed else {}
                folder.refuse_another(path, settings, changes)
                found = path, changes
        self.folder: Path
        self.folder, changes = world.broadcast(found)
        world.print_once(folder.describe_choice(self.folder, settings))
        self.progress = checkpoint.Progress()
        with world.together():
            if is_resumed:
                hint = folder.trained_with(self.folder, changes, "model.")
                self.progress = checkpoint.resume(
                    self.folder, state, order.identity, world.device, description=description, hint=hint
                )
        cure = f"put run.folder ({settings.folder}) on a file system that all nodes share"
        world.check_same({"the last checkpoint": self.progress}, cure)
        world.print_once(folder.describe_changes(changes))
        if self.progress.validate_on(description["val_rows"]):
            warn("resumed with other validation rows: the best value so far was measured on others and is forgotten")
        if self._epochs <= self.progress.epoch:
            world.print_once(
                f"{self.folder}: epoch {self.progress.epoch} is done, so nothing is left to train; raise train.epochs "
                f"({self._epochs})"
            )
        self.clock = Clock(world.device)
        self.epoch_throughput = Throughput()
        self._monitor = Monitor(None)
        self._losses = Losses()
        is_inside_epoch = self.progress.pool or self.progress.pool_steps
        self._epoch_loss_name = "train/loss since the resume" if is_inside_epoch else "train/loss"
        self._metrics: dict[str, float] = {}
        self._is_saved = True
        self._saved_step = self.progress.step

    def start(self, card: Mapping[str, Any]) -> None:
        """Create the folder, write what is needed to repeat the run, and begin to log.

        card: what the workload says about the model. Raises UserError on every rank if the folder cannot be written, or
        nothing can be sent to log.wandb.
        """
        with self._world.together():
            if self._world.is_main:
                folder.create_folder(self.folder)
                if self._lock is None:
                    self._lock = folder.lock(self.folder)
                    folder.refuse_begun(self.folder)
                (self.folder / STOPPED).unlink(missing_ok=True)
                self.progress.saved_at = max(folder.save_times(self.folder.parent).values(), default=0.0)
        self._agreement.listen()
        if self._world.is_main:
            self._record = Record(self.folder)
            self._record.write_description(card, self._description["best"])
            self._record.write_config(self._config)
        self._monitor = Monitor(machine_counters(self._world.gpus) if self._world.is_main else None)
        with self._world.together():
            at = self.progress
            self._log = Log(
                self.folder if self._world.is_main else None,
                planned_rows=self._epochs * self._order.total_size,
                consumed_rows=at.epoch * self._order.total_size + self._order.rows_before(at.pool),
                step=self.progress.step,
                config=self._config,
            )
        self._tell_missing()
        self.clock.restart()

    def count(self, loss: Tensor, fresh_rows: float, trained_rows: int) -> None:
        """Count one optimizer step. loss: a scalar on the device, not read here."""
        self._losses.add(loss)
        self.progress.step += 1
        self.progress.pool_steps += 1
        self.clock.count(fresh_rows, trained_rows)
        self._log.count(fresh_rows)

    def report(self, fresh_rows: float, lr: float) -> None:
        """Log the steps since the last report, if there are any.

        This is the only place of the loop where the host waits for the device.

        fresh_rows: rows read since the beginning of the run. Raises UserError on every rank if the loss is not finite.
        """
        if not self._losses:
            return
        n_steps = len(self._losses)
        loss = self._losses.take(self._world)
        step = self.progress.step
        if not isfinite(loss):
            lr_now = self._config["optim.lr"]
            raise UserError(f"the loss is {loss} at step {step}; lower optim.lr ({lr_now}) or optim.clip_grad_norm")
        throughput = self.clock.take(self._world.all_reduce_max)
        seconds = self._world.all_reduce_max(throughput.seconds)
        self.epoch_throughput = self.epoch_throughput.plus(throughput)
        self._agreement.set_pace(throughput.steps / seconds)
        counters = self._monitor.scalars()
        self._tell_missing()
        scalars = {"train/lr": lr, "train/loss": loss} | throughput.scalars() | counters
        text = f"epoch {self.progress.epoch + 1}/{self._epochs}, step {step}: loss {loss:.4f}, {throughput}"
        self._losses.add_to_epoch(loss, n_steps)
        self._log.scalars(step, scalars, throughput)
        self._log.progress(fresh_rows, text)
        if self._world.device.type == "cpu":
            self._log.hint_at_slow_cpu()

    def save_if_due(self, model: nn.Module) -> None:
        """Save inside an epoch, if run.checkpoint_every_steps steps have passed since the last checkpoint.

        model: the model to use, which is the averaged one with train.ema.
        """
        every = self._settings.checkpoint_every_steps
        if every and self.progress.step - self._saved_step >= every:
            self._save(model)

    def is_asked_to_stop(self, model: nn.Module) -> bool:
        """Whether a signal to any rank asks for a stop. If so, save, at the same step on every rank.

        model: the model to use.
        """
        is_asked = self._agreement.is_asked_to_stop(self.progress.step)
        if is_asked:
            self._save(model)
        return is_asked

    def until_asked_to_stop(self, pools: Iterable[Pool]) -> Iterator[Pool]:
        """The pools, up to the one after which a signal to any rank has asked for a stop."""
        for pool in pools:
            yield pool
            if self._agreement.is_asked_to_stop_now():
                return

    def stop(self) -> int:
        """Say that the run was asked to stop, in its folder, too. Returns the exit code.

        It is 128 + the number of the signal, but 0 if torchrun started all ranks on this machine: it would restart
        them. On several machines it should: where one of them leaves, the others go on as soon as another one joins, or
        without it (--nnodes=1:2). A machine that leaves starts nothing again, whatever its ranks end with.
        """
        self._agreement.outlive_run()
        self._log.finish(self._metrics)
        self.close()
        if self._world.is_main:
            write_or_warn(self.folder / STOPPED, json.dumps({"step": self.progress.step, "time": time.time()}))
        with self._world.together():
            if not self._is_saved:
                raise UserError(
                    f"asked to stop at step {self.progress.step}, which could not be saved in {self.folder}"
                )
        self._world.print_once(
            f"asked to stop at step {self.progress.step}, which is saved; run.resume=auto continues from there"
        )
        is_one_machine = self._world.world_size == self._world.local_world_size
        return 0 if self._world.is_launched and is_one_machine else 128 + self._agreement.stop_signal

    def end_epoch(self, model: nn.Module, metrics: dict[str, float]) -> None:
        """Advance to the next epoch, save, and log the validation metrics.

        model: the model to use. metrics: {"val/<name>": value}.
        """
        self.progress.end_epoch(self._metric, metrics[self._metric], self._direction)
        self._metrics = metrics
        self._save(model, may_be_best=True)
        self._log.scalars(self.progress.step, metrics)
        fresh_rows = self.progress.epoch * self._order.total_size
        mean_loss = self._losses.epoch_mean
        shown = metrics if mean_loss is None else {self._epoch_loss_name: mean_loss, **metrics}
        text = f"epoch {self.progress.epoch}/{self._epochs} {describe_metrics(shown)}, {self.epoch_throughput}"
        at = self.progress
        if metrics[self._metric] == at.best and at.best_epoch < at.epoch:
            text += f"; {self._metric} equals that of epoch {at.best_epoch}, which stays the best one"
        self._log.progress(fresh_rows, text, important=True)
        self.epoch_throughput = Throughput()
        self._losses.begin_epoch()
        self._epoch_loss_name = "train/loss"
        self.clock.restart()

    def finish(self) -> None:
        """Print the summary. Raises UserError if the last checkpoint could not be written."""
        self._agreement.outlive_run()
        self._log.finish(self._metrics)
        self.close()
        with self._world.together():
            if not self._is_saved:
                raise UserError(
                    f"the run is over, but its last checkpoint is not in {self.folder}: make room, and resume it"
                )
        self._world.print_once(
            f"done: epoch {self.progress.epoch}, step {self.progress.step}; {self.folder}; "
            f"charts: tensorboard --logdir {self._settings.folder}"
        )

    def close(self) -> None:
        """End the threads, and unlock the folder."""
        self._monitor.close()
        self._agreement.close()
        if self._lock:
            self._lock.close()
            self._lock = None

    def _tell_missing(self) -> None:
        missing = self._monitor.take_missing()
        if missing:
            self._world.print_once(f"not measured here: {', '.join(missing)}")

    def _save(self, model: nn.Module, *, may_be_best: bool = False) -> None:
        """Save the state, on rank 0. model: the model to use.

        The buffers of all ranks are made equal before. Raises UserError on every rank if there is nothing worth saving.
        """
        for part in self._state.values():
            if isinstance(part, nn.Module):
                average_statistics(part, self._world)
        if not _is_finite(self._state):
            raise UserError(
                f"weights or the state of the optimizer are not finite at step {self.progress.step}; nothing is saved; "
                "run.resume=auto with a lower optim.lr or optim.clip_grad_norm continues from the last checkpoint"
            )
        self._saved_step = self.progress.step
        if not self._world.is_main:
            return
        at = self.progress
        is_epoch_over = not (at.pool or at.pool_steps)
        metrics = {name.removeprefix("val/"): value for name, value in self._metrics.items()} if is_epoch_over else {}
        to_use = ModelToUse(model, {**self._description, "epoch": at.epoch, "step": at.step, "metrics": metrics})
        at.saved_at = max(time.time(), at.saved_at + 0.001)
        kinds: list[checkpoint.Kind] = ["last"]
        if may_be_best and at.best_epoch == at.epoch:
            kinds.insert(0, "best")  # a run that is killed before it repeats the epoch: no best one is missed
        for kind in kinds:
            self._is_saved = checkpoint.save(
                self.folder, kind, at, self._state, order=self._order.identity, to_use=to_use
            )
            if self._is_saved:
                checkpoint.prune(self.folder, kind, at.step)


def _is_finite(state: Mapping[str, checkpoint.Stateful]) -> bool:
    """Whether no weight and no value of the optimizer is NaN or infinite. Buffers may be: a mask, for instance."""
    values: list[Any] = []
    for part in state.values():
        values += part.parameters() if isinstance(part, nn.Module) else tree_leaves(part.state_dict())
    finite: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel():
            extremes = torch.stack(value.aminmax())  # NaN if one is; many times faster than isfinite of every value
            finite.setdefault(value.device, []).append(extremes.isfinite().all())
    return all(bool(torch.stack(flags).all()) for flags in finite.values())
