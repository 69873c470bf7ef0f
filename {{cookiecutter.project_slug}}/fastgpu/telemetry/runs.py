"""The folder of a run, and what a later reader needs to run it again."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from fastgpu.process.launch import UserError


def open_run(parent: str, name: str, resume: bool) -> Path:
    """`parent/name`, made if need be; "auto" is the newest run when resuming, else (or if there is none) date and time.

    Raises UserError if it cannot be written, or if it holds checkpoints that a new run would mix with its own.
    """
    runs = Path(parent)
    if name == "auto":
        name = (_newest(runs) if resume else None) or _unused(runs, time.strftime("%Y%m%d-%H%M%S"))
    folder = runs / name
    try:
        if not resume and any(folder.glob("checkpoints/*")):
            raise UserError(
                f"run.name: {folder} holds a run; use run.resume=auto to go on with it, or another run.name"
            )
        folder.mkdir(parents=True, exist_ok=True)
        (folder / ".writable").touch()
        (folder / ".writable").unlink()
    except OSError as error:
        raise UserError(
            f"run.folder: cannot write to {folder} ({error.strerror}); use another run.folder or free it"
        ) from None
    return folder


def describe_run(folder: Path | None, config: Mapping[str, Any]) -> None:
    """Write where the run ran (command, versions, GPU, commit) and its resolved config; without a folder, nothing.

    A resumed run adds its own pair: run.json, run-2.json, ...
    """
    if folder:
        number = 1 + len([*folder.glob("run*.json")])
        _write(folder / f"run{'' if number == 1 else f'-{number}'}.json", json.dumps(_provenance(), indent=2))
        write_config(folder, config)


def write_config(folder: Path | None, config: Mapping[str, Any]) -> None:
    """The resolved config, a valid --config file; again when `auto` has found another number."""
    if not folder:
        return
    tree: dict[str, Any] = {}
    for key, value in config.items():
        section, _, leaf = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[leaf] = value
    number = len([*folder.glob("run*.json")])
    text = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    _write(folder / f"config{'' if number <= 1 else f'-{number}'}.yaml", text)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        print(f"warning: cannot write {path} ({error}); training goes on", flush=True)


def _newest(runs: Path) -> str | None:
    """Name of the run that saved last."""
    saved = [path for path in runs.glob("*/checkpoints/last-*") if path.is_dir()]
    return max(saved, key=lambda path: path.stat().st_mtime_ns).parts[-3] if saved else None


def _unused(runs: Path, name: str) -> str:
    taken, number = name, 1
    while (runs / taken).exists():
        number += 1
        taken = f"{name}-{number}"
    return taken


def _provenance() -> dict[str, Any]:
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "h5py", "numpy", "pydantic", "tensorboard"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": versions,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "machine": platform.platform(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": _git("status", "--porcelain", "--untracked-files=no"),
    }


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
