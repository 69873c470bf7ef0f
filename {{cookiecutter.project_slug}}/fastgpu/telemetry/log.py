"""Where the scalars of a run go: metrics.jsonl, TensorBoard and a progress bar. On rank 0 only.

A log that cannot be written never stops a run: the first I/O error is reported, later ones are ignored.
"""

import atexit
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from fastgpu.process.files import open_own
from fastgpu.process.launch import UserError, warn
from fastgpu.telemetry.clock import Throughput

WAIT_PCT = 10.0
"""A run that waits for data for a larger part of its time is input-bound."""
WAIT_POINTS = 4
"""A run is called input-bound, once, if it is so in the mean of this many points after the first."""
LINE_EVERY_S = 5.0
"""Seconds between two progress lines if the output is not a terminal."""
BAR_EVERY_S = 1.0
"""Seconds between two updates of the progress bar."""
CPU_HINT_AFTER_S = 10.0
"""Seconds of training on a CPU after which the estimate of the rest is good enough, ..."""
CPU_HINT_ABOVE_S = 600.0
"""... and the rest that is long enough for a hint."""


class Log:
    """Takes the scalars and the progress of a run. Without a folder (on every rank but rank 0) it does nothing."""

    def __init__(
        self,
        folder: Path | None,
        *,
        planned_rows: int,
        consumed_rows: int = 0,
        step: int = 0,
        config: Mapping[str, Any] | None = None,
    ):
        """planned_rows: fresh rows of the whole run. consumed_rows: those read before this process began,
        step: the optimizer steps made by then. config: {dotted key: value}, shown by TensorBoard.
        """
        self._folder = folder
        self._printed = time.monotonic()
        last = _last_point(folder) if folder else {}
        self._t0 = time.monotonic() - last.get("time_s", 0.0)  # the time of a resumed run goes on from where it stopped
        self._part = 1 + last.get("part", 1) if last else 1
        self._has_warned = False
        self._has_hinted = False
        self._waits_pct: list[float] = []
        self._board: TensorBoard | None = None
        if folder:
            self._board = TensorBoard(folder, config or {}, step)
            atexit.register(self._end)  # however the run ends, except by a signal that kills
        self._rows = float(consumed_rows)
        self._first_rows = consumed_rows
        self._planned_rows = planned_rows
        self._begun = time.monotonic()
        has_bar = folder is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=planned_rows,
            initial=consumed_rows,
            unit=" rows",
            unit_scale=True,
            dynamic_ncols=True,
            mininterval=BAR_EVERY_S,
            miniters=0,
            smoothing=0,
            disable=not has_bar,
        )

    def scalars(self, step: int, values: Mapping[str, float], interval: Throughput | None = None) -> None:
        """Log one point: {tag: value} at this optimizer step.

        interval: the steps that the values are about. Its sums go to metrics.jsonl, so that a mean over the run can be
        computed from sums.
        """
        if not self._folder:
            return
        if "data/wait_pct" in values:
            self._warn_if_input_bound(values["data/wait_pct"])
        sums = interval._asdict() if interval else {}
        place = {"step": step, "time_s": round(time.monotonic() - self._t0, 3), "part": self._part}
        try:
            with open_own(self._folder / "metrics.jsonl", "a") as file:
                file.write(json.dumps({**place, **sums, **values}) + "\n")
        except OSError as error:
            if not self._has_warned:
                warn(f"cannot write logs to {self._folder} ({error}); training goes on")
            self._has_warned = True
        if self._board:
            self._board.scalars(step, values)

    def count(self, fresh_rows: float) -> None:
        """Advance the bar by these rows, which the host has queued for the device. It is drawn once a second."""
        self._rows += fresh_rows
        self._bar.update(round(self._rows) - self._bar.n)

    def progress(self, fresh_rows: float, text: str, important: bool = False) -> None:
        """Advance the bar to this many rows. If there is no terminal, print a line instead: every few seconds, and
        always if it is important."""
        if not self._bar.disable:
            self._rows = fresh_rows
            self.count(0)
            if important:
                self._bar.write(text)
            else:
                self._bar.set_postfix_str(text)
        elif self._folder and (important or time.monotonic() - self._printed >= LINE_EVERY_S):
            left_s = self.estimate_left_s()
            left = f", {tqdm.format_interval(left_s)} left" if left_s else ""
            print(text + left, flush=True)
            self._printed = time.monotonic()

    def estimate_left_s(self) -> float:
        """Seconds that the rest of the run takes if it goes on as it did since it began or was resumed: the time of
        validation and checkpoints counts, once there were any. 0: nothing is left, or no row has been trained on yet.
        """
        n_rows = self._rows - self._first_rows
        n_rows_left = max(round(self._planned_rows - self._rows), 0)  # parts of echoed rows add up with rounding
        seconds = time.monotonic() - self._begun
        return seconds * n_rows_left / n_rows if n_rows > 0 else 0.0

    def hint_at_slow_cpu(self) -> None:
        """Say once that the run takes long and what shortens it, if it takes more than ten minutes on a CPU."""
        left_s = self.estimate_left_s()
        if self._has_hinted or time.monotonic() - self._begun < CPU_HINT_AFTER_S:
            return
        self._has_hinted = True
        if self._folder and left_s > CPU_HINT_ABOVE_S:
            with self._bar.external_write_mode():
                print(
                    f"about {left_s / 60:.0f} min are left on this CPU; fewer pixels, a smaller model or a smaller "
                    "train.epochs take less",
                    flush=True,
                )

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Close the bar, and TensorBoard with the final metrics."""
        self._bar.close()
        self._end(metrics)

    def _end(self, metrics: Mapping[str, float] | None = None) -> None:
        """metrics: None if the run broke off."""
        atexit.unregister(self._end)
        if self._board:
            self._board.close(metrics)

    def _warn_if_input_bound(self, wait_pct: float) -> None:
        self._waits_pct.append(wait_pct)
        if len(self._waits_pct) != WAIT_POINTS + 1:
            return
        mean_pct = fmean(self._waits_pct[1:])  # the first point holds what happens only at the start
        if mean_pct > WAIT_PCT:
            with self._bar.external_write_mode():
                warn(f"input-bound: {mean_pct:.0f} % of the time was spent waiting for data; run `python diagnose.py`")


def _last_point(folder: Path) -> dict[str, Any]:
    """The last whole line of metrics.jsonl; empty if there is none."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):
            return dict(json.loads(line))
    return {}


