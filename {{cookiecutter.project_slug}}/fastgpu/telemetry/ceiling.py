"""What a diagnosis measured, read back by later runs of the same step on the same machine."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "diagnosis.json"
"""Written by diagnose.py to run.folder."""
STEP_KEYS = (
    "workload",
    "data.batch_size",
    "optim.name",
    "optim.accumulation_steps",
    "optim.clip_grad_norm",
    "train.precision",
    "train.compile",
    "train.ema",
    "dist.strategy",
)
"""Keys that decide how long a step takes, besides the settings of the workload."""
FEED_SECTIONS = ("data", "loader")
"""Sections that decide how fast rows are supplied."""


def step_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide how long a step takes. config: {dotted key: value}, without `auto`."""
    return {key: value for key, value in config.items() if key in STEP_KEYS or key.startswith("model.")}


def feed_identity(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that decide how fast rows are supplied."""
    return {key: value for key, value in config.items() if key.partition(".")[0] in FEED_SECTIONS}


def read_ceiling(folder: Path, machine: Mapping[str, Any], config: Mapping[str, Any]) -> float | None:
    """Trained rows per second of the step alone, if it was diagnosed on such a machine with such settings.

    folder: run.folder. machine: see `World.identity`, with `row_bytes`.
    """
    diagnosis = _read_diagnosis(folder, config)
    return diagnosis.get("compute_rows_per_s") if diagnosis.get("machine") == dict(machine) else None


def read_summary(folder: Path, config: Mapping[str, Any]) -> str:
    """The verdict of diagnose.py in one line, if it is about the same step and the same feed; otherwise empty."""
    diagnosis = _read_diagnosis(folder, config)
    return diagnosis.get("summary", "") if diagnosis.get("feed") == _as_json(feed_identity(config)) else ""


def _read_diagnosis(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The diagnosis of the same step; empty if there is none, or if its rounds differed too much."""
    try:
        diagnosis: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        is_same = diagnosis["step"] == _as_json(step_identity(config))
        return diagnosis if is_same and diagnosis["is_conclusive"] else {}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _as_json(values: Mapping[str, Any]) -> Any:
    """The values as they come back from a JSON file: tuples are lists there."""
    return json.loads(json.dumps(values))
