"""Checkpoints: complete or absent, verified when read, never code (`weights_only=True`).

    <run>/checkpoints/last-000011/
    <run>/checkpoints/last-000012/   model.pt  optimizer.pt  scaler.pt  state.json (position, SHA-256 of the others)
    <run>/checkpoints/best-000008/                                      with train.ema: ema.pt (averaged weights)
                                     model.json  model.safetensors: the model to use, without the training data

The number counts the saves of the run. A checkpoint is written to a temporary folder, flushed to disk and renamed, and
nothing is ever written over: a crash at any point leaves the others as they are, and the newest one is that of the
highest number whose checksums hold. torch.load does not notice a flipped bit. No random state is stored: `reseed`
derives it from the seed and the position.
"""

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_model
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastgpu.process.files import rename_folder
from fastgpu.process.launch import UserError, warn

Kind = Literal["last", "best"]
FORMAT = 3
DESCRIPTION = "model.json"
WEIGHTS = "model.safetensors"
PARTIAL = ".partial-"
"""Beginning of the names of folders that are being written."""
KEPT: Mapping[Kind, int] = {"last": 2, "best": 1}
"""How many checkpoints of a kind are kept: two of the last ones, in case the newest turns out to be damaged."""


@dataclass
class Progress:
    """The position of a run, as state.json keeps it."""

    epoch: int = 0
    pool: int = 0
    """The pool of this epoch that comes next, or is trained on."""
    pool_steps: int = 0
    """Steps on that pool: of a run that was stopped inside it."""
    step: int = 0
    """Optimizer steps so far."""
    best: float | None = None
    """Best value so far of the metric. None: no value yet, or none that is a number."""
    best_epoch: int = 0
    """Number of epochs that were done when the best one ended; of equal values, the first one counts."""
    metric: str = ""
    """The metric and the digest of the validation rows that `best` belongs to."""

    def end_epoch(self, score: float, direction: str, metric: str) -> None:
        """Go on to the next epoch.

        direction: `higher` or `lower`, which values are better. metric: if it is another one than before, the value so
        far is forgotten.
        """
        self.epoch += 1
        self.pool = 0
        self.pool_steps = 0
        if self.metric != metric:
            self.metric = metric
            self.best = None
        sign = 1 if direction == "higher" else -1
        if isfinite(score) and (self.best is None or sign * score > sign * self.best):
            self.best = score
            self.best_epoch = self.epoch


def save(
    run: Path,
    kind: Kind,
    progress: Progress,
    state: Mapping[str, Any],
    *,
    order: Mapping[str, object],
    card: Mapping[str, Any],
) -> bool:
    """Write `<run>/checkpoints/<kind>-<number>`, and remove those that it replaces. False if the disk refused.

    state: {name: object with a state_dict}; the average "ema", or else "model", is the model to use. order: what the
    order of the rows depends on. card: the content of model.json. If the disk refuses, a warning is printed, the
    previous checkpoints are still there, and training can go on.
    """
    saved = [*newest_first(run, "last"), *newest_first(run, "best")]
    target = run / f"checkpoints/{kind}-{1 + max(map(_number, saved), default=0):06d}"
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=target.parent))  # a name that nothing else has
        partial.chmod(target.parent.stat().st_mode & 0o777)
        for name, part in state.items():
            torch.save(part.state_dict(), partial / f"{name}.pt")
        (partial / DESCRIPTION).write_text(json.dumps(card, indent=1), encoding="utf-8")
        save_model(state["ema"].module if "ema" in state else state["model"], str(partial / WEIGHTS))
        (partial / WEIGHTS).chmod((partial / DESCRIPTION).stat().st_mode)  # safetensors lets nobody else read it
        content = {
            "format": FORMAT,
            "progress": asdict(progress),
            "order": dict(order),
            "classes": {name: type(part).__name__ for name, part in state.items()},
            "sha256": {path.name: sha256_of(path) for path in sorted(partial.iterdir())},
        }
        (partial / "state.json").write_text(json.dumps({**content, "digest": digest_of(content)}, indent=2))
        rename_folder(partial, target)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch.save reports a full disk as RuntimeError
        if partial:
            shutil.rmtree(partial, ignore_errors=True)
        warn(f"{target} was not written: {error}. Training goes on")
        return False
    for old in newest_first(run, kind)[KEPT[kind] :]:
        shutil.rmtree(old, ignore_errors=True)
    return True


def newest_first(run: Path, kind: Kind) -> list[Path]:
    """The checkpoints of a kind, by number. Other folders, such as copies that a person made, are left alone."""
    paths = [path for path in run.glob(f"checkpoints/{kind}-*") if re.fullmatch(rf"{kind}-[0-9]+", path.name)]
    return sorted(paths, key=_number, reverse=True)


def _number(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def find_intact(run: Path) -> Path | None:
    """The newest checkpoint of kind "last" that is intact; None if there are none. Call it with the lock of the run.

    Damaged ones are renamed to damaged-last-<number>, so that they count no more. Raises UserError if all are damaged,
    or if the newest one is of another version.
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
        raise UserError(
            f"{run}/checkpoints holds checkpoints, but none is intact; restore one, or use another run.name"
        )
    return None


def load(path: Path, state: Mapping[str, Any], order: Mapping[str, object], device: torch.device) -> Progress:
    """Load an intact checkpoint into `state`.

    Raises UserError if it belongs to another model or optimizer, or if it was saved inside an epoch with other rows or
    another order of them.
    """
    content = _read_state(path)
    progress, saved = Progress(**content["progress"]), content["order"]
    changed = ", ".join(name for name in order if saved.get(name) != order[name])
    if changed and (progress.pool or progress.pool_steps):
        raise UserError(
            f"{path} was saved inside an epoch, whose rows would now come in another order ({changed}); resume it with "
            "the old settings, rows and number of ranks, or use another run.name"
        )
    for name, part in state.items():
        try:
            kind, now = content["classes"].get(name), type(part).__name__
            if kind != now and isinstance(part, torch.optim.Optimizer):
                raise ValueError(f"it is of {kind}, and optim.name now stands for {now}.")
            part.load_state_dict(torch.load(path / f"{name}.pt", map_location=device, weights_only=True))
        except Exception as error:  # of many kinds
            lines = str(error).replace('", ', '"\n').splitlines()  # torch names every key: the first is enough
            reason = lines[min(1, len(lines) - 1)].strip()
            raise UserError(f"{path}/{name}.pt does not fit: {reason}") from None
    return progress


def _read_state(path: Path) -> dict[str, Any]:
    """The content of state.json. Raises an error if it is damaged, UserError if it is of another version."""
    content: dict[str, Any] = json.loads((path / "state.json").read_text())
    digest = content.pop("digest", None)
    if "format" in content and digest != digest_of(content):  # version 0.1.0 wrote neither of them
        raise ValueError("state.json does not match its digest")
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {content.get('format', 1)} and this version reads {FORMAT}; resume it with the version "
            "that saved it, or use another run.name"
        )
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
    tensors = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()}
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # The extremes are NaN if one value is; this is many times faster than isfinite of every value.
    return {name for name, tensor in floats.items() if not torch.stack(tensor.aminmax()).isfinite().all()}