CHARTS = {
    "data wait and GPU activity, %": ["Multiline", [r"data/wait_pct", r"gpu\d+/util_pct", r"gpu\d+/sm_active_pct"]],
    "rows per second": ["Multiline", [r"data/fresh_rows_per_s", r"train/trained_rows_per_s"]],
    "loss": ["Multiline", [r"train/loss", r"val/loss"]],
    "CPU, % of all CPUs": ["Multiline", [r"host/cpu_\w+_pct"]],
}
"""The page CUSTOM SCALARS: {title: regular expressions of the tags in a chart}."""
PLAIN = (bool, int, float, str)
"""The types that TensorBoard accepts as hyperparameters."""


class TensorBoard:
    """Event files in the folder of the run. Whatever a disk or the writer raises costs a point, not the run."""

    def __init__(self, folder: Path, config: Mapping[str, Any], step: int):
        """config: {dotted key: value}. step: where the run starts; above 0 if resumed.

        Raises UserError if wandb refuses.
        """
        self._config = config
        self._has_failed = False
        self._wandb: Any = None
        if project := config.get("log.wandb"):
            try:
                import wandb

                # It takes over what SummaryWriter writes from here on. A resumed run is another one of the same group.
                self._wandb = wandb.init(
                    project=project, group=folder.name, dir=folder, config=dict(config), sync_tensorboard=True
                )
            except Exception as error:
                raise UserError(f'log.wandb is {project}, but {error}; use log.wandb="" to train without it') from None
        with self._forgiving():
            purge_step = step + 1 if step else None  # a resumed run trains these steps again
            self._writer = SummaryWriter(str(folder), purge_step=purge_step)
            lines = [f"    {key}: {json.dumps(value)}" for key, value in config.items()]
            self._writer.add_text("config", "\n".join(lines))  # indented by four: code in Markdown
            self._writer.add_custom_scalars({"training": CHARTS})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take one point: {tag: value}."""
        with self._forgiving():
            for tag, value in values.items():
                self._writer.add_scalar(tag, value, step)

    def close(self, metrics: Mapping[str, float] | None) -> None:
        """Write the config with the final metrics for the page HPARAMS. metrics: None if the run broke off."""
        with self._forgiving():
            if metrics is not None:
                plain = {
                    key: value if isinstance(value, PLAIN) else json.dumps(value) for key, value in self._config.items()
                }
                # SummaryWriter.add_hparams would make a second run for them, in a folder of its own
                for summary in hparams(plain, dict(metrics)):
                    self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
            self._writer.close()
        if self._wandb:
            self._wandb.finish(exit_code=int(metrics is None))

    @contextmanager
    def _forgiving(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._has_failed:
                warn(f"cannot log to TensorBoard ({type(error).__name__}: {error}); training goes on")
            self._has_failed = True
