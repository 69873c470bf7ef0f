"""Runs of one or two epochs, to predict with."""

from contextlib import chdir
from pathlib import Path

import pytest
import train
from harness import ALONE, write_minimal

from fastgpu.process.config_loader import load_config


@pytest.fixture(scope="session")
def minimal_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the workload `minimal`, which lies in runs/ beside rows.h5. Tests leave it as it is."""
    folder = tmp_path_factory.mktemp("minimal")
    write_minimal(folder, n_rows=320)
    with chdir(folder):
        train.train(train.build(load_config(["train.epochs=2", "train.ema=0.5"]), ALONE), ALONE)
    return folder / "runs/a"
