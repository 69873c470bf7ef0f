"""Where `log.to` sends the scalars of a run, besides metrics.jsonl: TensorBoard, Weights & Biases, MLflow.

wandb and mlflow are imported only if they are asked for. Where they log to and as whom is decided by their own
environment variables, such as WANDB_MODE=offline or MLFLOW_TRACKING_URI. Each keeps the id of its run in the folder of
the run, so that a resumed run continues there.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from fastgpu.process.atomic import write_own
from fastgpu.process.config import SinkName
from fastgpu.process.launch import warn
from fastgpu.telemetry import tags

MAX_FAILURES = 3
"""A sink that failed so many times is not called any more, so that a dead server cannot hold up the end of a run."""
PLAIN = (bool, int, float, str)
"""The types that TensorBoard accepts as hyperparameters."""


class TensorBoard:
    """Event files in the folder of the run, with the charts of tags.py on the page CUSTOM SCALARS."""

    def __init__(self, folder: Path, config: Mapping[str, Any], step: int):
        purge_step = step + 1 if step else None  # a resumed run trains these steps again
        self._writer = SummaryWriter(str(folder), purge_step=purge_step)
        self._config = config
        self._names: dict[str, None] = {}
        lines = [f"    {key}: {json.dumps(value)}" for key, value in config.items()]
        self._writer.add_text("config", "\n".join(lines))  # indented by four: code in Markdown

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take one point: {tag: value}. Charts are described again when there is more to show in them."""
        drawn = tags.charts(self._names)
        self._names |= dict.fromkeys(values)
        charts = tags.charts(self._names)
        if charts != drawn:
            layout = {
                title: ["Multiline", [f"^{re.escape(name)}$" for name in names]] for title, names in charts.items()
            }
            self._writer.add_custom_scalars({"training": layout})
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def close(self, metrics: Mapping[str, float] | None, verdict: str) -> None:
        """Write the verdict, and the config with the final metrics for the page HPARAMS."""
        self._writer.add_text("verdict", verdict)
        if metrics is not None:
            plain = {
                key: value if isinstance(value, PLAIN) else json.dumps(value) for key, value in self._config.items()
            }
            # SummaryWriter.add_hparams would make a second run for them, in a folder of its own
            for summary in hparams(plain, dict(metrics)):
                self._writer.file_writer.add_summary(summary)  # type: ignore[attr-defined]
        self._writer.close()


class Wandb:
    """Weights & Biases (https://docs.wandb.ai/ref/python/init). Its local files lie in the folder of the run."""

    def __init__(self, folder: Path, config: Mapping[str, Any], step: int):
        import wandb

        id_file = folder / "wandb-id.txt"
        known_id = id_file.read_text() if id_file.exists() else None
        self._run = wandb.init(id=known_id, resume="allow", name=folder.name, dir=folder, config=dict(config))
        write_own(id_file, self._run.id)
        # With wandb's own counter, points that a resumed run trains again would be refused.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take one point; wandb sends it from a process of its own."""
        self._run.log({"step": step, **values})

    def close(self, metrics: Mapping[str, float] | None, verdict: str) -> None:
        """Put the verdict into the summary, and wait until everything is sent."""
        self._run.summary["verdict"] = verdict
        self._run.finish(exit_code=int(metrics is None))


class Mlflow:
    """An MLflow run (https://mlflow.org/docs/latest/ml/tracking/), by default in mlflow.db of the working directory."""

    def __init__(self, folder: Path, config: Mapping[str, Any], step: int):
        import mlflow

        id_file = folder / "mlflow-id.txt"
        known_id = id_file.read_text() if id_file.exists() else None
        run = mlflow.start_run(run_id=known_id, run_name=None if known_id else folder.name)
        self._id = run.info.run_id
        write_own(id_file, self._id)
        self._mlflow = mlflow
        if not known_id:  # parameters of an MLflow run cannot be changed
            mlflow.log_params({key: str(value) for key, value in config.items()}, run_id=self._id)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take one point and wait until the server or the database has it."""
        self._mlflow.log_metrics(dict(values), step=step, run_id=self._id)

    def close(self, metrics: Mapping[str, float] | None, verdict: str) -> None:
        """Put the verdict into a tag, and say how the run ended."""
        self._mlflow.set_tag("verdict", verdict)
        self._mlflow.end_run("FAILED" if metrics is None else "FINISHED")


Sink = TensorBoard | Wandb | Mlflow
KINDS: dict[SinkName, type[Sink]] = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": Mlflow}


class Sinks:
    """Calls sinks in a thread of their own, in order, so that a slow disk or server does not hold up the loop.

    Any method of a sink may raise any exception: it costs a point, not the run.
    """

    def __init__(self, names: Sequence[SinkName], folder: Path, config: Mapping[str, Any], step: int):
        """folder: that of the run. config: {dotted key: value}. step: where the run starts; above 0 if resumed."""
        self._open: dict[SinkName, Sink] = {}
        self._n_failures: Counter[SinkName] = Counter()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sinks")
        for name in names:
            with self._forgiving(name):
                self._open[name] = KINDS[name](folder, config, step)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Give one point to every sink, later."""
        self._thread.submit(self._each, lambda sink: sink.scalars(step, values))

    def close(self, metrics: Mapping[str, float] | None, verdict: str) -> None:
        """Wait until the sinks have taken all points, and close them. metrics: None if the run broke off."""
        self._thread.shutdown()
        self._each(lambda sink: sink.close(metrics, verdict))

    def _each(self, call: Callable[[Sink], None]) -> None:
        for name, sink in self._open.items():
            if self._n_failures[name] < MAX_FAILURES:
                with self._forgiving(name):
                    call(sink)

    @contextmanager
    def _forgiving(self, name: SinkName) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a disk, a server or its client raises must not stop the run
            if not self._n_failures[name]:
                warn(f"cannot log to {name} ({type(error).__name__}: {error}); training goes on")
            self._n_failures[name] += 1
