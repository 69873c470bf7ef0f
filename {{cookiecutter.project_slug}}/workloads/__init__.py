"""The model, loss and metrics of each task: a module of this folder, selected by `workload:`.

To write one, copy minimal.py to workloads/<name>.py and change its class `Workload`. In
config.yaml, set `workload: <name>`, and replace the sections `data` and `model`. The training loop
needs no more than the protocol below.
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

Best = tuple[str, Literal["higher", "lower"]]
"""A metric, and which of its values are better."""


class Workload(Protocol):
    """A model, its augmentation, its loss and its metrics. Every rank has one instance."""

    Options: type[Section]
    """Your settings, typed fields with defaults: the section `model` of config.yaml."""

    options: Section
    """Their values. Declare `options: Options`, so that mypy knows them; set it in `__init__`."""

    best: Best
    """The metric that selects the best checkpoint, and which of its values are better.

    Of validations with equal values, the later one is better, unless its metric `loss` is higher. With
    several validation sets it is that of the first one; `night/top1_pct` is that of the set night.
    """

    inputs: tuple[str, ...] = ()
    """The fields that `predict` needs, which predict.py reads; with --evaluate it reads all fields."""

    @abstractmethod
    def __init__(self, options: Section, train: Dataset, val: Dataset):
        """Set `options`, and raise UserError if the rows are not of the expected kind.

        With several validation sets, a workload is made with each, and that of the first set trains.

        predict.py passes sources without rows: ask for a `column` only if `len(train)`. They have
        the fields and attributes of the training rows; what `card` returned is among the latter.
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """Build a new network on the CPU. Its input is rows of the file, unchanged."""

    @abstractmethod
    def transform(self, batch: Rows, rng: Generator) -> Rows:
        """Augment a training batch on the device. Draw from `rng`: a resumed run repeats it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """The mean loss of a batch, a scalar on the device. An .item() would make the host wait."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """Sums over the rows of a validation batch, of any shape: losses, a confusion matrix."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float]:
        """The metrics, from the sums of `score` over all ranks. `sums["n"]` counts the rows."""

    def predict(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """{column: (B,) or (B, k)} for a batch of `inputs`, for predict.py. Training needs none.

        Two columns are written by rank: `probability`, (B, classes), as the best classes, with the
        names in the attribute `class_names`; and `scores`, (B, items), as the best items, with
        those in `item_ids`. An item with the score -inf is left out.
        """
        raise UserError("the workload has no method predict; workloads/__init__.py describes it")

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What the model takes from the training data, such as the number of classes, as JSON.

        model.json keeps it. Together with the options, and with the fields and attributes of the
        training rows, it has to be enough to build the model again.
        """


def make(config: Config, train: Dataset, val: Mapping[str, Dataset]) -> Workload:
    """Build the workload that the config names. Raises UserError if options or rows do not fit.

    val: the rows of each validation set. One workload is made with each, which checks them; the first one is returned.
    """
    kind = load(config.workload)
    options = read_options(config, kind.Options)
    first, *_ = [kind(options, train, rows) for rows in val.values()]
    return first


def load(name: str) -> type[Workload]:
    """The class `Workload` of workloads/<name>.py. Raises UserError if there is no such file."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in names:
        there_are = f"there are: {', '.join(names)}"
        raise UserError(f"workload is {name}, but workloads/{name}.py does not exist; {there_are}")
    kind: type[Workload] = import_module(f"workloads.{name}").Workload
    return kind
