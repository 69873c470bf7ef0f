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
    """Values of the settings. Declare `options: Options` for mypy, and set it in `__init__`."""

    best: Best
    """The metric that selects the best checkpoint, and whether higher or lower values are better.

    If two validations have equal values, the later one is better, unless its metric `loss` is
    higher. With several sets, the first set decides; `night/top1_pct` names the set night instead.
    """

    inputs: tuple[str, ...] = ()
    """The fields that `predict` needs. predict.py reads only these; with --evaluate, all fields."""

    @abstractmethod
    def __init__(self, options: Section, train: Dataset, val: Dataset):
        """Set `options`, and raise UserError if the rows are not of the expected kind.

        With several validation sets, a workload is made with each set; the first workload trains.

        predict.py passes Datasets without rows: ask for a `column` only if `len(train)`. They have
        the fields and attributes of the training rows, and the values of `card` as attributes.
        """

    @abstractmethod
    def model(self) -> nn.Module:
        """Build a new network on the CPU. Its input is unchanged rows of the file."""

    @abstractmethod
    def transform(self, batch: Rows, rng: Generator) -> Rows:
        """Augment a training batch on the device. Draw from `rng`: a resumed run repeats it."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        """The mean loss, a scalar on the device. Do not call .item(): the host would wait."""

    @abstractmethod
    def score(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """Sums over the rows of a validation batch, of any shape: losses, a confusion matrix."""

    @abstractmethod
    def metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float]:
        """The metrics, from the sums of `score` over all ranks. `sums["n"]` counts the rows."""

    def predict(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """{column: (B,) or (B, k)} for a batch of `inputs`, for predict.py. Training needs none.

        Of two columns, predict.py writes the best: of `probability`, (B, classes), the best
        classes, named by the attribute `class_names`; of `scores`, (B, items), the best items,
        named by `item_ids`. An item with the score -inf is left out.
        """
        raise UserError("the workload has no method predict; workloads/__init__.py describes it")

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """JSON values that the model takes from the training data, such as the number of classes.

        They are saved in model.json. Together with the options, and with the fields and attributes
        of the training rows, they have to be enough to build the model again.
        """


def make(config: Config, train: Dataset, val: Mapping[str, Dataset]) -> Workload:
    """Build the workload that the config names. Raises UserError if options or rows do not fit.

    val: the rows of each validation set. A workload is made with each set, to check its rows; the first is returned.
    """
    kind = load(config.workload)
    options = read_options(config, kind.Options)
    first, *_ = [kind(options, train, rows) for rows in val.values()]
    return first


def load(name: str) -> type[Workload]:
    """The class `Workload` of workloads/<name>.py. Raises UserError if the file or a member is missing."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in names:
        there_are = f"there are: {', '.join(names)}"
        raise UserError(f"workload is {name}, but workloads/{name}.py does not exist; {there_are}")
    kind: type[Workload] = import_module(f"workloads.{name}").Workload
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise UserError(f"workloads/{name}.py: Workload has no {', '.join(missing)}; minimal.py shows all members")
    return kind
