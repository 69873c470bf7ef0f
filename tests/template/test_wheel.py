"""The engine as a package: its files, what it needs, its version, and the projects that it is installed for."""

import re
import subprocess
import tomllib
import zipfile

import pytest

from support import PROJECT
from support.ranks import printed_by
from tools import engine_version
from tools.facts import ROOT, project_files

WITHOUT_ENGINE = re.sub(r"{%.*?%}", "", (PROJECT / "pyproject.toml").read_text())
"""pyproject.toml of a project of images that has a copy of the engine."""
ENGINE = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_wheel_has_the_files_of_the_folder(wheels):
    """All that are copied into a project, and nothing else; also if it is built from an sdist."""
    engine = {name for name in project_files() if name.startswith("fastgpu/")}
    assert {"fastgpu/py.typed", "fastgpu/feed/loader.py"} <= engine
    for wheel in wheels:
        assert {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name} == engine
    assert len(wheels) == 2


@pytest.mark.slow
def test_wheel_rooms_are_imported_without_a_project(python_with_engine, tmp_path):
    """From an empty folder, and none looks for a project."""
    rooms = sorted(path.parent for path in (PROJECT / "fastgpu").rglob("__init__.py"))
    names = [".".join(path.relative_to(PROJECT).parts) for path in rooms]
    code = f"import {', '.join(names)}; print(fastgpu.feed.__file__)"
    assert "site-packages" in printed_by([python_with_engine, "-c", code], tmp_path)


def test_wheel_needs_what_a_copy_needs():
    """Neither list can have what the other has not."""
    copy = tomllib.loads(WITHOUT_ENGINE)["project"]
    extras = ENGINE["project"]["optional-dependencies"]
    assert [*ENGINE["project"]["dependencies"], *extras.pop("images")] == copy["dependencies"]
    assert extras == {name: needed for name, needed in copy["optional-dependencies"].items() if name != "dev"}
    assert ENGINE["project"]["requires-python"] == copy["requires-python"]


def test_wheel_builder_is_the_one_of_the_tests():
    """No list of constraints reaches what pip builds with."""
    (builder,) = ENGINE["build-system"]["requires"]
    assert builder in (ROOT / "requirements.txt").read_text().splitlines()
    assert re.fullmatch(r"hatchling==[\d.]+", builder)


def test_wheel_version_names_the_commit(tmp_path, monkeypatch):
    """pip installs no other commit over the same version."""
    name = "{{cookiecutter.project_slug}}/fastgpu/__init__.py"
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text('TEMPLATE_VERSION = "1.2.3"\n')
    monkeypatch.setattr(engine_version, "ROOT", tmp_path)
    assert engine_version.engine_version() == "1.2.3"  # an archive, in whatever repository it was unpacked

    def git(*words: str) -> str:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        return subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", "-A")
    git("commit", "-qm", "first")
    git("tag", "v1.2.2")
    commit = git("rev-parse", "HEAD")[:10]
    assert engine_version.engine_version() == f"1.2.3+g{commit}"
    git("tag", "v1.2.3")
    assert engine_version.engine_version() == "1.2.3"
