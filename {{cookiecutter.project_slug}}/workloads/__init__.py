"""What is trained: one module for each workload, selected by `workload:` in config.yaml. Your own code lives here.

To write a workload, copy minimal.py to workloads/<name>.py, change its class `Workload`, and set `workload: <name>`.
The class must fit the protocol below; that is all the training loop asks of it. Then replace the sections `data` and
`model` of config.yaml, too: keys of another workload are errors.
"""

from abc import abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from fastgpu.process.config import Config, Section
from fastgpu.process.config_loader import read_options
from fastgpu.process.launch import UserError

if TYPE_CHECKING:  # importing this package must not import torch: a mistake in the config is told before that
    from torch import Generator, Tensor, nn

    from fastgpu.rows.contract import Dataset
    from fastgpu.rows.rows import Rows

Direction = Literal["higher", "lower"]
"""Which values of a metric are better."""


class Workload(Protocol):
    """A model, what happens to a batch on the device, the loss and the metrics. Every rank has one instance."""

    Options: type[Section]
    """Your settings: a class of typed fields with defaults. They are read from the section `model` of config.yaml and
    checked like every other key."""

    options: Any
    """The values of `Options`. `make` sets it; set it in `__init__` if you need it there."""

    best: tuple[str, Direction]
    """The metric that decides which checkpoint is the best one, and which of its values are better."""

    inputs: tuple[str, ...] = ()
    """The fields that `predict` takes from a batch. predict.py reads these, and all fields of training to evaluate."""

    @property
    def summary(self) -> str:
        """What the workload understood of the rows, in one line. It is printed when a run starts."""
        return ""

    @abstractmethod
    def __init__(self, options: Any, train: "Dataset", val: "Dataset"):
        """Check that the rows are of the expected kind, and raise UserError if they are not. options: `Options`.

        predict.py passes sources that have the fields and attributes of the training rows (and what `card` returned,
        as attributes), but no rows, and no `column`.
        """

    @abstractmethod
    def model(self) -> "nn.Module":
        """The network, newly initialised, on the CPU. It should take rows as they lie in the file, so that a
        checkpoint takes them, too."""

    @abstractmethod
    def transform(self, batch: "Rows", rng: "Generator") -> "Rows":
        """Prepare a training batch on the device, for instance by augmentation. It is called anew each time a row is
        trained on. Draw random numbers from `rng` (a generator of the device), so that a resumed run repeats them."""

    @abstractmethod
    def loss(self, model: "nn.Module", batch: "Rows") -> "Tensor":
        """The mean loss of a batch, as a scalar on the device. Do not call .item(): the host would wait."""

    @abstractmethod
    def score(self, model: "nn.Module", batch: "Rows") -> "Mapping[str, Tensor]":
        """Sums over the rows of a validation batch, of any shape: losses, hits, a confusion matrix, a histogram."""

    @abstractmethod
    def metrics(self, sums: "Mapping[str, Tensor]") -> Mapping[str, float]:
        """The metrics, from what `score` gives, summed over all validation rows of all ranks: float64, on the CPU.
        `sums["n"]` is the number of these rows."""

    def predict(self, model: "nn.Module", batch: "Rows") -> Mapping[str, "Tensor"]:
        """{column: (B,) or (B, k)} for a batch of `inputs`, as predict.py writes it. Training does not need this.

        Of a column `probability`, (B, classes), predict.py writes the best classes, of `scores`, (B, items), the best
        items, beside their names in the attributes `class_names` and `item_ids`. An item of score -inf is none.
        """
        raise UserError("the workload has no method predict; workloads/__init__.py describes it")

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """What the training data decided about the model, as JSON values: shapes, class names, normalisation. With the
        options and the attributes of the training file it is enough to build the model again. It is stored in run.json,
        and among the attributes in model.json."""


def load(name: str) -> type[Workload]:
    """The class `Workload` of workloads/<name>.py. Raises UserError if there is none, or not a whole one."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in names:
        raise UserError(f"workload is {name}, but workloads/{name}.py does not exist; there are: {', '.join(names)}")
    workload = getattr(import_module(f"workloads.{name}"), "Workload", None)
    if workload is None or Workload not in workload.__mro__:
        raise UserError(
            f"workloads/{name}.py has no class Workload(workloads.Workload); copy that of workloads/minimal.py"
        )
    for member in ("Options", "best", *sorted(Workload.__abstractmethods__)):
        if getattr(workload, member, None) is getattr(Workload, member, None):
            raise UserError(f"workloads/{name}.py: class Workload has no {member}; workloads/__init__.py describes it")
    return workload


def make(config: Config, train: "Dataset", val: "Dataset") -> Workload:
    """The workload that the config names, with its options. Raises UserError if they, or the rows, do not fit."""
    kind = load(config.workload)
    options = read_options(config, kind.Options)
    workload = kind(options, train, val)
    workload.options = options
    return workload
