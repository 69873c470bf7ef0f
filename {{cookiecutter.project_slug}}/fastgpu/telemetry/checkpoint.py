"""Checkpoints: whole or absent, verified when read, never code (`weights_only=True`).

    <run>/checkpoints/last-000000220/
    <run>/checkpoints/last-000000240/   model.pt  step.pt (optimizer)  state.json (SHA-256 of the others)
    <run>/checkpoints/best-000000200/

A checkpoint is written to a temporary folder, flushed to the disk and renamed, so a crash at any point leaves the
one before. torch.load does not notice a flipped bit, hence the checksums. No random state is kept: `World.reseed`
derives it.
"""

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fastgpu.process.atomic import put_in_place
from fastgpu.process.launch import UserError

Kind = Literal["last", "best"]
KEEP = {"last": 2, "best": 1}  # two, in case the newest turns out to be damaged


class Stateful(Protocol):
    """A module, or `optim.Step`."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


@dataclass
class Progress:
    """Where a run stands."""

    epoch: int = 0
    consumed: int = 0
    """Fresh rows that all ranks together have taken in this epoch."""
    step: int = 0
    """Optimizer steps so far."""
    echo: float = 1.0
    """Factor of this epoch where data.echo is auto."""
    best: float | None = None
    """Highest value of the workload's `best` metric."""

    def end_epoch(self, score: float) -> bool:
        """Go on to the next epoch; whether `score` is the best so far."""
        self.epoch, self.consumed = self.epoch + 1, 0
        is_best = self.best is None or score > self.best
        self.best = score if is_best else self.best
        return is_best


def save(run: Path, kind: Kind, progress: Progress, parts: Mapping[str, Stateful], order: Mapping[str, int]) -> bool:
    """Write `<run>/checkpoints/<kind>-<step>`, then remove older ones of that kind; False if the disk refused.

    parts: what to save the state of, by name. order: numbers that the order of rows depends on. A refusal is printed;
    the checkpoints from before are then still there, and training can go on.
    """
    folder = run / "checkpoints"
    target, partial = folder / f"{kind}-{progress.step:09d}", folder / f".{kind}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it saved
        partial.mkdir(parents=True)
        sha256 = {}
        for name, part in parts.items():
            torch.save(part.state_dict(), partial / f"{name}.pt")
            sha256[name] = _sha256(partial / f"{name}.pt")
        state = {"progress": asdict(progress), "order": dict(order), "sha256": sha256}
        (partial / "state.json").write_text(json.dumps(state, indent=2))
        put_in_place(partial, target)  # which exists if a resumed run comes to the same step again
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        print(f"warning: {target} was not written ({error}); is the disk full? Training goes on", flush=True)
        return False
    for old in _saved(folder, kind)[KEEP[kind] :]:
        shutil.rmtree(old, ignore_errors=True)
    return True


def resume(run: Path, parts: Mapping[str, Stateful], order: Mapping[str, int], device: torch.device) -> Progress:
    """Load the newest whole checkpoint of kind "last" into `parts`; a fresh Progress if there is none.

    Raises UserError if it belongs to another model or optimizer, or was saved inside an epoch of another order of rows,
    or if all are damaged.
    """
    folder = run / "checkpoints"
    for path in _saved(folder, "last"):
        try:
            state = json.loads((path / "state.json").read_text())
            for name in parts:
                if _sha256(path / f"{name}.pt") != state["sha256"][name]:
                    raise ValueError(f"{name}.pt does not match its checksum")
            progress, saved_order = Progress(**state["progress"]), state["order"]
            loaded = {name: torch.load(path / f"{name}.pt", map_location=device, weights_only=True) for name in parts}
        except Exception as error:  # a damaged file can raise anything
            print(f"warning: checkpoint {path} is damaged ({error}); trying the one before", flush=True)
            continue
        if progress.consumed and saved_order != dict(order):
            raise UserError(
                f"{path} was saved inside an epoch whose order of rows depends on {saved_order}, now {dict(order)}; "
                "resume with the same data, batch_rows, lanes, pool_batches and seed"
            )
        try:
            for name, part in parts.items():
                part.load_state_dict(loaded[name])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(f"{path} does not fit this model and optimizer: {' '.join(str(error).split())}") from None
        return progress
    if _saved(folder, "last"):
        raise UserError(f"{folder} holds checkpoints, but none is whole; restore one, or start under another run.name")
    return Progress()


def _saved(folder: Path, kind: str) -> list[Path]:
    """Newest first, by number: names sort wrongly once a number outgrows its zeros."""
    return sorted(folder.glob(f"{kind}-*"), key=lambda path: int(path.name.rpartition("-")[2]), reverse=True)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
