"""The folder of a run: which one it is, and whether it belongs to the run that is asked for. Does not import torch."""

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from fastgpu.process.config import Run
from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError

DAY_S = 86_400.0
"""A checkpoint that was saved later than a day from now was not: its clock, or the file, is wrong."""
LEARNED = ("workload", "data.", "model.", "optim.", "train.", "run.seed")
"""Beginnings of the keys that decide what is learned. A change of another key needs no word."""
NOT_LEARNED = ("data.tier",)

Changes = dict[str, tuple[str, str]]
"""{key: (value of the run that is resumed, value now)}, as JSON"""


def refuse_taken(settings: Run) -> None:
    """Raise UserError if a new run would mix its checkpoints with those of an older one."""
    folder = Path(settings.folder) / settings.name
    try:
        is_taken = settings.resume == "never" and any(folder.glob("checkpoints/*-[0-9]*"))
    except OSError:
        return  # `create_folder` says what is wrong
    if is_taken:
        raise UserError(f"run.name: {folder} holds a run; use run.resume=auto to continue it, or another run.name")


def refuse_begun(folder: Path) -> None:
    """Raise UserError if another process has begun a run in the folder since this one looked for checkpoints there."""
    if any(folder.glob("checkpoints/*-[0-9]*")):
        raise UserError(f"run.name: another process has begun a run in {folder} meanwhile; use another run.name")


def find_folder(settings: Run) -> Path:
    """`run.folder/run.name`. The name "auto" means the run that saved last when resuming, else date and time."""
    refuse_taken(settings)
    runs = Path(settings.folder)
    if settings.name != "auto":
        return runs / settings.name
    if settings.resume == "auto" and (times := save_times(runs)):
        return next(iter(times))
    now = time.strftime("%Y%m%d-%H%M%S")
    folder = runs / now
    number = 1
    while folder.exists():
        number += 1
        folder = runs / f"{now}-{number}"
    return folder


def save_times(runs: Path) -> dict[Path, float]:
    """{run with checkpoints: when it saved last}, the newest run first, by the times in their own state.json.

    Times of files, which a copy changes, count for checkpoints that have none there.
    """
    times: dict[Path, float] = {}
    for path in runs.glob("*/checkpoints/last-*"):
        progress = read_description(path / "state.json").get("progress")
        time_s = progress.get("saved_at") if isinstance(progress, dict) else None
        if not isinstance(time_s, float) or not 0 <= time_s <= time.time() + DAY_S:
            try:
                time_s = path.stat().st_mtime
            except OSError:
                continue  # its run has just removed it
        run = path.parents[1]
        times[run] = max(time_s, times.get(run, 0.0))
    return dict(sorted(times.items(), key=lambda item: item[1], reverse=True))


def describe_choice(folder: Path, settings: Run) -> str:
    """Which run run.name=auto resumes; empty if nothing had to be chosen."""
    if settings.name != "auto" or settings.resume != "auto" or not folder.exists():
        return ""
    return f"run.name=auto resumes {folder}, which saved last of {len(save_times(folder.parent))} runs"


def create_folder(folder: Path) -> None:
    """Create the folder of a run if needed. Raises UserError if it cannot be written."""
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"run.folder: cannot write to {folder} ({error.strerror}); use another run.folder, make it "
            "writable, or free disk space"
        ) from None


def lock(folder: Path) -> FolderLock:
    """The lock of the folder. Raises UserError if another process has it, or the folder cannot be written."""
    try:
        return FolderLock(folder)
    except OSError as error:
        raise UserError(
            f"cannot lock {folder} ({error.strerror}); make it writable, or use another run.folder"
        ) from None


def read_description(path: Path) -> dict[str, Any]:
    """The content of a JSON or YAML file that only describes a run; empty if it cannot be read: it stops nothing."""
    try:
        text = path.read_text(encoding="utf-8")
        content = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return content if isinstance(content, dict) else {}


def read_config(folder: Path) -> dict[str, Any]:
    """{dotted key: value} of the newest config.yaml of a run; empty if there is none."""
    paths = numbered(folder, "config*.yaml")
    return read_settings(paths[-1]) if paths else {}


def read_settings(path: Path) -> dict[str, Any]:
    """{dotted key: value} of a config.yaml; empty if it cannot be read."""
    config: dict[str, Any] = {}
    for name, value in read_description(path).items():
        config |= {f"{name}.{key}": part for key, part in value.items()} if isinstance(value, dict) else {name: value}
    return config


def numbered(folder: Path, pattern: str) -> list[Path]:
    """The files that the parts of a run wrote, in their order: run.json, run-2.json, ..., run-10.json."""
    return sorted(folder.glob(pattern), key=lambda path: (len(path.name), path.name))


# ---------------------------------------------------------------------------------------------- resuming


def find_changes(folder: Path, config: Mapping[str, Any]) -> Changes:
    """The keys that decide what is learned and have another value in the newest config of the run in this folder.

    config: {dotted key: value}, without `auto`. Without checkpoints in the folder there is nothing to compare.
    """
    saved = read_config(folder) if any(folder.glob("checkpoints/last-*")) else {}
    changes = {}
    for key in config:
        is_learned = key.startswith(LEARNED) and key not in NOT_LEARNED
        old, new = (json.dumps(values.get(key), default=str) for values in (saved, config))
        if is_learned and key in saved and old != new:
            changes[key] = (old, new)
    return changes


def refuse_another(folder: Path, settings: Run, changes: Changes) -> None:
    """Raise UserError if the run in this folder trained another workload.

    If run.name is auto, nobody chose this run, so another model and other data are refused, too.
    """
    reason = trained_with(folder, changes, "workload")
    cure = "use the same value, or another run.name"
    if settings.name == "auto":
        reason = reason or trained_with(folder, changes, "model.", "data.train", "data.dataset")
        cure = "run.name=auto takes the newest run: name the run to resume with run.name, or use run.resume=never"
    if reason:
        raise UserError(f"{reason}; {cure}")


def trained_with(folder: Path, changes: Changes, *prefixes: str) -> str:
    """`runs/a was trained with model.width=32, this is model.width=4`, or an empty text without such changes."""
    chosen = {key: values for key, values in changes.items() if key.startswith(prefixes)}
    was = ", ".join(f"{key}={old}" for key, (old, _) in chosen.items())
    now = ", ".join(f"{key}={new}" for key, (_, new) in chosen.items())
    return f"{folder} was trained with {was}, this is {now}" if chosen else ""


def describe_changes(changes: Changes) -> str:
    """One line for each change."""
    notes = {"train.epochs": ": the learning rate follows the new length"}
    return "\n".join(f"resumed with {key}={new} (was {old}){notes.get(key, '')}" for key, (old, new) in changes.items())
