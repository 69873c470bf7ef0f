"""What a run was trained with: run.json and config.yaml in its folder."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from fastgpu import TEMPLATE_VERSION
from fastgpu.process.atomic import write_own
from fastgpu.process.config import nested
from fastgpu.process.launch import read_environment, warn

PACKAGES = ("torch", "h5py", "numpy", "pydantic", "tensorboard")


class Record:
    """The files of one start of a run; a resumed run adds run-2.json and config-2.yaml."""

    def __init__(self, folder: Path):
        number = 1 + len([*folder.glob("run*.json")])
        suffix = f"-{number}" if number > 1 else ""
        self._description = folder / f"run{suffix}.json"
        self._config = folder / f"config{suffix}.yaml"

    def write_description(self, card: Mapping[str, Any], directions: Mapping[str, str]) -> None:
        """Command, versions, environment, GPU, commit. card: what the workload says about the model.

        directions: {metric: "higher" or "lower"}.
        """
        versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
        for name in PACKAGES:
            with suppress(PackageNotFoundError):
                versions[name] = version(name)
        description = {
            "command": sys.argv,
            "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "template_version": TEMPLATE_VERSION,
            "versions": versions,
            "environment": read_environment(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
            "machine": platform.platform(),
            "git_commit": _git("rev-parse", "HEAD"),
            "git_changes": _git("status", "--porcelain", "--untracked-files=no"),
            "model": dict(card),
            "metrics": dict(directions),
        }
        write_or_warn(self._description, json.dumps(description, indent=2))

    def write_config(self, config: Mapping[str, Any]) -> None:
        """A valid --config file. config: {dotted key: value}."""
        write_or_warn(self._config, yaml.safe_dump(nested(config), sort_keys=False, allow_unicode=True))


def write_or_warn(path: Path, text: str) -> None:
    """Write a file of the run. If the disk refuses, training goes on."""
    try:
        write_own(path, text)
    except OSError as error:
        warn(f"cannot write {path} ({error}); training goes on")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
