"""The scalars of a run as TensorBoard's event files, and, if log.wandb names a project, at Weights & Biases."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fastgpu.process.launch import UserError, warn

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
