"""The command of diagnose.py. It does not import torch, so --help and errors appear without delay."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fastgpu.process.commands import flag, parse_known
from fastgpu.process.config import Config
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import SharedError, exit_with_message

if TYPE_CHECKING:
    from fastgpu.process.world import World
    from fastgpu.rows.rows import Rows

__all__ = ["Program", "main"]


class Program(Protocol):
    """The functions of train.py that are measured, as a module has them."""

    def build(self, config: Config, splits: Any, world: "World", /) -> Any:
        """The parts of the training: the fields of `Training` in train.py."""

    def train_step(self, training: Any, batch: "Rows", factor: float, /) -> object:
        """A step whose learning rate is multiplied by a factor, which is 0 here."""


@dataclass(frozen=True, kw_only=True)
class Diagnose:
    """Where does the time go, and which setting would help?

    python diagnose.py
    torchrun --standalone --nproc-per-node=gpu diagnose.py

    It takes the arguments of train.py, such as data.batch_size=512, and these:
    """

    seconds: float = flag("target seconds of each measurement (default: 0.3)", default=0.3, metavar="S")
    json: bool = flag("print the numbers as JSON; everything else goes to stderr", default=False)
    trace: int = flag("write a profile of N steps to run.folder, for https://ui.perfetto.dev", default=0, metavar="N")

    def __post_init__(self) -> None:
        if not self.seconds > 0 or self.trace < 0:
            raise SharedError("--seconds should be above 0, and --trace at least 0")


def read(argv: Sequence[str]) -> tuple[Diagnose, Config]:
    """The flags of diagnose.py, and the config that train.py would read. Raises SharedError."""
    asked, words = parse_known(Diagnose, argv, program="diagnose.py")
    return asked, load_config(words, program="diagnose.py")


def main(argv: Sequence[str], import_train: Callable[[], Program]) -> None:
    """Run `diagnose.py` with these words. import_train: imports train.py, after the config was read."""
    with exit_with_message():
        asked, config = read(argv)

    # Torch is imported after the checks that do not need it, because the import takes seconds.
    train = import_train()
    from fastgpu.diagnose.program import diagnose
    from fastgpu.process.world import init_distributed

    with exit_with_message(), init_distributed(config.dist, deterministic=config.run.deterministic) as world:
        with redirect_stdout(sys.stderr) if asked.json else nullcontext():
            numbers = diagnose(train, config, world, asked)
        if asked.json:
            world.print_once(json.dumps(numbers, indent=2))
