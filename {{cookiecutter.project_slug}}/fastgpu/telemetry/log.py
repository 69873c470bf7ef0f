"""What a run leaves behind: TensorBoard, the same scalars as JSON lines, and a progress bar. On rank 0 only.

Writing a log must never stop a run: a full disk, say, is told once and then borne.
"""

import atexit
import json
import re
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

from fastgpu.telemetry import report

LAYOUT = {  # of the page CUSTOM SCALARS: what belongs together in one chart
    "is the device fed?": {
        "GPU-Util, SM activity, data wait": [
            "Multiline",
            [r"(machine\d+/)?gpu\d+/util_pct", r"(machine\d+/)?gpu\d+/sm_active_pct", "data/wait_pct"],
        ],
        "rows a second": ["Multiline", ["data/fresh_rows_per_s", "train/trained_rows_per_s"]],
    },
    "what holds it up?": {
        "CPU": ["Multiline", [r"(machine\d+/)?host/cpu_.*_pct"]],
        "disk and page cache": [
            "Multiline",
            [r"(machine\d+/)?host/disk_read_mb_per_s", r"(machine\d+/)?host/page_cache_refaults_per_s"],
        ],
        "GPU clocks and power": [
            "Multiline",
            [r"(machine\d+/)?gpu\d+/clock_limited_pct", r"(machine\d+/)?gpu\d+/power_w"],
        ],
    },
}
WAIT_POINTS = 4  # over so many points a run must be input-bound to say so, once
PLAIN_EVERY_S = 5.0  # between two lines where the output is no terminal


def format_metrics(values: Mapping[str, float]) -> str:
    """`val/loss 0.01234, val/top1_pct 99.72`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


class Log:
    """The sinks of a run's scalars; without a folder (every rank but the first) nothing happens."""

    def __init__(
        self,
        folder: Path | None,
        *,
        planned_rows: int,
        consumed_rows: int = 0,
        config: Mapping[str, Any] | None = None,
        ceiling_rows_per_s: float | None = None,
    ):
        """config: as resolved, for TensorBoard's TEXT page. world: what it runs on and bytes of a row, as
        diagnose.py has it."""
        self._folder, self._warned, self._t0 = folder, False, time.monotonic()
        self._printed_s, self._waits, self._charts = self._t0, list[float](), set[str]()
        self._ceiling = ceiling_rows_per_s
        self._config = dict(config or {})
        self._writer: SummaryWriter | None = None
        with self._surviving():
            if folder:
                self._writer = SummaryWriter(str(folder))
                lines = (f"    {key}: {json.dumps(value)}" for key, value in (config or {}).items())  # Markdown: code
                self._writer.add_text("config", "\n".join(lines))
        if folder:
            atexit.register(self._report)  # whatever ends the run, but a signal that kills
        plain = folder is None or not sys.stderr.isatty()
        self._bar = tqdm(
            total=planned_rows, initial=consumed_rows, unit=" rows", unit_scale=True, dynamic_ncols=True, disable=plain
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each tag (`group/name_unit`) at this optimizer step."""
        if not self._folder:
            return
        if self._ceiling and "train/trained_rows_per_s" in values:
            values = {**values, "data/feed_ratio": values["train/trained_rows_per_s"] / self._ceiling}
        if "data/wait_pct" in values:
            self._waits.append(values["data/wait_pct"])
            self._warn_of_waiting()
        self._lay_out(values)
        with self._surviving(), (self._folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "time_s": round(time.monotonic() - self._t0, 3), **values}) + "\n")
        if self._writer:
            with self._surviving():
                for tag, value in values.items():
                    self._writer.add_scalar(tag, value, step)

    def progress(self, fresh_rows: float, text: str, important: bool = False) -> None:
        """Move the bar; where there is no terminal print a line now and then, and what is important always."""
        if not self._bar.disable:
            self._bar.update(round(fresh_rows) - self._bar.n)
            if important:
                self._bar.write(text)
            else:
                self._bar.set_postfix_str(text)
        elif self._folder and (important or time.monotonic() - self._printed_s >= PLAIN_EVERY_S):
            print(text, flush=True)
            self._printed_s = time.monotonic()

    def _lay_out(self, values: Mapping[str, float]) -> None:
        """The charts that have something to show; again when there are more of them."""
        charts = {chart: lines for page in LAYOUT.values() for chart, lines in page.items()}
        new = {
            chart for chart, (_, tags) in charts.items() if any(re.fullmatch(t, tag) for t in tags for tag in values)
        }
        if self._writer and not new <= self._charts:
            self._charts |= new
            pages = {
                page: {chart: found[chart] for chart in found if chart in self._charts}
                for page, found in LAYOUT.items()
            }
            with self._surviving():
                self._writer.add_custom_scalars({page: found for page, found in pages.items() if found})

    def _warn_of_waiting(self) -> None:
        """Once a run, when it is sure. The first point holds what only happens at the start."""
        said = report.feed_verdict(fmean(self._waits[1:])) if len(self._waits) == WAIT_POINTS + 1 else ""
        if said.startswith("input-bound"):
            text = f"warning: {said}"
            self._bar.write(text) if not self._bar.disable else print(text, flush=True)

    def finish(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> str:
        """Hyperparameters beside the final metrics (tags already logged) on TensorBoard's HPARAMS page; then close.

        Returns a table of the run.
        """
        self._bar.close()
        if self._writer:
            plain = {k: v if isinstance(v, bool | int | float | str) else json.dumps(v) for k, v in config.items()}
            with self._surviving():
                found = (
                    report.verdicts(self._folder, report.read_metrics(self._folder), self._config)
                    if self._folder
                    else []
                )
                self._writer.add_text("verdict", "\n\n".join(found))
                for summary in hparams(plain, dict(metrics)):
                    self._writer._get_file_writer().add_summary(summary)
                self._writer.close()
        self._report()
        return report.table(report.read_metrics(self._folder)) if self._folder else ""

    def _report(self) -> None:
        atexit.unregister(self._report)
        if self._folder:
            report.write_report(self._folder, self._config)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """A full disk costs points on a chart, not the run; TensorBoard's writer does not recover from one."""
        try:
            yield
        except OSError as error:
            self._writer = None
            if not self._warned:
                print(f"warning: cannot write logs to {self._folder} ({error}); training goes on", flush=True)
            self._warned = True
