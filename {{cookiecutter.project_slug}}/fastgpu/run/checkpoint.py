"""Checkpoints: complete or absent, verified when read, never code (`weights_only=True`).

    <run>/checkpoints/last-000011/
    <run>/checkpoints/last-000012/   model.pt  optimizer.pt  scaler.pt  state.json (position, SHA-256 of the others)
    <run>/checkpoints/best-000008/                                      with train.ema: ema.pt (averaged weights)
                                     model.json  model.safetensors: the model to use (model_files.py)

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
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from fastgpu.process.files import rename_folder
from fastgpu.process.launch import UserError, warn
from fastgpu.run.folder import PARTIAL
from fastgpu.run.model_files import ModelToUse, sha256_of, write_model

Kind = Literal["last", "best"]
FORMAT = 3
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
    to_use: ModelToUse | None = None,
) -> bool:
    """Write `<run>/checkpoints/<kind>-<number>`, and remove those that it replaces. False if the disk refused.

    state: {name: object with a state_dict}. order: what the order of the rows depends on. to_use: the model for
    model.json and model.safetensors. If the disk refuses, a warning is printed, the previous checkpoints are still
    there, and training can go on.
    """
    folder = run / "checkpoints"
    saved = [*newest_first(run, "last"), *newest_first(run, "best")]
    target = folder / f"{kind}-{1 + max(map(_number, saved), default=0):06d}"
    partial = None
    try:
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=folder))  # a name that nothing else has
        partial.chmod(folder.stat().st_mode & 0o777)
        for name, part in state.items():
            torch.save(part.state_dict(), partial / f"{name}.pt")
        if to_use:
            write_model(partial, to_use)
        content = {
            "format": FORMAT,
            "progress": asdict(progress),
            "order": dict(order),
            "classes": {name: type(part).__name__ for name, part in state.items()},
            "sha256": {path.name: sha256_of(path) for path in sorted(partial.iterdir())},
        }
        (partial / "state.json").write_text(json.dumps({**content, "digest": digest_of(content)}, indent=2))
        rename_folder(partial, target)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
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
        except UserError:
            raise
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            warn(f"checkpoint {path} is damaged ({error}); trying the one before")
            damaged = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(damaged, ignore_errors=True)
            path.rename(damaged)
            continue
        return path
    if saved:
        raise UserError(
            f"{run}/checkpoints holds checkpoints, but none is intact; restore one, or use another run.name"
        )
    return None


def load(
    path: Path, state: Mapping[str, Any], order: Mapping[str, object], device: torch.device, *, changes: str = ""
) -> Progress:
    """Load an intact checkpoint into `state`.

    changes: settings that differ from those of the run that saved it, for messages. Raises UserError if the checkpoint
    belongs to another model or optimizer, or if it was saved inside an epoch with other rows or another order of them.
    """
    content = _read_state(path)
    progress, saved = Progress(**content["progress"]), content["order"]
    changed = ", ".join(name for name in order if saved.get(name) != order[name])
    if changed and (progress.pool or progress.pool_steps):
        raise UserError(
            f"{path} was saved inside an epoch, whose rows would now come in another order ({changed}); resume it with "
            f"the old settings, rows and number of ranks, or use another run.name. {changes}".strip()
        )
    for name, part in state.items():
        if name == "ema" and name not in content["classes"]:  # train.ema is new: the average begins with these weights
            part.module.load_state_dict(state["model"].state_dict())
            continue
        try:
            kind, now = content["classes"][name], type(part).__name__
            if kind != now and isinstance(part, torch.optim.Optimizer):
                raise ValueError(f"it is of {kind}, and optim.name now stands for {now}.")
            part.load_state_dict(torch.load(path / f"{name}.pt", map_location=device, weights_only=True))
        except Exception as error:  # of many kinds
            lines = str(error).replace('", ', '"\n').splitlines()  # torch names every key: the first is enough
            reason = lines[min(1, len(lines) - 1)].strip()
            raise UserError(f"{path}/{name}.pt does not fit: {reason} {changes}".strip()) from None
    return progress


def _read_state(path: Path) -> dict[str, Any]:
    """The content of state.json. Raises ValueError if it is damaged, UserError if it is of another version."""
    content: dict[str, Any] = json.loads((path / "state.json").read_text())
    digest = content.pop("digest", None)
    if digest and digest != digest_of(content):
        raise ValueError("state.json does not match its digest")
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path} has format {content.get('format', 1)} and this version reads {FORMAT}; resume it with the version "
            "that saved it, or use another run.name"
        )
    if not digest:
        raise ValueError("state.json has no digest")
    return content


def digest_of(content: Mapping[str, Any]) -> str:
    """The `digest` of state.json: SHA-256 of its other values, however they are written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def not_finite(state: Mapping[str, Any]) -> set[str]:
    """Names of the tensors with a value that is NaN or infinite."""
    leaves, _ = tree_flatten_with_path({name: part.state_dict() for name, part in state.items()})
    tensors = {keystr(path): leaf for path, leaf in leaves if isinstance(leaf, Tensor) and leaf.numel()}
    floats = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    # The extremes are NaN if one value is; this is many times faster than isfinite of every value.
    return {name for name, tensor in floats.items() if not torch.stack(tensor.aminmax()).isfinite().all()}
