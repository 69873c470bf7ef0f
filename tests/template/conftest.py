"""Fixtures that bake projects from a clean copy of the template."""

import functools
import shutil
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from facts import ALL_FILES, tracked

from support import ROOT
from support.projects import bake_project
from support.ranks import printed_by


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the template, as a user clones it."""
    copy = tmp_path_factory.mktemp("template")
    for name in tracked():
        target = copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    return copy


@pytest.fixture(scope="session")
def baked(template: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """baked(workload, **answers) is a project that all tests share and leave as it is; it has ALL_FILES by default."""

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


@pytest.fixture(scope="session")
def wheels(template: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The engine as a package, twice: built from the template, and from an sdist of it."""
    folder = tmp_path_factory.mktemp("wheel")
    build = (sys.executable, "-m", "hatchling", "build", "-d")
    printed_by([*build, folder], template)
    (sdist,) = folder.glob("*.tar.gz")
    shutil.unpack_archive(sdist, folder, filter="data")
    printed_by([*build, folder / "from-sdist", "-t", "wheel"], folder / sdist.name.removesuffix(".tar.gz"))
    return sorted(folder.rglob("*.whl"))


@pytest.fixture(scope="session")
def python_with_engine(wheels: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python of an environment that has the engine as a package, and all that is installed here."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder / "venv", with_pip=False)
    (site,) = folder.glob("venv/lib/python*/site-packages")
    others = [path for path in sys.path if path.endswith("site-packages")]
    (site / "others.pth").write_text("\n".join(others))  # behind its own
    with zipfile.ZipFile(wheels[0]) as packed:
        packed.extractall(site)
    return folder / "venv/bin/python"
