"""Checkpoints: complete or absent, verified when read, never code (`weights_only=True`).

    <run>/checkpoints/last-000000220/
    <run>/checkpoints/last-000000240/   model.pt  step.pt (optimizer)  state.json (SHA-256 of the others)
    <run>/checkpoints/best-000000200/                                    with train.ema: ema.pt (averaged weights)
                                        model.json  model.safetensors: the model to use (model_files.py)

A checkpoint is written to a temporary folder, flushed to disk and renamed, so a crash at any point leaves the previous
one intact. One that is saved again at the same step is called `.last-000000240.replaced` until the new one is in its
place, and is read under that name after a crash in between. torch.load does not notice a flipped bit, hence the
checksums. No random state is stored: `reseed` derives it from the seed and the position.
"""

import hashlib
import json
import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fastgpu.process.files import atomic_replace
from fastgpu.process.launch import UserError, warn
from fastgpu.run.model_files import DESCRIPTION, WEIGHTS, ModelToUse, compare_with, sha256_of, write_model

Kind = Literal["last", "best"]
Direction = Literal["higher", "lower"]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
REPLACED = ".replaced"
"""End of the name of a checkpoint, which is hidden, while another one of the same step takes its place."""
KEEP_LAST = 2
"""How many checkpoints of kind "last" are kept: two, in case the newest turns out to be damaged."""
ORDER_KEYS = {
    "rows": "the number of rows of data.train",
    "global_rows": "data.batch_size",
    "lanes": "the number of canonical ranks (a multiple of 8 and of the ranks, where it divides data.batch_size)",
    "pool_batches": "data.pool_batches",
    "seed": "run.seed",
    "selection": "the blocks, sources, weights or classes of data.train, or the share of data.val",
}
"""{name in state.json: what a person calls it}"""


class HasState(Protocol):
    """What can be saved."""

    def state_dict(self) -> dict[str, Any]: ...


