"""The folder of a run: which one it is, its lock, and the files that say what it is trained with.

run.json and config.yaml only describe a run: it never reads them.
"""

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from fastgpu import TEMPLATE_VERSION
from fastgpu.process.config import Run
from fastgpu.process.files import FolderLock, new_file
from fastgpu.process.launch import UserError, warn
from fastgpu.run.checkpoint import PARTIAL

PACKAGES = ("torch", "h5py", "numpy", "pydantic", "tensorboard")
LEARNED = ("workload", "data.", "model.", "optim.", "train.", "run.seed")
"""Beginnings of the keys that decide what is learned. A change of another key needs no word."""
CHOSEN = ("workload", "model.", "data.train", "data.dataset")
"""Beginnings of the keys by which a person knows a run, if nobody has named it."""


def find_folder(settings: Run) -> Path:
    """`run.folder/run.name`. The name "auto" means the run that saved last when resuming, else date and time."""
    runs = Path(settings.folder)
    if settings.name != "auto":
        return runs / settings.name
    saved = list(runs.glob("*/checkpoints/last-*"))
    if settings.resume == "auto" and saved:
        return max(saved, key=os.path.getmtime).parents[1]
    now = time.strftime("%Y%m%d-%H%M%S")
    names = (now if number == 1 else f"{now}-{number}" for number in count(1))
    return next(runs / name for name in names if not (runs / name).exists())


def lock(folder: Path, *, is_new: bool = False) -> FolderLock:
    """Create the folder of a run, and lock it. What a process that was killed while it saved has left is removed.

    is_new: the run is a new one. Raises UserError if the folder cannot be written, if another process has it, or if a
    new run would mix its checkpoints with those of an older one.
    """
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        held = FolderLock(folder)
    except OSError as error:
        raise UserError(
            f"run.folder: cannot write to {folder} ({error.strerror}); use another run.folder, make it writable, or "
            "free disk space"
        ) from None
    if is_new and any(folder.glob("checkpoints/*-[0-9]*")):
        held.close()
        raise UserError(f"run.name: {folder} holds a run; use run.resume=auto to continue it, or another run.name")
    for path in folder.glob(f"checkpoints/{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)
    return held


# ---------------------------------------------------------------------------------------------- what it is trained with


def write_record(folder: Path, config: Mapping[str, Any], gpu: str, best: Sequence[str]) -> None:
    """Write run.json and config.yaml of a start of a run; a resumed run adds run-2.json and config-2.yaml.

    config: the tree of config.yaml, which is a valid --config file. best: see `Workload.best`.
    """
    number = 1 + len([*folder.glob("run*.json")])
    suffix = f"-{number}" if number > 1 else ""
    description = {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "template_version": TEMPLATE_VERSION,
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "gpu": gpu,
        "machine": platform.platform(),
        "git_commit": _git_commit(),
        "best": list(best),
    }
    write_or_warn(folder / f"run{suffix}.json", json.dumps(description, indent=2))
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    write_or_warn(folder / f"config{suffix}.yaml", text)


def write_or_warn(path: Path, text: str) -> None:
    """Write a file that a run does not need. If the disk refuses, training goes on."""
    try:
        with new_file(path, replace=True) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        warn(f"cannot write {path} ({error}); training goes on")


def _git_commit() -> str | None:
    """The commit of the current folder, with "-dirty" if files have changed since. None: it has none."""
    command = ["git", "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def find_changes(
    folder: Path, saved: Mapping[str, Any], config: Mapping[str, Any], *, is_named: bool = True
) -> list[str]:
    """`key=value (was the old one)` of the keys that decide what is learned.

    saved, config: {dotted key: value}, without `auto`, of the run that saved a checkpoint and of the one that goes on.
    Raises UserError if nobody has named the run, and it has another model or other data.
    """
    learned = [key for key in config if key in saved and key.startswith(LEARNED) and key != "data.tier"]
    changed = [key for key in learned if str(config[key]) != str(saved[key])]
    changes = [f"{key}={config[key]} (was {saved[key]})" for key in changed]
    if not is_named and any(key.startswith(CHOSEN) for key in changed):
        raise UserError(
            f"run.name=auto takes the newest run, {folder}, but this is {', '.join(changes)}: name the run to resume "
            "with run.name, or use run.resume=never"
        )
    return changes
