"""The version of the package fastgpu-engine, which its build asks for: that of the template, and between two releases
the commit, too.

pip keeps what is installed if its version is the wanted one. Without the commit, a project that moves from one commit
of the template to another would therefore keep the engine of the first one.
"""

import re
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def engine_version() -> str:
    """Such as 0.2.0 for the tag v0.2.0 and for an archive without a repository, otherwise 0.2.0+g1a2b3c4d5e."""
    source = (ROOT / "{{cookiecutter.project_slug}}/fastgpu/__init__.py").read_text("utf-8")
    (release,) = re.findall(r'(?m)^TEMPLATE_VERSION = "(.+)"$', source)
    tags, commit = ask_git("tag", "--points-at", "HEAD"), ask_git("rev-parse", "--short=10", "HEAD")
    return release if f"v{release}" in tags.split() or not commit else f"{release}+g{commit}"


def ask_git(*words: str) -> str:
    """What git prints about this repository, or nothing if this is none."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        return ""  # not the answer of a repository around this folder
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True, check=False).stdout.strip()
