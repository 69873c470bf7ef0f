"""Workloads: the model, loss and metrics of each task. `workload:` in config.yaml selects a module of this folder.

To write one, copy minimal.py to workloads/<name>.py, change its class `Workload`, set `workload: <name>`, and replace
the sections `data` and `model` of config.yaml. The training loop needs no more than the protocol below.
"""

from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, Protocol

from torch import Generator, Tensor, nn

from fastgpu.process.config import Config, Section
from fastgpu.process.config_loader import read_options
from fastgpu.process.launch import UserError
from fastgpu.rows import Dataset, Rows


class Workload(Protocol):
    """A model, its augmentation, its loss and its metrics. Every rank has one instance."""

    Options: type[Section]
    """Your settings: typed fields with defaults, read from the section `model` of config.yaml and checked like it."""

    options: Section
    """Their values. Declare `options: Options`, so that mypy knows your fields, and set it in `__init__`."""

    best: tuple[str, Literal["higher", "lower"]]
    """The metric that selects the best checkpoint, and whether higher or lower values are better."""

    inputs: tuple[str, ...] = ()
    """The fields that `predict` needs. predict.py reads these; to evaluate, it reads all fields of training."""

    @abstractmethod
    def __init__(self, options: Section, train: Dataset, val: Dataset):
        """Set `options`, and raise UserError if the rows are not of the expected kind.

        predict.py passes sources without rows and without `column`. They have the fields and attributes of the training
        rows, and what `card` returned as attributes.
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """A new network, initialised, on the CPU. It takes rows of the file, unchanged, and so does a checkpoint."""

    @abstractmethod
    def transform(self, batch: Rows, rng: Generator) -> Rows:
        """Augment a training batch on the device, in each pass. Draw from `rng`, so that a resumed run repeats it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """The mean loss of a batch, as a scalar on the device. Do not call .item(), which makes the host wait."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """Sums over the rows of a validation batch, of any shape: losses, hits, a confusion matrix, a histogram."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float]:
        """The metrics, from the sums of `score` over all validation rows of all ranks; `sums["n"]` is their number."""

    def predict(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """{column: (B,) or (B, k)} for a batch of `inputs`, as predict.py writes it. Training does not need this.

        Of `probability`, (B, classes), predict.py writes the best classes, and of `scores`, (B, items), the best items.
        Their names are those of the attributes `class_names` and `item_ids`. Items with the score -inf are left out.
        """
        raise UserError("the workload has no method predict; workloads/__init__.py describes it")

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """Model metadata derived from the training data, such as the number of classes, as JSON. model.json keeps it.

        With the options, and the fields and attributes of the training rows, it is enough to build the model again.
        """


def make(config: Config, train: Dataset, val: Dataset) -> Workload:
    """Build the workload that the config names. Raises UserError if its options, or the rows, do not fit."""
    kind = load(config.workload)
    return kind(read_options(config, kind.Options), train, val)


def load(name: str) -> type[Workload]:
    """The class `Workload` of workloads/<name>.py. Raises UserError if there is no such file."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in names:
        raise UserError(f"workload is {name}, but workloads/{name}.py does not exist; there are: {', '.join(names)}")
    kind: type[Workload] = import_module(f"workloads.{name}").Workload
    return kind
