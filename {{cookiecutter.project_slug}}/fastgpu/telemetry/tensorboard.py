"""The outputs of a run's scalars: event files of TensorBoard, metrics.jsonl and a progress bar. On rank 0 only.

A log that cannot be written never stops a run: the first error is reported, later errors are ignored.
"""

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Any
from uuid import uuid4

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from fastgpu.process.files import open_to_append
from fastgpu.process.launch import UserError, say, warn
from fastgpu.process.world import World
from fastgpu.telemetry.clock import Throughput

LINE_EVERY_S = 5.0
"""Seconds between two lines of progress, which replace the bar if stderr is not a terminal."""
MIN_STEPS = 20
"""Minimum number of steps, unless an epoch is shorter, before a line says that the run is input-bound: in fewer steps,
the wait for the first pool dominates."""


class TensorBoard(AbstractContextManager["TensorBoard"]):
    """Takes the scalars and the progress of a run. On every rank but rank 0 it does nothing."""

    def __init__(self, folder: Path, config: Mapping[str, Any], world: World, *, step: int):
        """folder: of the run. config: {dotted key: value}. step: number of steps that are done.

        Raises UserError on every rank if wandb refuses.
        """
        self._folder = folder if world.is_main else None
        self._n_epochs = config["train.epochs"]
        self._n_steps = config["train.steps"]
        self._by_steps = self._n_steps > 0 or config["train.validate_every_steps"] > 0
        self._share_done = 0.0
        self._points: list[tuple[float, Throughput]] = []  # loss and interval of each point since the last validation
        self._has_warned = False
        self._printed = time.monotonic()
        self._part = round(time.time())  # identifies this process: a resumed run has points of several processes
        self._bar = tqdm(
            initial=step,
            unit=" steps",
            dynamic_ncols=True,
            mininterval=1,
            miniters=0,  # the bar also moves in an epoch of few steps
            smoothing=0,
            disable=not (world.is_main and sys.stderr and sys.stderr.isatty()),
        )
        with world.raise_on_all_ranks():
            if self._folder and config["log.wandb"]:
                _start_wandb(folder, config)
        self.writer: SummaryWriter | None = None
        """To log images, texts and histograms. None on other ranks, and if the disk has refused."""
        threading.excepthook = partial(_show_error, threading.excepthook)
        if self._folder:
            with self._forgiving():
                purge_step = step + 1 if step else None  # a resumed run trains these steps again
                self.writer = SummaryWriter(str(self._folder), purge_step=purge_step)
                lines = [f"    {key}: {json.dumps(value)}" for key, value in config.items()]
                self.writer.add_text("config", "\n".join(lines))  # indented by four: code in Markdown

    def __exit__(self, *error: object) -> None:
        """Close the bar and the files."""
        self._bar.close()
        if self.writer:
            with self._forgiving():
                self.writer.close()

    def count(self, step: int, share_done: float) -> None:
        """Count a step that is queued for the device. share_done: the share of the run that is done in its middle.

        The bar is drawn once a second.
        """
        self._share_done = share_done
        self._bar.total = round((step - 0.5) / share_done)
        self._bar.update()

    def write(self, step: int, values: Mapping[str, float], interval: Throughput | None = None) -> None:
        """Log one point: {tag: value} at this optimizer step.

        interval: the steps that the values describe. Its rates are logged, and shown beside the bar or as a line. Its
        sums are written to metrics.jsonl, for means over the run.
        """
        if not self._folder:
            return
        point: dict[str, float | None] = {"step": step, "time_s": round(time.time(), 3), "part": self._part}
        if interval:
            self._points.append((values["train/loss"], interval))
            text = f"step {step}: loss {values['train/loss']:.4f}, {interval}"
            if (local_pct := values.get("storage/local_pct", 100)) < 99:
                text += f", {local_pct:.0f} % of the data fetched"
            self._bar.set_postfix_str(text)
            if self._bar.disable and time.monotonic() - self._printed >= LINE_EVERY_S:
                self._printed = time.monotonic()
                say(f"{text}, {100 * self._share_done:.0f} % done")
            values = {**values, **interval.scalars()}
            point |= interval._asdict()
        with self._forgiving():
            with open_to_append(self._folder / "metrics.jsonl") as file:
                # JSON has no NaN and no Infinity, but the gradient norm of a first fp16 step may be one of them.
                finite = {tag: value if isfinite(value) else None for tag, value in values.items()}
                file.write(json.dumps({**point, **finite}, allow_nan=False) + "\n")
            for tag, value in values.items():
                if self.writer:
                    self.writer.add_scalar(tag, value, step)

    def write_validation(
        self, epoch: int, step: int, metrics: Mapping[str, float], bottleneck: str = "", *, epoch_steps: int = 0
    ) -> None:
        """Log the metrics of a validation, and print them with the means of the steps since the last one.

        epoch, step: number of epochs and steps that are done. metrics: {tag: value}; the tags of the group `val` are
        printed. bottleneck: the slowest stage of the feed and what to try, in words, printed if steps have waited.
        epoch_steps: number of steps in an epoch.
        """
        if not self._folder:
            return
        self.write(step, metrics)
        text = ", ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name.startswith("val/"))
        if self._points:  # empty if a resumed run begins with a validation
            total = Throughput(*map(sum, zip(*(interval for _, interval in self._points), strict=True)))
            loss = sum(loss * interval.steps for loss, interval in self._points) / total.steps
            text = f"train/loss {loss:.4g}, {text}, {total}"
            if total.wait_s > 0.1 * total.seconds and total.steps >= min(MIN_STEPS, epoch_steps):
                cures = (bottleneck, "run `python diagnose.py` with the same arguments")
                text += f" (input-bound: {', or '.join(filter(None, cures))})"
        self._bar.clear()
        end = f"/{self._n_steps}" if self._n_steps else ""
        say(f"step {step}{end} {text}" if self._by_steps else f"epoch {epoch}/{self._n_epochs} {text}")
        self._points.clear()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Ignore any exception of a disk or a writer, and warn of the first: the run loses a point of the log."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                warn(f"cannot log to {self._folder} ({type(error).__name__}: {error}); training continues")
            self._has_warned = True


def _show_error(hook: Callable[[threading.ExceptHookArgs], object], args: threading.ExceptHookArgs) -> None:
    """Show the error of a thread, except a thread of SummaryWriter: the next call of the writer raises its error."""
    if not type(args.thread).__module__.startswith("tensorboard."):
        hook(args)


def _start_wandb(folder: Path, config: Mapping[str, Any]) -> None:
    """Let wandb copy what SummaryWriter writes from here on. A resumed run continues its W&B run, found by its id."""
    project, path = config["log.wandb"], folder / "wandb-id.txt"
    try:
        import wandb

        with open_to_append(path) as file:
            if not file.tell():
                file.write(uuid4().hex)
        wandb.init(
            project=project,
            name=folder.name,
            id=path.read_text(encoding="utf-8"),
            dir=folder,
            config=dict(config),
            allow_val_change=True,  # such as a longer run
            resume="allow",
            sync_tensorboard=True,
        )
    except Exception as error:
        raise UserError(f'log.wandb is {project}, but {error}; use log.wandb="" to train without it') from None
