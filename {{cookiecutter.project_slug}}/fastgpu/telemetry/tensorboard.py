"""Where the scalars of a run go: event files of TensorBoard, metrics.jsonl and a progress bar. On rank 0 only.

A log that cannot be written never stops a run: the first error is reported, later ones are ignored.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, Self

from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

from fastgpu.process.launch import UserError, warn
from fastgpu.process.world import World
from fastgpu.telemetry.clock import Throughput

INPUT_BOUND = 0.1
"""An epoch that waits for data for a larger share of its time is input-bound."""
LINE_EVERY_S = 5.0
"""Seconds between two progress lines if the output is not a terminal."""
BAR_EVERY_S = 1.0
"""Seconds between two updates of the progress bar."""


class Started(Protocol):
    """What is asked of a `Run`."""

    folder: Path
    config: Mapping[str, Any]
    """{dotted key: value}"""
    first_row: int
    """Fresh rows of all ranks before this process began."""
    first_step: int


class TensorBoard:
    """Takes the scalars and the progress of a run. On every rank but rank 0 it does nothing."""

    def __init__(self, run: Started, planned_rows: int, world: World):
        """planned_rows: fresh rows of the whole run. Raises UserError on every rank if wandb refuses."""
        self._folder = run.folder if world.is_main else None
        self._epoch = Throughput()
        self._epoch_loss = 0.0  # the sum over its steps
        self._has_warned = False
        last = _last_point(run.folder)
        self._begun = self._printed = time.monotonic()
        self._t0 = self._begun - last.get("time_s", 0.0)  # the time of a resumed run goes on from where it stopped
        self._part = 1 + last.get("part", 1) if last else 1
        self._planned_rows = planned_rows
        self._first_row = run.first_row
        self._row = float(run.first_row)
        self._bar = tqdm(
            total=planned_rows,
            initial=run.first_row,
            unit=" rows",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=BAR_EVERY_S,
            miniters=0,
            smoothing=0,
            disable=self._folder is None or not sys.stderr.isatty(),
        )
        with world.together():
            self._wandb = _start_wandb(run) if self._folder and run.config["log.wandb"] else None
        self._writer: SummaryWriter | None = None
        if self._folder:
            with self._forgiving():
                purge_step = run.first_step + 1 if run.first_step else None  # a resumed run trains these steps again
                self._writer = SummaryWriter(str(self._folder), purge_step=purge_step)
                lines = [f"    {key}: {json.dumps(value)}" for key, value in run.config.items()]
                self._writer.add_text("config", "\n".join(lines))  # indented by four: code in Markdown

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the bar and the files."""
        self._bar.close()
        if self._writer:
            with self._forgiving():
                self._writer.close()
        if self._wandb:
            self._wandb.finish(exit_code=int(kind is not None))

    def count(self, fresh_rows: float) -> None:
        """Advance the bar by these rows, which the host has queued for the device. It is drawn once a second."""
        self._row += fresh_rows
        self._bar.update(round(self._row) - self._bar.n)

    def write(self, step: int, values: Mapping[str, float], interval: Throughput | None = None) -> None:
        """Log one point: {tag: value} at this optimizer step.

        interval: the steps that the values are about. Its rates are logged, too, and its sums are written to
        metrics.jsonl, so that a mean over the run can be computed from sums.
        """
        sums: Mapping[str, float] = {}
        if interval:
            values = {**values, **interval.scalars()}
            sums = interval._asdict()
            self._epoch = self._epoch.plus(interval)
            self._epoch_loss += values["train/loss"] * interval.steps
            self._show(f"step {step}: loss {values['train/loss']:.4f}, {interval}")
        if not self._folder:
            return
        place = {"step": step, "time_s": round(time.monotonic() - self._t0, 3), "part": self._part}
        with self._forgiving(), (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**place, **sums, **values}) + "\n")
        if self._writer:
            with self._forgiving():
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, step)

    def end_epoch(self, epoch: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the validation, and show them with the means of the epoch. epoch: such as 3/20."""
        self.write(step, metrics)
        shown = dict(metrics)
        if self._epoch.steps:  # none have been made if the run was resumed at the end of an epoch
            shown = {"train/loss": self._epoch_loss / self._epoch.steps, **metrics}
        text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        is_input_bound = self._epoch.wait_s > INPUT_BOUND * self._epoch.seconds
        advice = " (input-bound: run `python diagnose.py`)" if is_input_bound else ""
        self._show(f"epoch {epoch} {text}, {self._epoch}{advice}", important=True)
        self._epoch = Throughput()
        self._epoch_loss = 0.0

    def estimate_left_s(self) -> float:
        """Seconds that the rest of the run takes if it goes on as it did since it began or was resumed. 0: nothing is
        left, or no row has been trained on yet."""
        n_rows = self._row - self._first_row
        n_rows_left = max(round(self._planned_rows - self._row), 0)  # parts of echoed rows add up with rounding
        return (time.monotonic() - self._begun) * n_rows_left / n_rows if n_rows > 0 else 0.0

    def _show(self, text: str, *, important: bool = False) -> None:
        """Show the text beside the bar, or above it if it is important. If there is no terminal, print a line instead:
        every few seconds, and always if it is important."""
        if not self._bar.disable:
            if important:
                self._bar.write(text)
            else:
                self._bar.set_postfix_str(text)
        elif self._folder and (important or time.monotonic() - self._printed >= LINE_EVERY_S):
            left_s = self.estimate_left_s()
            left = f", {tqdm.format_interval(left_s)} left" if left_s else ""
            print(text + left, flush=True)
            self._printed = time.monotonic()

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Whatever a disk or a writer raises costs a point, not the run."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                warn(f"cannot log to {self._folder} ({type(error).__name__}: {error}); training goes on")
            self._has_warned = True


def _start_wandb(run: Started) -> Any:
    """Let wandb take over what SummaryWriter writes from here on. A resumed run is another one of the same group."""
    project = run.config["log.wandb"]
    try:
        import wandb

        config, group = dict(run.config), run.folder.name
        return wandb.init(project=project, group=group, dir=run.folder, config=config, sync_tensorboard=True)
    except Exception as error:
        raise UserError(f'log.wandb is {project}, but {error}; use log.wandb="" to train without it') from None


def _last_point(folder: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty if there is none."""
    with suppress(OSError):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            with suppress(ValueError, TypeError, RecursionError):
                return dict(json.loads(line))
    return {}
