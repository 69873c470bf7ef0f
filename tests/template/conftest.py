"""Fixtures that bake projects from a clean copy of the template."""

import functools
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from template import ALL_FILES, tracked

from support import ROOT
from support.projects import bake_project


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
