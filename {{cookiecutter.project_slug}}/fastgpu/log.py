"""What a run leaves behind: TensorBoard, the same scalars as JSON lines, and a progress bar. On rank 0 only.

Writing a log must never stop a run: a full disk, say, is told once and then borne.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams
from tqdm import tqdm

PLAIN_EVERY_S = 5.0  # between two lines where the output is no terminal


class Log:
    """The sinks of a run's scalars; without a folder (every rank but the first) nothing happens."""

    def __init__(self, folder: Path | None, planned_rows: int, consumed_rows: int = 0):
        self._folder, self._warned, self._t0 = folder, False, time.monotonic()
        self._printed_s = self._t0
        self._writer: SummaryWriter | None = None
        with self._surviving():
            self._writer = SummaryWriter(str(folder)) if folder else None
        plain = folder is None or not sys.stderr.isatty()
        self._bar = tqdm(
            total=planned_rows, initial=consumed_rows, unit=" rows", unit_scale=True, dynamic_ncols=True, disable=plain
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One point of each tag (`group/name_unit`) at this optimizer step."""
        if not self._folder:
            return
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

    def finish(self, config: Mapping[str, Any], metrics: Mapping[str, float]) -> None:
        """Hyperparameters beside the final metrics (tags already logged) on TensorBoard's HPARAMS page; then close."""
        self._bar.close()
        if self._writer:
            plain = {k: v if isinstance(v, bool | int | float | str) else json.dumps(v) for k, v in config.items()}
            with self._surviving():
                for summary in hparams(plain, dict(metrics)):
                    self._writer._get_file_writer().add_summary(summary)
                self._writer.close()

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


def gpu_state(device: torch.device) -> dict[str, float]:
    """What the driver says of this rank's GPU now; a missing counter is left out, never a zero."""
    if device.type != "cuda":
        return {}
    state = {"gpu/mem_peak_gib": torch.cuda.max_memory_allocated(device) / (1 << 30)}
    with suppress(ModuleNotFoundError, RuntimeError):  # no NVML
        state["gpu/util_pct"] = torch.cuda.utilization(device)
    return state
