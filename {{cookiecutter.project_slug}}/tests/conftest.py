"""The project's own config and rows, for all tests. Where the rows are missing, tests that need them are skipped."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from contract import ON_A_CPU

import train
from fastgpu.feed import open_splits
from fastgpu.process.config import Config
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import Launch, attempt
from fastgpu.process.world import init_distributed


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the project, which is the current folder of every test."""
    folder = Path(train.__file__).resolve().parent
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def config(project: Path) -> Config:
    """config.yaml, on a CPU. The test is skipped if there is no file where data.train or data.val point."""
    config = load_config([*ON_A_CPU])
    if config.data.dataset == "none":
        for paths in (config.data.train, config.data.val):
            for path in [paths] if isinstance(paths, str) else paths:
                file = path.split("::")[0]
                if not (file.endswith("%") or Path(file).exists() or any(project.glob(file.lstrip("/")))):
                    pytest.skip(f"{file} of config.yaml is not there")
    return config


@pytest.fixture
def build(config: Config) -> Iterator[Callable[..., train.Training]]:
    """build("data.batch_size=8", ...) is everything that `train.py` with these words is made of, without a run."""
    with ExitStack() as stack:

        def make(*words: str) -> train.Training:
            changed = load_config([*ON_A_CPU, *words])
            world = stack.enter_context(init_distributed(changed.dist, Launch()))
            opened = attempt(open_splits, changed.data, changed.loader, changed.run.seed)
            parts = train.build(changed, opened, world)
            stack.callback(parts.loader.close)
            stack.callback(parts.val_loader.close)
            return parts

        yield make
