"""Checkpoints: complete or absent, verified when read, never code (`weights_only=True`).

    <run>/checkpoints/last-000000220/
    <run>/checkpoints/last-000000240/   model.pt  step.pt (optimizer)  state.json (SHA-256 of the others)
    <run>/checkpoints/best-000000200/                                    with train.ema: ema.pt (averaged weights)
                                        model.json  model.safetensors: the model to use (model_files.py)

A checkpoint is written to a temporary folder, flushed to disk and renamed, so a crash at any point leaves the previous
one intact. torch.load does not notice a flipped bit, hence the checksums. No random state is stored: `reseed` derives
it from the seed and the position.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fastgpu.process.atomic import atomic_replace
from fastgpu.process.launch import UserError, warn
from fastgpu.telemetry.model_files import DESCRIPTION, WEIGHTS, ModelToUse, write_model

Kind = Literal["last", "best"]
KEEP: dict[Kind, int] = {"last": 2, "best": 1}
"""How many checkpoints of each kind are kept: two, in case the newest turns out to be damaged."""


class Stateful(Protocol):
    """A module, or an `OptimizerState`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass
class Progress:
    """The position of a run."""

    epoch: int = 0
    consumed: int = 0
    """Fresh rows that all ranks together have taken from this epoch."""
    step: int = 0
    """Optimizer steps so far."""
    echo: float = 1.0
    """Echo factor of this epoch."""
    best: float | None = None
    """Best value so far of the first metric of the workload."""

    def end_epoch(self, score: float, direction: Literal["higher", "lower"]) -> bool:
        """Advance to the next epoch. Returns whether `score` is the best so far."""
        self.epoch += 1
        self.consumed = 0
        if self.best is None:
            is_best = True
        else:
            is_best = score > self.best if direction == "higher" else score < self.best
        if is_best:
            self.best = score
        return is_best


def save(
    run: Path,
    kind: Kind,
    progress: Progress,
    state: Mapping[str, Stateful],
    *,
    order: Mapping[str, int],
    to_use: ModelToUse | None = None,
) -> bool:
    """Write `<run>/checkpoints/<kind>-<step>` and remove older ones of that kind. False if the disk refused.

    state: objects to save the state of, by name. order: the numbers that the order of the rows depends on. to_use: the
    model for model.json and model.safetensors. If the disk refuses, a warning is printed, the previous checkpoints are
    still there, and training can go on.
    """
    folder = run / "checkpoints"
    target = folder / f"{kind}-{progress.step:09d}"
    partial = folder / f".{kind}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it saved
        partial.mkdir(parents=True)
        sha256 = {}
        for name, part in state.items():
            torch.save(part.state_dict(), partial / f"{name}.pt")
            sha256[name] = _sha256(partial / f"{name}.pt")
        if to_use:
            write_model(partial, to_use)
            sha256 |= {name: _sha256(partial / name) for name in (DESCRIPTION, WEIGHTS)}
        description = {"progress": asdict(progress), "order": dict(order), "sha256": sha256}
        (partial / "state.json").write_text(json.dumps(description, indent=2))
        atomic_replace(partial, target)  # it exists if a resumed run comes to the same step again
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        warn(f"{target} was not written ({error}); is the disk full? Training goes on")
        return False
    for old in _saved(folder, kind)[KEEP[kind] :]:
        shutil.rmtree(old, ignore_errors=True)
    return True


def resume(run: Path, state: Mapping[str, Stateful], order: Mapping[str, int], device: torch.device) -> Progress:
    """Load the newest intact checkpoint of kind "last" into `state`. A fresh Progress if there is none.

    Raises UserError if the checkpoint belongs to another model or optimizer, if it was saved inside an epoch with
    another order of rows, or if all checkpoints are damaged.
    """
    folder = run / "checkpoints"
    saved = _saved(folder, "last")
    for path in saved:
        try:
            description = json.loads((path / "state.json").read_text())
            names = [name for name in state if name != "ema" or name in description["sha256"]]  # train.ema may be new
            for name in names:
                if _sha256(path / f"{name}.pt") != description["sha256"][name]:
                    raise ValueError(f"{name}.pt does not match its checksum")
            progress = Progress(**description["progress"])
            saved_order = description["order"]
            loaded = {name: torch.load(path / f"{name}.pt", map_location=device, weights_only=True) for name in names}
        except Exception as error:  # a damaged file can raise anything
            warn(f"checkpoint {path} is damaged ({error}); trying the one before")
            continue
        if progress.consumed and saved_order != dict(order):
            raise UserError(
                f"{path} was saved inside an epoch whose order of rows depends on {saved_order}, now {dict(order)}; "
                "resume with the same data, data.batch_size, data.canonical_ranks, data.pool_batches and run.seed"
            )
        try:
            for name, values in loaded.items():
                state[name].load_state_dict(values)
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"{path} does not fit this model and optimizer: {' '.join(str(error).split())}") from None
        return progress
    if saved:
        raise UserError(f"{folder} holds checkpoints, but none is intact; restore one, or use another run.name")
    return Progress()


def _saved(folder: Path, kind: str) -> list[Path]:
    """Checkpoints, newest first, by number: names sort wrongly once a number outgrows its zeros."""
    return sorted(folder.glob(f"{kind}-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