class Stateful(HasState, Protocol):
    """A module, or an `OptimizerState`."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> object: ...


@dataclass
class Progress:
    """The position of a run, as state.json keeps it."""

    __pydantic_config__: ClassVar = ConfigDict(strict=True, extra="forbid")

    epoch: Count = 0
    pool: Count = 0
    """The pool of this epoch that comes next, or is trained on."""
    pool_steps: Count = 0
    """Steps on that pool: of a run that was stopped inside it."""
    step: Count = 0
    """Optimizer steps so far."""
    saved_at: float = 0.0
    """Time in s, as `time.time`, but later than that of any run that was there before, whatever the clock shows."""
    best: float | None = None
    """Best value so far of `metric`. None: no value yet, or none that is a number."""
    metric: str = ""
    """Metric that decides which checkpoint is the best one, such as `val/mse`."""
    direction: Direction = "higher"
    """Which values of `metric` are better."""
    best_epoch: Count = 0
    """Number of epochs that were done when the best one ended; of equal values, the first one counts."""
    val_rows: str = ""
    """Digest of the validation rows, on which `best` was measured."""

    def validate_on(self, val_rows: str) -> bool:
        """Note the validation rows. If they are others than before, which this returns, the best value is forgotten."""
        is_changed = self.val_rows not in ("", val_rows)
        if is_changed:
            self.best = None
        self.val_rows = val_rows
        return is_changed

    def end_epoch(self, metric: str, score: float, direction: Direction) -> None:
        """Advance to the next epoch. If the metric is another one than before, its first value is the best."""
        if self.metric not in ("", metric):
            self.best = None
        self.metric = metric
        self.direction = direction
        self.epoch += 1
        self.pool = 0
        self.pool_steps = 0
        if _cost(score, direction) < _cost(self.best, direction):
            self.best = score
            self.best_epoch = self.epoch


def _cost(score: float | None, direction: Direction) -> float:
    """The value of a metric as a number of which lower ones are better. NaN and no value are infinitely bad."""
    if score is None or math.isnan(score):
        return math.inf
    return -score if direction == "higher" else score


def save(
    run: Path,
    kind: Kind,
    progress: Progress,
    state: Mapping[str, HasState],
    *,
    order: Mapping[str, int],
    to_use: ModelToUse | None = None,
) -> bool:
    """Write `<run>/checkpoints/<kind>-<step>`. False if the disk refused.

    state: objects to save the state of, by name. order: the numbers that the order of the rows depends on. to_use: the
    model for model.json and model.safetensors. If the disk refuses, a warning is printed, the previous checkpoints are
    still there, and training can go on.
    """
    target = _path(run, kind, progress.step)
    partial = target.with_name(f".{kind}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed while it saved
        partial.mkdir(parents=True)
        sha256 = {}
        for name, part in state.items():
            torch.save(part.state_dict(), partial / f"{name}.pt")
            sha256[name] = sha256_of(partial / f"{name}.pt")
        if to_use:
            write_model(partial, to_use)
            sha256 |= {name: sha256_of(partial / name) for name in (DESCRIPTION, WEIGHTS)}
        state_json: dict[str, Any] = {"progress": asdict(progress), "order": dict(order), "sha256": sha256}
        state_json["digest"] = digest_of(state_json)
        (partial / "state.json").write_text(json.dumps(state_json, indent=2))
        replaced = target.with_name(f".{target.name}{REPLACED}")
        if target.exists():  # a run may save a step twice
            shutil.rmtree(replaced, ignore_errors=True)
            target.rename(replaced)
        atomic_replace(partial, target)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(partial, ignore_errors=True)
        warn(f"{target} was not written: {error}. Training goes on")
        return False
    return True


def prune(run: Path, kind: Kind, step: int) -> None:
    """Remove the checkpoints that a new one replaces: all of kind "best", and of kind "last" all but the newest.

    step: that of the new one.
    """
    kept = newest_first(run, "last")[:KEEP_LAST] if kind == "last" else [_path(run, kind, step)]
    for old in {*_numbers(run, kind)} - {*kept}:
        shutil.rmtree(old, ignore_errors=True)


def newest_first(run: Path, kind: Kind) -> list[Path]:
    """The checkpoints of a kind, by number: names sort wrongly once a number outgrows its zeros."""
    numbers = _numbers(run, kind)
    superseded = {path.with_name(f".{path.name}{REPLACED}") for path in numbers}
    return sorted(numbers.keys() - superseded, key=lambda path: numbers[path], reverse=True)


def resume(
    run: Path,
    state: Mapping[str, Stateful],
    order: Mapping[str, int],
    device: torch.device,
    *,
    description: Mapping[str, Any] | None = None,
    hint: str = "",
) -> Progress:
    """Load the newest intact checkpoint of kind "last" into `state`. A fresh Progress if there is none.

    description: what it is to be trained on (see `describe_model`), to be compared with what it was trained on. hint:
    what differs from the run that saved it, for the message if the checkpoint does not fit. Raises UserError if the
    checkpoint belongs to another model, optimizer or classes, if it was saved inside an epoch with other rows or
    another order of them, or if all checkpoints are damaged.
    """
    saved = newest_first(run, "last")
    for path in saved:
        try:
            content = _read_state(path)
            names = [name for name in state if name != "ema" or name in content["sha256"]]  # train.ema may be new
            for name in names:
                if sha256_of(path / f"{name}.pt") != content["sha256"][name]:
                    raise ValueError(f"{name}.pt does not match its checksum")
            if (path / DESCRIPTION).exists() and sha256_of(path / DESCRIPTION) != content["sha256"].get(DESCRIPTION):
                raise ValueError(f"{DESCRIPTION} does not match its checksum")
            progress = _checked(content["progress"])
            saved_order = content["order"]
            loaded = {name: torch.load(path / f"{name}.pt", map_location=device, weights_only=True) for name in names}
        except Exception as error:  # a damaged file can raise anything
            warn(f"checkpoint {path} is damaged ({error}); trying the one before")
            continue
        changed = [
            f"{ORDER_KEYS.get(name, name)} was {saved_order.get(name)}, is {order.get(name)}"
            for name in {**saved_order, **order}
            if saved_order.get(name) != order.get(name)
        ]
        is_inside_epoch = bool(progress.pool or progress.pool_steps)
        if is_inside_epoch and changed:
            raise UserError(
                f"{path} was saved inside an epoch whose order of rows depends on what has changed: "
                f"{'; '.join(changed)}. Resume with the old values, or use another run.name"
            )
        if description:
            compare_with(path, description, is_inside_epoch=is_inside_epoch)
        for name, values in loaded.items():
            try:
                state[name].load_state_dict(values)
            except (RuntimeError, ValueError, KeyError) as error:
                lines = str(error).replace('", ', '"\n').splitlines()  # torch names every key: the first is enough
                reason = lines[min(1, len(lines) - 1)].strip()
                raise UserError(f"{path}/{name}.pt does not fit: {reason} {hint}".strip()) from None
        return progress
    if saved:
        raise UserError(
            f"{run}/checkpoints holds checkpoints, but none is intact; restore one, or use another run.name"
        )
    return Progress()


def _checked(values: Mapping[str, Any]) -> Progress:
    """Raises ValueError if a value has another type, or is out of its range."""
    try:
        return TypeAdapter(Progress).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{' '.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}") from None


def _read_state(path: Path) -> dict[str, Any]:
    """The content of state.json. Raises ValueError if it is damaged.

    Version 0.1.0, whose progress has no `metric`, wrote no digest.
    """
    description: dict[str, Any] = json.loads((path / "state.json").read_text())
    digest = description.pop("digest", None)
    if digest != digest_of(description) and (digest or "metric" in description["progress"]):
        raise ValueError("state.json does not match its digest")
    return description


def digest_of(description: Mapping[str, Any]) -> str:
    """The `digest` of state.json: SHA-256 of its other values, however they are written."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def _path(run: Path, kind: Kind, step: int) -> Path:
    return run / "checkpoints" / f"{kind}-{step:09d}"


def _numbers(run: Path, kind: Kind) -> dict[Path, int]:
    """{checkpoint: its step}, with those that are being replaced.

    Folders with other names, such as copies that a person made, are left alone.
    """
    pattern = rf"{kind}-(\d+)|\.{kind}-(\d+){re.escape(REPLACED)}"
    matches = {path: re.fullmatch(pattern, path.name) for path in run.glob(f"checkpoints/*{kind}-*")}
    return {path: int(match[1] or match[2]) for path, match in matches.items() if match}
