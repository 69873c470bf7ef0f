"""Fixtures that bake projects from a clean copy of the template, and that write data for the project in place."""

import functools
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from baking import bake_project
from harness import ITEMS, numbered, ragged, write_minimal
from template import ALL_FILES, ROOT, tracked

from fastgpu.process.signals import STOP


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start a Slurm cluster run only where `-m slurm` asks for them."""
    if config.option.markexpr != "slurm":
        items[:] = [item for item in items if not item.get_closest_marker("slurm")]


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the template, as a user clones it."""
    copy = tmp_path_factory.mktemp("template")
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return copy


@pytest.fixture
def bake(template: Path, tmp_path: Path) -> Callable[..., Path]:
    """bake(**answers) makes a project in tmp_path/out and returns its folder."""
    return functools.partial(bake_project, tmp_path, template)


@pytest.fixture(scope="session")
def baked(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """baked(workload, **answers) is the folder of a project that all tests share: they read it, or run tools that leave
    it as it is. The project is baked at the first call, with all tools and files of launch/ if nothing else is said."""

    @functools.cache
    def project(workload: str, **answers: str) -> Path:
        given = {"project_slug": "cats", "license": "MIT", "workload": workload} | ALL_FILES | answers
        return bake_project(tmp_path_factory.mktemp(workload), template, **given)

    return project


@pytest.fixture
def own_copy(baked: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """own_copy(workload, **answers) is a project that the test may change."""

    def copy(workload: str, **answers: str) -> Path:
        return shutil.copytree(baked(workload, **answers), tmp_path / workload)

    return copy


HANDLERS = {number: signal.getsignal(number) for number in STOP}
"""Those that Python starts with."""


@pytest.fixture(autouse=True)
def signal_handlers() -> Iterator[None]:
    """Each test begins with the handlers of signals that Python starts with. A run that is over leaves its own, and so
    may a fixture of a whole module; a forked child would inherit them and outlive `terminate`."""
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)
    yield
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """write(rows, chunk=..., ...) writes an HDF5 file with numbered `images` and `labels` and returns its path."""

    def make(
        rows: int = 100,
        shape: tuple[int, ...] = (1, 4, 2),
        chunk: int | None = 8,
        *,
        name: str = "rows.h5",
        start: int = 0,
        classes: int = 4,
        **options: Any,
    ) -> str:
        path = tmp_path / name
        with h5py.File(path, "w") as file:
            chunks = (min(chunk, rows), *shape) if chunk else None
            file.create_dataset("images", data=numbered(rows, shape, start), chunks=chunks, **options)
            file["labels"] = np.arange(start, start + rows) % classes
        return str(path)

    return make


@pytest.fixture
def write_ragged(tmp_path: Path) -> Callable[..., str]:
    """write_ragged(rows) writes an HDF5 file with the CSR matrix `items` and the `number` of each row.

    Returns its path.
    """

    def make(rows: int = 100, name: str = "ragged.h5", start: int = 0, items: int = ITEMS, **options: Any) -> str:
        numbers = range(start, start + rows)
        array = ragged(numbers)
        with h5py.File(tmp_path / name, "w") as file:
            group = file.create_group("items")
            group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (rows, items)})
            group["indptr"] = array.offsets
            group.create_dataset("indices", data=array.values, **options)
            file["number"] = np.array(numbers)
        return str(tmp_path / name)

    return make


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder in which `python train.py` works: config.yaml and rows.h5 for the workload `minimal`.

    It is the current folder, so that the test itself can train there, too.
    """
    write_minimal(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path
