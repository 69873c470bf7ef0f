"""The folder of a run: which one it is, its lock, and the files that say what it is trained with.

run.json and config.yaml only describe a run: what is wrong with them stops nothing. Does not import torch.
"""

import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any

import yaml

from fastgpu import TEMPLATE_VERSION
from fastgpu.process.config import Run, nested
from fastgpu.process.files import FolderLock, write_whole
from fastgpu.process.launch import UserError, warn

PARTIAL = ".partial-"
"""Beginning of the names of folders that are being written."""
PACKAGES = ("torch", "h5py", "numpy", "pydantic", "tensorboard")
LEARNED = ("workload", "data.", "model.", "optim.", "train.", "run.seed")
"""Beginnings of the keys that decide what is learned. A change of another key needs no word."""
CHOSEN = ("workload", "model.", "data.train", "data.dataset")
"""Beginnings of the keys by which a person knows a run, if nobody has named it."""


def refuse_taken(settings: Run) -> None:
    """Raise UserError if a new run would mix its checkpoints with those of an older one."""
    folder = Path(settings.folder) / settings.name
    is_taken = False
    with suppress(OSError):  # `lock` says what is wrong
        is_taken = settings.resume == "never" and any(folder.glob("checkpoints/*-[0-9]*"))
    if is_taken:
        raise UserError(f"run.name: {folder} holds a run; use run.resume=auto to continue it, or another run.name")


def find_folder(settings: Run) -> Path:
    """`run.folder/run.name`. The name "auto" means the run that saved last when resuming, else date and time."""
    runs = Path(settings.folder)
    if settings.name != "auto":
        return runs / settings.name
    saved = sorted(runs.glob("*/checkpoints/last-*"), key=_modified)
    if settings.resume == "auto" and saved:
        return saved[-1].parents[1]
    now = time.strftime("%Y%m%d-%H%M%S")
    names = (now if number == 1 else f"{now}-{number}" for number in count(1))
    return next(runs / name for name in names if not (runs / name).exists())


def _modified(path: Path) -> float:
    """When a file was changed last; 0 if its run has just removed it."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def lock(folder: Path) -> FolderLock:
    """Create the folder of a run, and lock it. Raises UserError if it cannot be written, or another process has it.

    What a process that was killed while it saved has left is removed.
    """
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        held = FolderLock(folder)
    except OSError as error:
        raise UserError(
            f"run.folder: cannot write to {folder} ({error.strerror}); use another run.folder, make it writable, or "
            "free disk space"
        ) from None
    for path in folder.glob(f"checkpoints/{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)
    return held


# ---------------------------------------------------------------------------------------------- what it is trained with


def write_record(folder: Path, config: Mapping[str, Any], gpu: str, best: Sequence[str]) -> None:
    """Write run.json and config.yaml of a start of a run; a resumed run adds run-2.json and config-2.yaml.

    config: {dotted key: value}; the file is a valid --config file. best: see `Workload.best`.
    """
    number = 1 + len([*folder.glob("run*.json")])
    suffix = f"-{number}" if number > 1 else ""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    description = {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "template_version": TEMPLATE_VERSION,
        "versions": versions,
        "gpu": gpu,
        "machine": platform.platform(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": _git("status", "--porcelain", "--untracked-files=no"),
        "best": list(best),
    }
    write_or_warn(folder / f"run{suffix}.json", json.dumps(description, indent=2))
    text = yaml.safe_dump(nested(config), sort_keys=False, allow_unicode=True)
    write_or_warn(folder / f"config{suffix}.yaml", text)


def write_or_warn(path: Path, text: str) -> None:
    """Write a file that a run does not need. If the disk refuses, training goes on."""
    try:
        write_whole(path, text)
    except OSError as error:
        warn(f"cannot write {path} ({error}); training goes on")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def read_description(path: Path) -> dict[str, Any]:
    """The content of a JSON or YAML file that only describes a run; empty if it cannot be read: it stops nothing."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def read_config(folder: Path) -> dict[str, Any]:
    """{dotted key: value} of the newest config.yaml of a run; empty if there is none that can be read."""
    config: dict[str, Any] = {}
    for path in numbered(folder, "config*.yaml")[-1:]:
        for name, value in read_description(path).items():
            is_section = isinstance(value, dict)
            config |= {f"{name}.{key}": each for key, each in value.items()} if is_section else {name: value}
    return config


def numbered(folder: Path, pattern: str) -> list[Path]:
    """The files that the parts of a run wrote, in their order: run.json, run-2.json, ..., run-10.json."""
    return sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name))


def find_changes(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """{key: "new value (was the old one)"} of the keys that decide what is learned, since the newest config of the run.

    config: {dotted key: value}, without `auto`.
    """
    changes = {}
    for key, old in read_config(folder).items():
        is_learned = key in config and key.startswith(LEARNED) and key != "data.tier"
        if is_learned and str(old) != str(config[key]):
            changes[key] = f"{config[key]} (was {old})"
    return changes


def refuse_another(folder: Path, changes: Mapping[str, str]) -> None:
    """Raise UserError if the newest run, which nobody has named, has another model or other data."""
    if changed := [f"{key}={value}" for key, value in changes.items() if key.startswith(CHOSEN)]:
        raise UserError(
            f"run.name=auto takes the newest run, {folder}, but this is {', '.join(changed)}: name the run to resume "
            "with run.name, or use run.resume=never"
        )
