"""Checkpoints: complete or absent, verified when read, never code (`weights_only=True`).

    <run>/checkpoints/last-000011/
    <run>/checkpoints/last-000012/   model.pt  optimizer.pt  scaler.pt  state.json (position, SHA-256 of the others)
    <run>/checkpoints/best-000008/                                      with train.ema: ema.pt (averaged weights)
                                     model.json  model.safetensors: the model to use, without the training data

The number counts the saves of the run. A checkpoint is written to a temporary folder, flushed to disk and renamed, and
nothing is ever written over: a crash leaves the others as they are, and the newest one is that of the highest number
whose checksums hold. No random state is stored: `reseed` derives it from the seed and the position.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastgpu.process.files import rename_folder
from fastgpu.process.launch import UserError, warn

Kind = Literal["last", "best"]
FORMAT = 4
DESCRIPTION = "model.json"
WEIGHTS = "model.safetensors"
PARTIAL = ".partial-"
"""Beginning of the names of folders that are being written."""
KEPT: Mapping[Kind, int] = {"last": 2, "best": 1}
"""How many checkpoints of a kind are kept: two of the last ones, in case the newest turns out to be damaged."""


@dataclass
class Progress:
    """The position of a run, as state.json keeps it: epochs that are done, pools of the next one, steps on its next
    pool, and optimizer steps so far."""

    epoch: int = 0
    pool: int = 0
    pool_steps: int = 0
    step: int = 0
    best: float | None = None
    """Best value so far of the metric. None: no value yet, or none that is a number."""
    best_epoch: int = 0
    """Number of epochs that were done when the best one ended; of equal values, the first one counts."""
    metric: str = ""
    """The metric and the digest of the validation rows that `best` belongs to."""


def save(run: Path, kind: Kind, progress: Progress, state: Mapping[str, Any], *, card: Mapping[str, Any]) -> bool:
    """Write `<run>/checkpoints/<kind>-<number>`, and remove those that it replaces. False if the disk refused.

    state: {name: object with a state_dict}; the average "ema", or else "model", is the model to use. card: the
    content of model.json; its `order` is what the order of the rows depends on.
    """
    saved = [*newest_first(run, "last"), *newest_first(run, "best")]
    number = 1 + max((int(path.name.partition("-")[2]) for path in saved), default=0)
    target = run / f"checkpoints/{kind}-{number:06d}"
    try:
        with TemporaryDirectory(prefix=PARTIAL, dir=target.parent, ignore_cleanup_errors=True) as temporary:
            partial = Path(temporary)
            partial.chmod(target.parent.stat().st_mode & 0o777)
            for name, part in state.items():
                torch.save(part.state_dict(), partial / f"{name}.pt")
            (partial / DESCRIPTION).write_text(json.dumps(card, indent=1), encoding="utf-8")
            save_model(state["ema"].module if "ema" in state else state["model"], str(partial / WEIGHTS))
            (partial / WEIGHTS).chmod((partial / DESCRIPTION).stat().st_mode)  # safetensors lets nobody else read it
            content = {
                "format": FORMAT,
                "progress": asdict(progress),
                "order": card["order"],
                "classes": {name: type(part).__name__ for name, part in state.items()},
                "sha256": {path.name: sha256_of(path) for path in sorted(partial.iterdir())},
            }
            (partial / "state.json").write_text(json.dumps({**content, "digest": digest_of(content)}, indent=2))
            rename_folder(partial, target)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save reports a full disk as RuntimeError
        warn(f"{target} was not written: {error}. Training goes on")
        return False
    for old in newest_first(run, kind)[KEPT[kind] :]:
        shutil.rmtree(old, ignore_errors=True)
    return True


def newest_first(run: Path, kind: Kind) -> list[Path]:
    """The checkpoints of a kind, by number. Other folders, such as copies that a person made, are left alone."""
    paths = [path for path in run.glob(f"checkpoints/{kind}-*") if re.fullmatch("[a-z]+-[0-9]+", path.name)]
    return sorted(paths, key=lambda path: (len(path.name), path.name), reverse=True)


def find_intact(run: Path) -> Path | None:
    """The newest checkpoint of kind "last" that is intact; None if there are none. Call it with the lock of the run.

    Damaged ones are renamed to damaged-last-<number>. Raises UserError if all are, or if one is of another version.
    """
    saved = newest_first(run, "last")
    for path in saved:
        try:
            for name, digest in _read_state(path)["sha256"].items():
                if sha256_of(path / name) != digest:
                    raise ValueError(f"{name} does not match its checksum")
            return path
        except UserError:
            raise
        except Exception as error:  # of many kinds: whatever the bytes have become
            warn(f"checkpoint {path} is damaged ({error}); trying the one before")
            damaged = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(damaged, ignore_errors=True)
            path.rename(damaged)
    if saved:
        raise UserError(f"{run}: none of its checkpoints is intact; restore one, or use another run.name")
    return None


def load(path: Path, state: Mapping[str, Any], order: Mapping[str, object], device: torch.device) -> Progress:
    """Load an intact checkpoint into `state`. Raises UserError if it is of another model or optimizer, or if it was
    saved inside an epoch with other rows or another order of them."""
    content = _read_state(path)
    progress, saved = Progress(**content["progress"]), content["order"]
    changed = ", ".join(name for name in order if saved.get(name) != order[name])
    if changed and (progress.pool or progress.pool_steps):
        raise UserError(f"{path} was saved inside an epoch, in which rows, order and ranks cannot change ({changed})")
    for name, part in state.items():
        try:
            kind = content["classes"].get(name)
            if isinstance(part, torch.optim.Optimizer) and kind != type(part).__name__:
                raise ValueError(f"it is of {kind}")
            part.load_state_dict(torch.load(path / f"{name}.pt", map_location=device, weights_only=True))
        except Exception as error:  # of many kinds; torch names every key in many lines
            raise UserError(f"{path}/{name}.pt does not fit: {' '.join(str(error).split())[:200]}") from None
    return progress


def _read_state(path: Path) -> dict[str, Any]:
    """The content of state.json. Raises an error if it is damaged, UserError if it is of another version."""
    content: dict[str, Any] = json.loads((path / "state.json").read_text())
    if content.get("format") != FORMAT:
        raise UserError(f"{path} is of another version: resume it with that version, or use another run.name")
    if content.pop("digest") != digest_of(content):
        raise ValueError("state.json does not match its digest")
    return content


def digest_of(content: Mapping[str, Any]) -> str:
    """The `digest` of state.json: SHA-256 of its other values, however they are written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as state.json has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def not_finite(state: Mapping[str, Any]) -> set[str]:
    """Names of the tensors with a value that is NaN or infinite."""
    leaves, _ = tree_flatten_with_path({name: part.state_dict() for name, part in state.items()})
    floats = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()}
    # The extremes are NaN if one value is; this is many times faster than isfinite of every value.
    return {name for name, each in floats.items() if each.numel() and not torch.stack(each.aminmax()).isfinite().all()}
