"""Linters accept the workflows and the Dockerfiles."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from fastgpu.process.config import Data, RunConfig
from support.projects import render
from support.ranks import printed_by, run_to_end
from tools.facts import FOLDER, PROJECT, ROOT

TOOLS = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
FOLDERS = [ROOT / ".github", PROJECT / ".github"]


def lint(*command: str | Path, cwd: Path = ROOT) -> str:
    return printed_by(command, cwd, PATH=TOOLS)


def test_workflows(tmp_path):
    """Of their own makers, actions are trusted by their tag; dependabot keeps it up to date."""
    rules = tmp_path / "zizmor.yml"
    rules.write_text("rules: {unpinned-uses: {config: {policies: {actions/*: ref-pin}}}}")
    lint("zizmor", "--offline", "--strict-collection", "--quiet", "--config", rules, *FOLDERS)
    for kind, pattern in (("github-workflows", "workflows/*.yml"), ("dependabot", "dependabot.yml")):
        files = [path for folder in FOLDERS for path in folder.glob(pattern)]
        lint("check-jsonschema", "--builtin-schema", f"vendor.{kind}", *files)


@pytest.mark.parametrize("engine", ["copy", "package"])
def test_dockerfile(tmp_path, engine):
    """It runs without root, in folders where it may write, copies what there is, and installs extras of the project."""
    text = render(PROJECT / "launch/Dockerfile", engine=engine)
    (tmp_path / "Dockerfile").write_text(text)
    lint("hadolint", tmp_path / "Dockerfile")
    assert bool(re.search(r"(?m)^RUN apt-get .* git\b", text)) == (engine == "package")  # which pip may need
    assert re.findall(r"(?m)^USER (.*)$", text) == ["1000"]
    cache = Data.model_fields["cache"].default
    assert re.findall(r"(?m)^RUN install --directory --owner=train (.*)$", text) == [f"{RunConfig().folder} {cache}"]
    assert re.findall(r"(?m)^ARG EXTRAS=(.*)$", text) == ["cloud"]
    assert all((PROJECT / name).is_file() for name in re.search(r"(?m)^COPY (.*) \S+$", text)[1].split())


OWNERS_CODE = """
import os

from torch import nn


class convBlock(nn.Module):
    def __init__(self, in_channels, out_channels, kernel_size, stride, padding, groups, dropout):
        super().__init__()
        self.layers = [nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups)]
        self.layers = self.layers + [nn.Dropout(dropout)]


def read_names(folder):
    with open(os.path.join(folder, "names.txt")) as file:
        names = [line for line in file]
    if names:
        return names
    else:
        return []
"""


def test_owners_code_has_the_usual_rules(tmp_path):
    """The style of the engine binds the engine: not train.py, workloads, scripts and tests, which are the owner's."""
    shutil.copyfile(PROJECT / "pyproject.toml", tmp_path / "pyproject.toml")
    ruff = (sys.executable, "-m", "ruff", "check", "--no-cache", "--output-format=concise", ".")
    for name in ("mine.py", "workloads/mine.py", "tests/test_mine.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(OWNERS_CODE)
    lint(*ruff, cwd=tmp_path)
    (tmp_path / "train.py").write_text("import os\n")
    (tmp_path / "fastgpu").mkdir()
    (tmp_path / "fastgpu/mine.py").write_text(OWNERS_CODE)
    found = run_to_end(ruff, tmp_path).stdout
    rules = {
        "os-path-join",
        "builtin-open",
        "too-many-arguments",
        "too-many-positional-arguments",
        "invalid-class-name",
    }
    assert {rule for rule in rules if rule in found} == rules
    assert "train.py:1:8: unused-import" in found
    assert set(re.findall(r"(?m)^([\w/]+\.py):", found)) == {"train.py", "fastgpu/mine.py"}


def test_style_of_the_engine_binds_the_template(tmp_path):
    """`make check` holds all of the project to it."""
    (line,) = re.findall(r"(?m)^WHOLE_PROJECT := (.*)$", (ROOT / "Makefile").read_text())
    project = shutil.copytree(PROJECT, tmp_path / FOLDER, ignore=shutil.ignore_patterns("data", "docs"))
    command = f"{sys.executable} -m ruff check --no-cache --output-format=concise {line.replace('$(PROJECT)', FOLDER)}"
    lint("bash", "-c", command, cwd=tmp_path)
    (project / "workloads/mine.py").write_text(OWNERS_CODE)
    assert "workloads/mine.py:" in run_to_end(["bash", "-c", command], tmp_path).stdout


@pytest.mark.slow
def test_image_packages(baked, tmp_path):
    """pip has what it needs when the image is built, which is before the code is copied."""
    text = (PROJECT / "launch/Dockerfile").read_text()
    (copied,) = re.findall(r"(?m)^COPY (.*) \./$", text)
    (install,) = re.findall(r"(?m)^RUN (.*pip install.*)$", text)
    (extras,) = re.findall(r"(?m)^ARG (EXTRAS=.*)$", text)
    for name in copied.split():
        shutil.copyfile(baked("both", launch="both") / name, tmp_path / name)
    lint("sh", "-c", f"{extras}; {install} --dry-run", cwd=tmp_path)
