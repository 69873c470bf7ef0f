"""Rules for the template's own code, which bind its authors, not its users, so a project does not carry them."""

import re
import sys

import pytest

from support import PROJECT, ROOT
from support.ranks import run_to_end
from tools.facts import project_files, tracked

SOURCES = [name for name in project_files() if name.endswith(".py") and not name.startswith("tests/")]
"""The project's Python files without its tests, relative to its folder."""

SEE_CONFIG = ",".join(name for name in SOURCES if "/" not in name)
SEE_CONFIG += (
    ",workloads/__init__.py,fastgpu/feed/s*.py,fastgpu/feed/tiers.py,fastgpu/process/config*,fastgpu/diagnose/*"
)
"""Modules that see the whole config: the scripts, those that define it or build a part by it, and the diagnosis."""


def banned(*names: str) -> list[str]:
    """Words for ruff."""
    settings = [f"--config=lint.flake8-tidy-imports.banned-api.'{name}'.msg = 'not here'" for name in names]
    return ["--select=TID251", *settings]


@pytest.mark.parametrize(
    ("rules", "exempt"),
    [
        (banned("fastgpu.process.config.Config", "fastgpu.process.config_loader.load_config"), SEE_CONFIG),
        (banned("os.environ", "os.environb", "os.getenv"), "fastgpu/process/launch.py,fastgpu/process/world.py"),
        (["--preview", "--select=S301,S302,S403,S506"], "fastgpu/dataset/workers.py"),  # nothing is unpickled
        (["--select=D100,D101,TID252"], ""),
        (["--select=D103"], "train.py"),  # the story of the program, which comments tell section by section
    ],
)
def test_style_modules_do_what_they_may(rules, exempt):
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--output-format=concise", *rules]
    found = run_to_end([*command, f"--exclude={exempt}", "--force-exclude", *SOURCES], PROJECT)
    assert "All checks passed" in found.stdout, found.stdout


def test_style_no_pickle_and_no_format_switch():
    for name in [each for each in tracked() if each.endswith(".py")]:
        text = (ROOT / name).read_text()
        assert not re.search("# fmt: (skip|off)", text), name
        assert all("weights_only=True" in call for call in re.findall(r"torch\.load\(.*", text)), name
        assert "allow_pickle=" + "True" not in text, name
