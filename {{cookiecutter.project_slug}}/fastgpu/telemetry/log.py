"""Where the scalars of a run go: TensorBoard, metrics.jsonl, a progress bar and report.html. On rank 0 only.

A log that cannot be written never stops a run: the first I/O error is reported, later ones are ignored.
"""

import atexit
import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

from fastgpu.process.launch import warn
from fastgpu.telemetry import report, tags
from fastgpu.telemetry.clock import Throughput

WAIT_POINTS = 4
"""A run is called input-bound, once, if it is so in the mean of this many points after the first."""
LINE_EVERY_S = 5.0
"""Seconds between two progress lines if the output is not a terminal."""


class Log:
    """Takes the scalars and the progress of a run. Without a folder (on every rank but rank 0) it does nothing."""

    def __init__(
        self,
        folder: Path | None,
        *,
        planned_rows: int,
        consumed_rows: int = 0,
        config: Mapping[str, Any] | None = None,
        ceiling_rows_per_s: float | None = None,
    ):
        """planned_rows: fresh rows of the whole run. consumed_rows: those read before this process began.

        config: {dotted key: value}, shown on TensorBoard's page TEXT. ceiling_rows_per_s: trained rows per second of
        the step alone (see `read_ceiling`), from which data/feed_ratio is computed.
        """
        self._folder = folder
        self._ceiling_rows_per_s = ceiling_rows_per_s
        self._printed = time.monotonic()
        points = report.read_metrics(folder) if folder else []
        logged_s = points[-1]["time_s"] if points else 0.0
        self._t0 = time.monotonic() - logged_s  # the time of a resumed run goes on from where it stopped
        self._has_warned = False
        self._waits_pct: list[float] = []
        self._drawn: set[str] = set()
        self._writer: SummaryWriter | None = None
        with self._ignoring_io_errors():
            if folder:
                atexit.register(self._write_report)  # however the run ends, except by a signal that kills
                self._writer = SummaryWriter(str(folder))
                lines = [f"    {key}: {json.dumps(value)}" for key, value in (config or {}).items()]
                self._writer.add_text("config", "\n".join(lines))  # indented by four: code in Markdown
        has_bar = folder is not None and sys.stderr.isatty()
        self._bar = tqdm(
            total=planned_rows,
            initial=consumed_rows,
            unit=" rows",
            unit_scale=True,
            dynamic_ncols=True,
            disable=not has_bar,
        )

    def scalars(self, step: int, values: Mapping[str, float], interval: Throughput | None = None) -> None:
        """Log one point: {tag: value} (see tags.py) at this optimizer step.

        interval: the steps that the values are about. Its sums go to metrics.jsonl, so that a mean over the run can be
        computed from sums.
        """
        if not self._folder:
            return
        values = dict(values)
        if self._ceiling_rows_per_s and "train/trained_rows_per_s" in values:
            values["data/feed_ratio"] = values["train/trained_rows_per_s"] / self._ceiling_rows_per_s
        if "data/wait_pct" in values:
            self._warn_if_input_bound(values["data/wait_pct"])
        sums = interval._asdict() if interval else {}
        point = {"step": step, "time_s": round(time.monotonic() - self._t0, 3)} | sums | values
        with self._ignoring_io_errors(), (self._folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(point) + "\n")
        with self._ignoring_io_errors():
            if self._writer:
                self._draw_charts(self._writer, values)
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, step)

    def progress(self, fresh_rows: float, text: str, important: bool = False) -> None:
        """Advance the bar to this many rows. If there is no terminal, print a line instead: every few seconds, and
        always if it is important."""
        if not self._bar.disable:
            self._bar.update(round(fresh_rows) - self._bar.n)
            if important:
                self._bar.write(text)
            else:
                self._bar.set_postfix_str(text)
        elif self._folder and (important or time.monotonic() - self._printed >= LINE_EVERY_S):
            print(text, flush=True)
            self._printed = time.monotonic()

    def finish(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
        """Write the verdict, the config and the final metrics (for TensorBoard's page HPARAMS) and the report.

        Returns the summary as a table for the terminal.
        """
        self._bar.close()
        if not self._folder:
            return ""
        points = report.read_metrics(self._folder)
        hyperparameters = {  # TensorBoard accepts no other types
            key: value if isinstance(value, bool | int | float | str) else json.dumps(value)
            for key, value in config.items()
        }
        with self._ignoring_io_errors():
            if self._writer:
                self._writer.add_text("verdict", "\n\n".join(report.verdicts(self._folder, points)))
                # SummaryWriter.add_hparams would make a second run for them, in a folder of its own
                for summary in hparams(hyperparameters, dict(metrics)):
                    self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
                self._writer.close()
        self._write_report()
        return report.table(points)

    def _draw_charts(self, writer: SummaryWriter, names: Mapping[str, float]) -> None:
        """Put charts that have something to show on TensorBoard's page CUSTOM SCALARS; again when there are more."""
        titles = {tag.chart for tag in map(tags.find_tag, names) if tag and tag.chart}
        if titles <= self._drawn:
            return
        self._drawn |= titles
        charts = {title: group for title, group in tags.charts().items() if title in self._drawn}
        layout = {title: ["Multiline", [tag.pattern for tag in group]] for title, group in charts.items()}
        writer.add_custom_scalars({"training": layout})

    def _warn_if_input_bound(self, wait_pct: float) -> None:
        self._waits_pct.append(wait_pct)
        if len(self._waits_pct) != WAIT_POINTS + 1:
            return
        mean_pct = fmean(self._waits_pct[1:])  # the first point holds what happens only at the start
        if mean_pct > report.WAIT_PCT:
            with self._bar.external_write_mode():
                warn(report.feed_verdict(mean_pct))

    def _write_report(self) -> None:
        atexit.unregister(self._write_report)
        if self._folder:
            report.write_report(self._folder)

    @contextmanager
    def _ignoring_io_errors(self) -> Iterator[None]:
        """A full disk costs points of a chart, not the run. TensorBoard's writer does not recover from one."""
        try:
            yield
        except OSError as error:
            self._writer = None
            if not self._has_warned:
                warn(f"cannot write logs to {self._folder} ({error}); training goes on")
            self._has_warned = True
