"""The workflows and the Dockerfile are valid, of the template and of its projects."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from template import PROJECT, ROOT

from support.ranks import printed_by

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


def test_dockerfile():
    lint("hadolint", PROJECT / "launch/Dockerfile")


@pytest.mark.slow
def test_image_packages(baked, tmp_path):
    """pip has what it needs when the image is built, which is before the code is copied."""
    text = (PROJECT / "launch/Dockerfile").read_text()
    (copied,) = re.findall(r"(?m)^COPY (.*) \./$", text)
    (install,) = re.findall(r"(?m)^RUN (.*pip install.*)$", text)
    for name in copied.split():
        shutil.copyfile(baked("both", launch="both") / name, tmp_path / name)
    lint("sh", "-c", f"{install} --dry-run", cwd=tmp_path)
