import json
import os
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from harness import CPU, write_state
from safetensors import SafetensorError
from torch import nn

from fastgpu.process.config import Run
from fastgpu.process.launch import UserError
from fastgpu.run import checkpoint
from fastgpu.run.checkpoint import Progress, find_intact, load, newest_first, save
from fastgpu.run.run import lock_folder
from fastgpu.training.average import AveragedModel

ORDER = {"rows": 10, "seed": 0}
CARD = {"order": ORDER}


def parts(value: float = 0.0, model: nn.Module | None = None, kind: type = torch.optim.AdamW) -> dict[str, Any]:
    """A model with this value in each weight, and its optimizer."""
    model = model or nn.Linear(3, 2)
    for weight in model.parameters():
        nn.init.constant_(weight, value)
    return {"model": model, "optimizer": kind([{"params": [*model.parameters()]}])}


def write(run: Path, kind: checkpoint.Kind, step: int) -> bool:
    """Save a checkpoint whose weights are the number of its step."""
    return save(run, kind, Progress(step=step), parts(step), card=CARD)


def resume(run: Path, state: dict[str, Any] | None = None, order: dict[str, Any] = ORDER) -> Progress:
    """Load the newest intact checkpoint, as a run does."""
    path = find_intact(run)
    return load(path, state or parts(), order, CPU) if path else Progress()


