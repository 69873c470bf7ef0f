"""What is trained: one module for each workload, selected by `workload:` in config.yaml. Your own code lives here.

To write a workload, copy minimal.py to workloads/<name>.py, change its class `Workload`, set `workload: <name>`, and
replace the sections `data` and `model` of config.yaml. The protocol below is all the training loop asks for.
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
    """A model, what happens to a batch on the device, the loss and the metrics. Every rank has one instance."""

    Options: type[Section]
    """Your settings: typed fields with defaults, read from the section `model` of config.yaml and checked like it."""

    options: Any
    """Their values, which `make` sets; set them in `__init__` if you need them there."""

    best: tuple[str, Literal["higher", "lower"]]
    """The metric that decides which checkpoint is the best one, and which of its values are better."""

    inputs: tuple[str, ...] = ()
    """The fields that `predict` takes from a batch. predict.py reads these, and all fields of training to evaluate."""

    @abstractmethod
    def __init__(self, options: Any, train: Dataset, val: Dataset):
        """Raise UserError if the rows are not of the expected kind. predict.py passes sources that have the fields and
        attributes of the training rows (and what `card` returned, as attributes), but no rows, and no `column`."""

    @abstractmethod
    def model(self) -> nn.Module:
        """The network, newly initialised, on the CPU. It, and a checkpoint, takes rows as they lie in the file."""

    @abstractmethod
    def transform(self, batch: Rows, rng: Generator) -> Rows:
        """Augment a training batch on the device, anew in each pass. Draw from `rng`, so that a resume repeats it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """The mean loss of a batch, as a scalar on the device. Do not call .item(): the host would wait."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """Sums over the rows of a validation batch, of any shape: losses, hits, a confusion matrix, a histogram."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float]:
        """The metrics, from the sums of `score` over all validation rows of all ranks; `sums["n"]` is their number."""

    def predict(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """{column: (B,) or (B, k)} for a batch of `inputs`, as predict.py writes it. Training does not need this.

        Of `probability`, (B, classes), it writes the best classes, of `scores`, (B, items), the best items, with their
        names in the attributes `class_names` and `item_ids`. An item of score -inf is none.
        """
        raise UserError("the workload has no method predict; workloads/__init__.py describes it")

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What the training data decided about the model, as JSON values, such as shapes. With the options and the
        attributes of the training rows it is enough to build the model again. It is stored in model.json."""


def make(config: Config, train: Dataset, val: Dataset) -> Workload:
    """The workload that the config names, with its options. Raises UserError if they, or the rows, do not fit."""
    kind = load(config.workload)
    options = read_options(config, kind.Options)
    workload = kind(options, train, val)
    workload.options = options
    return workload


def load(name: str) -> type[Workload]:
    """The class `Workload` of workloads/<name>.py. Raises UserError if there is no such file."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in names:
        raise UserError(f"workload is {name}, but workloads/{name}.py does not exist; there are: {', '.join(names)}")
    kind: type[Workload] = import_module(f"workloads.{name}").Workload
    return kind
