"""Checkpoints: complete or absent, verified when read, never code (`weights_only=True`).

    <run>/checkpoints/last-000011/
    <run>/checkpoints/last-000012/   model.pt  step.pt (optimizer)  state.json (SHA-256 of the others)
    <run>/checkpoints/best-000008/                                   with train.ema: ema.pt (averaged weights)
                                     model.json  model.safetensors: the model to use (model_files.py)

The number counts the saves of the run. A checkpoint is written to a temporary folder, flushed to disk and renamed, and
nothing is ever written over: a crash at any point leaves the others as they are, and the newest one is that of the
highest number whose checksums hold. torch.load does not notice a flipped bit. No random state is stored: `reseed`
derives it from the seed and the position.
"""

import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from fastgpu.process.files import rename_folder
from fastgpu.process.launch import UserError, warn
from fastgpu.run.model_files import ModelToUse, compare_with, sha256_of, write_model

Kind = Literal["last", "best"]
Direction = Literal["higher", "lower"]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
FORMAT = 2
KEPT: Mapping[Kind, int] = {"last": 2, "best": 1}
"""How many checkpoints of a kind are kept: two of the last ones, in case the newest turns out to be damaged."""
PARTIAL = ".partial-"
"""Beginning of the names of folders that are being written."""
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
    """Write `<run>/checkpoints/<kind>-<number>`, and remove those that it replaces. False if the disk refused.

    state: objects to save the state of, by name. order: the numbers that the order of the rows depends on. to_use: the
    model for model.json and model.safetensors. If the disk refuses, a warning is printed, the previous checkpoints are
    still there, and training can go on.
    """
    folder = run / "checkpoints"
    numbers = [*_numbers(run, "last").values(), *_numbers(run, "best").values()]
    target = folder / f"{kind}-{max(numbers, default=0) + 1:06d}"
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


def remove_partial(run: Path) -> None:
    """Remove what a process that was killed while it saved has left. Call it with the lock of the run."""
    for path in run.glob(f"checkpoints/{PARTIAL}*"):
        shutil.rmtree(path, ignore_errors=True)


def newest_first(run: Path, kind: Kind) -> list[Path]:
    """The checkpoints of a kind, by number: names sort wrongly once a number outgrows its zeros."""
    numbers = _numbers(run, kind)
    return sorted(numbers, key=numbers.__getitem__, reverse=True)


def find_intact(run: Path) -> Path | None:
    """The newest checkpoint of kind "last" that is intact; None if there are none. Call it with the lock of the run.

    Damaged ones are renamed to damaged-last-<number>, so that they count no more. Raises UserError if all are damaged,
    or if the newest one is of another version.
    """
    saved = newest_first(run, "last")
    for path in saved:
        try:
            _, sha256 = _read_state(path)
            for name, digest in sha256.items():
                if sha256_of(path / name) != digest:
                    raise ValueError(f"{name} does not match its checksum")
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            if isinstance(error, UserError):
                raise
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
    path: Path,
    state: Mapping[str, Stateful],
    order: Mapping[str, int],
    device: torch.device,
    *,
    description: Mapping[str, Any] | None = None,
    hint: str = "",
) -> Progress:
    """Load an intact checkpoint into `state`.

    description: what it is to be trained on (see `describe_model`), to be compared with what it was trained on. hint:
    what differs from the run that saved it, for the message if the checkpoint does not fit. Raises UserError if the
    checkpoint belongs to another model, optimizer or classes, or if it was saved inside an epoch with other rows or
    another order of them.
    """
    content, sha256 = _read_state(path)
    progress, saved_order = _checked(content["progress"]), content["order"]
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
    for name, part in state.items():
        if name == "ema" and "ema.pt" not in sha256:
            continue  # train.ema is new
        try:
            values = torch.load(path / f"{name}.pt", map_location=device, weights_only=True)
            part.load_state_dict(values)
        except Exception as error:  # of many kinds
            lines = str(error).replace('", ', '"\n').splitlines()  # torch names every key: the first is enough
            reason = lines[min(1, len(lines) - 1)].strip()
            raise UserError(f"{path}/{name}.pt does not fit: {reason} {hint}".strip()) from None
    return progress


def _checked(values: Mapping[str, Any]) -> Progress:
    """Raises ValueError if a value has another type, or is out of its range."""
    try:
        return TypeAdapter(Progress).validate_json(json.dumps(values))
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{' '.join(map(str, first['loc']))} is {first['input']!r}: {first['msg']}") from None


def _read_state(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The content of state.json, and {file: SHA-256}. Raises ValueError if it is damaged, UserError if it is older."""
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
    _checked(content["progress"])
    return content, content["sha256"]


def digest_of(content: Mapping[str, Any]) -> str:
    """The `digest` of state.json: SHA-256 of its other values, however they are written."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _numbers(run: Path, kind: Kind) -> dict[Path, int]:
    """{checkpoint: its number}. Folders with other names, such as copies that a person made, are left alone."""
    matches = {path: re.fullmatch(rf"{kind}-([0-9]+)", path.name) for path in run.glob(f"checkpoints/{kind}-*")}
    return {path: int(match[1]) for path, match in matches.items() if match}
