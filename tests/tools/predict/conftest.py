"""A run of two epochs to predict with, models that are made up, and `python predict.py` in this process."""

import io
import shutil
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fastgpu.predict import program
from fastgpu.predict.command import Predict
from fastgpu.predict.model import Trained, load_model, training_rows
from fastgpu.process.commands import parse
from fastgpu.rows.rows import Rows
from support.ranks import ALONE
from support.runs import train, write_minimal


@pytest.fixture(scope="session")
def minimal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the workload `minimal`, which lies in runs/ beside rows.h5. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("minimal")
    write_minimal(folder, n_rows=320)
    with chdir(folder):
        train("train.epochs=2", "train.ema=0.5")
    return folder / "runs/a"


@pytest.fixture
def copy_model(minimal_run: Path, tmp_path: Path) -> Callable[..., Path]:
    """copy_model(name, state.json, ...) is a folder with the model of that run, and the files that are named."""

    def copy(name: str, *more: str) -> Path:
        (tmp_path / name).mkdir(parents=True)
        for file in ("model.json", "model.safetensors", *more):
            shutil.copy(load_model(minimal_run).folder / file, tmp_path / name)
        return tmp_path / name

    return copy


@pytest.fixture(scope="session")
def run() -> Callable[..., str]:
    """run(words of the command line) returns what is printed to the terminal."""

    def call(*words: object) -> str:
        terminal = io.StringIO()
        asked = parse(Predict, [*map(str, words)], program="predict.py")
        program.run(asked, ALONE, terminal)
        return terminal.getvalue()

    return call


Answer = Callable[[nn.Module, Rows], dict[str, torch.Tensor]]


@pytest.fixture(scope="session")
def model_of() -> Callable[..., Trained]:
    """model_of({field: part of its description in model.json}, model, predict, attribute=...) is a trained model.

    All fields are inputs. Without more, a field is uint8 with rows of one number.
    """

    def make(
        fields: dict[str, dict[str, Any]],
        model: nn.Module | None = None,
        predict: Answer | None = None,
        **attributes: Any,
    ) -> Trained:
        default = {"dtype": "uint8", "shape": [], "is_ragged": False, "n_items": None}
        card = {"fields": {name: default | {"dataset": name} | field for name, field in fields.items()}}
        card["attributes"] = attributes
        workload: Any = SimpleNamespace(inputs=tuple(fields), predict=predict)
        return Trained((model or nn.Identity()).eval(), workload, card, training_rows(card), Path("made up"))

    return make
