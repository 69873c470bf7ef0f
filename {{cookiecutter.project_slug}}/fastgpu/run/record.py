"""Records of a run: its command and config, the description in model.json, and the settings that ranks compare."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from operator import methodcaller
from pathlib import Path
from typing import Any

import yaml

from fastgpu import TEMPLATE_VERSION
from fastgpu.feed import Splits
from fastgpu.process.files import new_file
from fastgpu.process.launch import STARTED_S, UserError, warn, without_secrets

VERSIONS = {"template": TEMPLATE_VERSION, **{name: version(name) for name in ("torch", "numpy", "h5py")}}


def write_record(folder: Path, config: Mapping[str, Any], gpu: str, best: Sequence[str]) -> Path:
    """Write run.json and config.yaml, a valid --config file; a resumed run adds run-2.json and config-2.yaml.

    Returns the path of run.json. Its `started` is the current time; `started_s` is the start of the process.
    """
    number = 1 + len([*folder.glob("run*.json")])
    suffix = f"-{number}" if number > 1 else ""
    description = {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "started_s": round(STARTED_S, 3),
        "versions": {"python": sys.version, **VERSIONS},
        "gpu": gpu,
        "git_commit": subprocess.getoutput("git describe --always --abbrev=40 --dirty '--exclude=*' 2>/dev/null"),
        "best": list(best),
    }
    path = folder / f"run{suffix}.json"
    write_or_warn(path, json.dumps(description, indent=2))
    write_or_warn(folder / f"config{suffix}.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return path


def note_end(path: Path) -> None:
    """Add `ended_s` to a run.json: the run has ended, and all is saved. Without it, report.py counts time as lost."""
    with suppress(OSError, ValueError):  # the file was not written, or was removed
        description = json.loads(path.read_text(encoding="utf-8")) | {"ended_s": round(time.time(), 3)}
        write_or_warn(path, json.dumps(description, indent=2))


def write_or_warn(path: Path, text: str | None) -> None:
    """Write a file that a run does not need, or remove it (None). If the disk refuses, a warning is printed."""
    try:
        if text is None:
            path.unlink(missing_ok=True)
            return
        with new_file(path, replace=True) as partial:
            partial.write_text(without_secrets(text), encoding="utf-8")
    except (OSError, UserError) as error:
        warn(f"cannot write {path} ({error}); training continues")


def describe_model(
    config: Mapping[str, Any], splits: Splits, card: Mapping[str, Any], fingerprint: Mapping[str, object]
) -> dict[str, Any]:
    """The part of model.json that is known when a run starts.

    config: {dotted key: value}, without `auto`. splits: the rows. card: of the workload. fingerprint: of the loader,
    for a resume inside an epoch.
    """
    train, sets = splits.train, {tag.removeprefix("val/"): rows for tag, rows in splits.val.items()}
    val = next(iter(sets.values()))
    fields = val.fields | train.fields
    described = dict(train.attributes)
    if val.decoding:  # predict.py decodes images as in validation, where their size may differ from training
        fields = train.fields | val.fields
        described["preprocessing"] = val.attributes["preprocessing"]
    fingerprints: object = {name: rows.fingerprint for name, rows in sets.items()}
    n_rows: object = {name: len(rows) for name, rows in sets.items()}
    if "val" in splits.val:  # not several sets by name
        fingerprints, n_rows = val.fingerprint, len(val)
    attributes = json.loads(json.dumps(described | dict(card), default=methodcaller("tolist")))  # arrays become lists
    names = config["data.fields"] | config["data.val_fields"]
    return {
        "format": 1,
        "template_version": TEMPLATE_VERSION,
        "workload": config["workload"],
        "config": dict(config),
        "options": {key.removeprefix("model."): value for key, value in config.items() if key.startswith("model.")},
        "fields": {
            name: {
                "dtype": str(field.dtype),
                "shape": list(field.shape),
                "is_ragged": field.is_ragged,
                "n_items": field.n_items,
                "dataset": names.get(name, name).lstrip("/"),
            }
            for name, field in fields.items()
        },
        "attributes": attributes,
        "order": dict(fingerprint),
        "rows": train.fingerprint,
        "val_rows": fingerprints,
        "n_val_rows": n_rows,
        "batch_size": config["data.batch_size"],
        "precision": config["train.precision"],
    }


def identify_job(config: Mapping[str, object], splits: Splits, fingerprint: Mapping[str, object]) -> dict[str, object]:
    """{name: value} of everything that must be equal on all ranks. config: {dotted key: value}, without `auto`.

    The way rows are read may differ, and so may file names: the rows of the files are compared.
    """
    settings = {
        key: value for key, value in config.items() if not key.startswith(("loader.", "data.tier", "data.cache"))
    }
    sources = {
        "data.train": splits.train,
        **{f"data.{tag.replace('/', '.')}": rows for tag, rows in splits.val.items()},
    }
    rows_of = {name: f"{len(rows):,} rows of fingerprint {rows.fingerprint}" for name, rows in sources.items()}
    settings["data.val"] = ", ".join(splits.val)  # the sets in their order; `rows_of` replaces it for a single set
    return settings | rows_of | {"the versions": VERSIONS, "the order": fingerprint}
