"""Where the scalars of a run go: event files of TensorBoard, metrics.jsonl and a progress bar. On rank 0 only.

A log that cannot be written never stops a run: the first error is reported, later ones are ignored.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, Self

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from fastgpu.process.launch import UserError, warn
from fastgpu.process.world import World
from fastgpu.telemetry.clock import Throughput

WAIT_PCT = 10.0
"""A run that waits for data for a larger part of its time is input-bound."""
WAIT_POINTS = 4
"""A run is called input-bound, once, if it is so in the mean of this many points after the first."""
LINE_EVERY_S = 5.0
"""Seconds between two progress lines if the output is not a terminal."""
BAR_EVERY_S = 1.0
"""Seconds between two updates of the progress bar."""
CHARTS = {
    "data wait and GPU activity, %": ["Multiline", [r"data/wait_pct", r"gpu\d+/util_pct", r"gpu\d+/sm_active_pct"]],
    "rows per second": ["Multiline", [r"data/fresh_rows_per_s", r"train/trained_rows_per_s"]],
    "loss": ["Multiline", [r"train/loss", r"val/loss"]],
    "CPU, % of all CPUs": ["Multiline", [r"host/cpu_\w+_pct"]],
}
"""The page CUSTOM SCALARS: {title: regular expressions of the tags in a chart}."""
PLAIN = (bool, int, float, str)
"""The types that TensorBoard accepts as hyperparameters."""


class Started(Protocol):
    """What is asked of a `Run`."""

    folder: Path
    config: Mapping[str, Any]
    """{dotted key: value}"""
    first_row: int
    """Fresh rows of all ranks before this process began."""
    first_step: int


class TensorBoard:
    """Takes the scalars and the progress of a run. Without a folder (on every rank but rank 0) it does nothing."""

    def __init__(self, run: Started, planned_rows: int, world: World):
        """planned_rows: fresh rows of the whole run. Raises UserError on every rank if wandb refuses."""
        folder = run.folder if world.is_main else None
        config = run.config
        self._folder = folder
        self._config = config
        self._metrics: dict[str, float] = {}  # of the last validation
        self._epoch = Throughput()
        self._epoch_loss = 0.0  # the sum over its steps
        self._waits_pct: list[float] = []
        self._has_warned = False
        last = _last_point(folder) if folder else {}
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
            disable=folder is None or not sys.stderr.isatty(),
        )
        with world.together():
            self._wandb = _start_wandb(folder, config) if folder and config["log.wandb"] else None
        self._writer: SummaryWriter | None = None
        if folder:
            with self._forgiving():
                purge_step = run.first_step + 1 if run.first_step else None  # a resumed run trains these steps again
                self._writer = SummaryWriter(str(folder), purge_step=purge_step)
                lines = [f"    {key}: {json.dumps(value)}" for key, value in config.items()]
                self._writer.add_text("config", "\n".join(lines))  # indented by four: code in Markdown
                self._writer.add_custom_scalars({"training": CHARTS})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Close the bar and the files. The page HPARAMS shows the config and the metrics of a run that did not fail."""
        self._bar.close()
        with self._forgiving():
            if self._writer and kind is None:
                plain = {
                    key: value if isinstance(value, PLAIN) else json.dumps(value) for key, value in self._config.items()
                }
                # SummaryWriter.add_hparams would make a second run for them, in a folder of its own
                for summary in hparams(plain, self._metrics):
                    self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
            if self._writer:
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
        if interval:
            values = {**values, **interval.scalars()}
            self._epoch = self._epoch.plus(interval)
            self._epoch_loss += values["train/loss"] * interval.steps
            self._warn_if_input_bound(values["data/wait_pct"])
        self._metrics |= {name: value for name, value in values.items() if name.startswith("val/")}
        if not self._folder:
            return
        sums = interval._asdict() if interval else {}
        place = {"step": step, "time_s": round(time.monotonic() - self._t0, 3), "part": self._part}
        with self._forgiving(), (self._folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps({**place, **sums, **values}) + "\n")
        if self._writer:
            with self._forgiving():
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, step)
        if interval:
            self._show(f"step {step}: loss {values['train/loss']:.4f}, {interval}")

    def end_epoch(self, epoch: str, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of the validation, and show them with the means of the epoch. epoch: such as 3/20."""
        self.write(step, metrics)
        shown = dict(metrics)
        if self._epoch.steps:  # none have been made if the run was resumed at the end of an epoch
            shown = {"train/loss": self._epoch_loss / self._epoch.steps, **metrics}
        text = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self._show(f"epoch {epoch} {text}, {self._epoch}", important=True)
        self._epoch = Throughput()
        self._epoch_loss = 0.0

    def estimate_left_s(self) -> float:
        """Seconds that the rest of the run takes if it goes on as it did since it began or was resumed: the time of
        validation and checkpoints counts, once there were any. 0: nothing is left, or no row has been trained on yet.
        """
        n_rows = self._row - self._first_row
        n_rows_left = max(round(self._planned_rows - self._row), 0)  # parts of echoed rows add up with rounding
        seconds = time.monotonic() - self._begun
        return seconds * n_rows_left / n_rows if n_rows > 0 else 0.0

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

    def _warn_if_input_bound(self, wait_pct: float) -> None:
        self._waits_pct.append(wait_pct)
        if len(self._waits_pct) != WAIT_POINTS + 1:
            return
        mean_pct = fmean(self._waits_pct[1:])  # the first point holds what happens only at the start
        if mean_pct > WAIT_PCT:
            with self._bar.external_write_mode():
                warn(f"input-bound: {mean_pct:.0f} % of the time was spent waiting for data; run `python diagnose.py`")

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        """Whatever a disk or a writer raises costs a point, not the run."""
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                warn(f"cannot log to {self._folder} ({type(error).__name__}: {error}); training goes on")
            self._has_warned = True


def _start_wandb(folder: Path, config: Mapping[str, Any]) -> Any:
    """Let wandb take over what SummaryWriter writes from here on. A resumed run is another one of the same group."""
    project = config["log.wandb"]
    try:
        import wandb

        return wandb.init(project=project, group=folder.name, dir=folder, config=dict(config), sync_tensorboard=True)
    except Exception as error:
        raise UserError(f'log.wandb is {project}, but {error}; use log.wandb="" to train without it') from None


def _last_point(folder: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty if there is none."""
    with suppress(OSError, ValueError):
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        for line in reversed(lines):
            with suppress(ValueError, TypeError, RecursionError):
                return dict(json.loads(line))
    return {}