@pytest.fixture
def run(tmp_path) -> Path:
    """The folder of a run."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def value_of(state: dict[str, Any]) -> float:
    return state["model"].weight[0, 0].item()


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


# ---------------------------------------------------------------------------------------------- saving


def test_only_the_newest_of_a_kind_stay_and_the_number_counts_saves(run):
    for kind, step in (("last", 9), ("last", 9), ("last", 10), ("best", 9), ("best", 10)):
        write(run, kind, step)
    assert names(run) == ["best-000005", "last-000002", "last-000003"]
    (run / "checkpoints/last-000003").rename(run / "checkpoints/last-999999")
    write(run, "last", 11)
    assert names(run) == ["best-000005", "last-1000000", "last-999999"]
    assert resume(run).step == 11  # by number, not by name


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


CALLS = ((torch, "save"), (Path, "write_text"), (Path, "rename"), (Path, "replace"), (os, "fsync"), (os, "rmdir"))


@pytest.mark.parametrize("kind", ["last", "best"])
def test_killed_at_any_point_of_saving_a_complete_checkpoint_is_there(tmp_path, monkeypatch, kind):
    """Every call is once the last one."""
    for at in count():
        run = tmp_path / str(at)
        (run / "checkpoints").mkdir(parents=True)
        write(run, kind, 1)
        calls = Mock(side_effect=[None] * at + [Killed] + [None] * 99)

        def deadly(function, calls=calls):
            return lambda *arguments, **options: (calls(), function(*arguments, **options))[1]

        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                patch.setattr(owner, name, deadly(getattr(owner, name)))
            with suppress(Killed):
                write(run, kind, 2)
        fresh = parts()
        step = load(newest_first(run, kind)[0], fresh, ORDER, CPU).step
        assert (step, value_of(fresh)) in ((1, 1.0), (2, 2.0))
        lock_folder(Run(folder=str(tmp_path), name=run.name, resume="auto"))[1].close()  # as the next start does
        for later in (2, 3):  # the next saves work, and nothing is left over
            assert write(run, kind, later)
        assert len(names(run)) == checkpoint.KEPT[kind]
        if calls.call_count <= at:
            assert at > 8
            return


@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (torch, "save", RuntimeError("unexpected pos 704 vs 598")),
        (checkpoint, "save_model", SafetensorError("No space left on device")),
        (tempfile, "mkdtemp", OSError(30, "Read-only file system")),
    ],
)
def test_a_full_disk_costs_one_checkpoint(run, monkeypatch, capsys, owner, name, error):
    write(run, "last", 1)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Mock(side_effect=error))
        assert not write(run, "last", 2)
    assert "last-000002 was not written: " in capsys.readouterr().out
    assert names(run) == ["last-000001"]
    assert write(run, "last", 3)
    assert names(run) == ["last-000001", "last-000002"]


def test_other_folders_are_left_alone(run):
    others = {"last-final", "last-000001.old", "last-000001 (copy)", "last-٣٣٣"}
    for name in others:
        (run / "checkpoints" / name).mkdir()
    for step in range(1, 5):
        write(run, "last", step)
    assert resume(run).step == 4
    assert others < {*names(run)}


# ---------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize("file", ["model.pt", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "nested", "remove"])
def test_damage_is_found_and_the_one_before_is_taken_and_kept(run, capsys, file, damage):
    for step in (1, 2):
        write(run, "last", step)
    path = run / "checkpoints/last-000002" / file
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle] ^= 255
    path.write_bytes({"flip": content, "cut": content[:middle], "nested": b"[" * 99_999}.get(damage, b""))
    if damage == "remove":
        path.unlink()
    fresh = parts()
    assert (resume(run, fresh).step, value_of(fresh)) == (1, 1.0)
    assert "is damaged" in capsys.readouterr().out
    write(run, "last", 3)
    assert names(run) == ["damaged-last-000002", "last-000001", "last-000002"]


def test_no_flipped_bit_of_the_state_is_accepted(run, capsys):
    progress = Progress(epoch=2, pool=5, step=44, best=0.5, metric="val/loss")
    save(run, "last", progress, parts(1.0), card=CARD)
    path = run / "checkpoints/last-000001/state.json"
    content = path.read_bytes()
    for number in range(0, 8 * len(content), 11):
        damaged = bytearray(content)
        damaged[number // 8] ^= 1 << number % 8
        path.write_bytes(damaged)
        with suppress(UserError):  # it has found the damage
            assert resume(run) == progress  # only white space has changed
        with suppress(FileNotFoundError):
            (run / "checkpoints/damaged-last-000001").rename(path.parent)


@pytest.mark.parametrize("content", [{}, {"format": 2}])  # version 0.1.0 wrote no format
def test_a_checkpoint_of_another_version_is_refused_by_name(run, content):
    write(run, "last", 1)
    (run / "checkpoints/last-000001/state.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"last-000001 is of another version: resume it with that version"):
        resume(run)
    assert names(run) == ["last-000001"]


def test_code_in_a_checkpoint_is_not_run(run):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (run / "ran",))

    write(run, "last", 1)
    path = run / "checkpoints/last-000001/model.pt"
    torch.save({"weight": Attack()}, path)
    state = path.with_name("state.json")
    write_state(state, json.loads(state.read_text()) | {"sha256": {"model.pt": checkpoint.sha256_of(path)}})
    with pytest.raises(UserError, match=r"model.pt does not fit: .*[Ww]eights"):
        resume(run)
    assert not (run / "ran").exists()


# ---------------------------------------------------------------------------------------------- another run


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (parts(model=nn.Linear(4, 2)), "model.pt does not fit: .*size mismatch for weight: .*"),
        (parts(model=nn.ModuleList([nn.Linear(3, 2)] * 99)), 'model.pt does not fit: .*Missing .*: "0.weight".*'),
        (
            parts() | {"optimizer": torch.optim.AdamW([torch.zeros(2)])},
            "optimizer.pt does not fit: .*",
        ),
        (parts(kind=torch.optim.SGD), "optimizer.pt does not fit: it is of AdamW"),
        (parts() | {"ema": AveragedModel(nn.Linear(3, 2), 0.9)}, "ema.pt does not fit: .*No such file.*"),
    ],
)
def test_another_model_or_optimizer_is_refused_in_one_short_line(run, state, message):
    write(run, "last", 1)
    with pytest.raises(UserError, match=rf"last-000001/{message}$") as error:
        resume(run, state)
    assert len(str(error.value)) - len(str(run)) < 300


def test_another_order_of_rows_is_refused_inside_an_epoch_only(run):
    save(run, "last", Progress(step=1, pool=32), parts(), card=CARD)
    changed = ORDER | {"seed": 1, "content": "b"}
    with pytest.raises(UserError, match=r"inside an epoch, in which .* cannot change \(seed, content\)$"):
        resume(run, order=changed)
    write(run, "last", 2)
    assert resume(run, order=changed).step == 2
