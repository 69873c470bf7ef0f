import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from fastgpu.process.launch import UserError
from fastgpu.telemetry import checkpoint
from fastgpu.telemetry.checkpoint import Progress, resume, save

CPU = torch.device("cpu")
ORDER = {"rows": 10, "seed": 0}


def parts(value: float = 0.0, width: int = 3) -> dict:
    model = nn.Linear(width, 2)
    nn.init.constant_(model.weight, value)
    return {"model": model, "step": torch.optim.AdamW(model.parameters())}


def value_of(state: dict) -> float:
    return state["model"].weight[0, 0].item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_was_saved_is_loaded(tmp_path):
    progress = Progress(epoch=2, consumed=64, step=7, best=98.5)
    assert save(tmp_path, "last", progress, parts(1.5), order=ORDER)
    fresh = parts()
    assert resume(tmp_path, fresh, ORDER, CPU) == progress
    assert value_of(fresh) == 1.5


def test_the_end_of_an_epoch():
    progress = Progress(epoch=3, consumed=640, step=9)
    scores = (1.0, 1.0, 2.0, float("nan"))
    assert [progress.end_epoch(score, "higher") for score in scores] == [True, False, True, False]
    assert progress == Progress(epoch=7, consumed=0, step=9, best=2.0)


def test_lower_values_of_a_metric_may_be_better():
    progress = Progress()
    scores = (1.0, 2.0, 0.5, float("nan"))
    assert [progress.end_epoch(score, "lower") for score in scores] == [True, False, True, False]
    assert progress.best == 0.5


def test_nothing_to_resume_is_a_fresh_start(tmp_path):
    assert resume(tmp_path / "none", parts(), ORDER, CPU) == Progress()


def test_only_the_newest_of_a_kind_stay(tmp_path):
    for step in (9, 10, 999_999_999, 1_000_000_000):
        save(tmp_path, "last", Progress(step=step), parts(step), order=ORDER)
    save(tmp_path, "best", Progress(step=9), parts(), order=ORDER)
    save(tmp_path, "best", Progress(step=12), parts(), order=ORDER)
    assert names(tmp_path) == ["best-000000012", "last-1000000000", "last-999999999"]
    assert resume(tmp_path, parts(), ORDER, CPU).step == 1_000_000_000  # by number, not by name


def test_saving_the_same_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        assert save(tmp_path, "last", Progress(step=3), parts(value), order=ORDER)
    fresh = parts()
    resume(tmp_path, fresh, ORDER, CPU)
    assert value_of(fresh) == 2.0


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


@pytest.mark.parametrize("at", range(12))
def test_killed_at_any_point_of_saving_the_one_before_is_there(tmp_path, monkeypatch, at):
    save(tmp_path, "last", Progress(step=1), parts(1.0), order=ORDER)
    calls = 0

    def deadly(function):
        def call(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls - 1 == at:
                raise Killed
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", deadly(torch.save))
        patch.setattr(Path, "write_text", deadly(Path.write_text))
        patch.setattr(Path, "rename", deadly(Path.rename))
        patch.setattr(os, "fsync", deadly(os.fsync))
        patch.setattr(shutil, "rmtree", deadly(shutil.rmtree))
        with suppress(Killed):
            save(tmp_path, "last", Progress(step=2), parts(2.0), order=ORDER)
    fresh = parts()
    progress = resume(tmp_path, fresh, ORDER, CPU)
    assert (progress.step, value_of(fresh)) in ((1, 1.0), (2, 2.0))
    assert save(tmp_path, "last", Progress(step=3), parts(3.0), order=ORDER)  # and the next save works
    assert names(tmp_path)[-1] == "last-000000003"
    assert len(names(tmp_path)) <= 2


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 704 vs 598")])
def test_a_full_disk_costs_one_checkpoint(tmp_path, monkeypatch, capsys, error):
    save(tmp_path, "last", Progress(step=1), parts(1.0), order=ORDER)

    def full(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert not save(tmp_path, "last", Progress(step=2), parts(2.0), order=ORDER)
    assert "was not written" in capsys.readouterr().out
    assert names(tmp_path) == ["last-000000001"]
    assert save(tmp_path, "last", Progress(step=3), parts(3.0), order=ORDER)


@pytest.mark.parametrize("file", ["model.pt", "step.pt", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_damage_is_found_and_the_one_before_is_taken(tmp_path, capsys, file, damage):
    save(tmp_path, "last", Progress(step=1), parts(1.0), order=ORDER)
    save(tmp_path, "last", Progress(step=2), parts(2.0), order=ORDER)
    path = tmp_path / "checkpoints" / "last-000000002" / file
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    if damage == "flip":
        content[middle] ^= 255
    elif damage == "cut":
        content = content[:middle]
    elif damage == "empty":
        content = bytearray()
    path.write_bytes(content)
    if damage == "remove":
        path.unlink()
    fresh = parts()
    progress = resume(tmp_path, fresh, ORDER, CPU)
    assert (progress.step, value_of(fresh)) == (1, 1.0)
    assert "is damaged" in capsys.readouterr().out


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    save(tmp_path, "last", Progress(step=1), parts(), order=ORDER)
    folder = tmp_path / "checkpoints" / "last-000000001"
    torch.save({"weight": Attack()}, folder / "model.pt")
    state = json.loads((folder / "state.json").read_text())
    state["sha256"]["model"] = checkpoint._sha256(folder / "model.pt")
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match="holds checkpoints, but none is intact"):
        resume(tmp_path, parts(), ORDER, CPU)
    assert "Weights only load failed" in capsys.readouterr().out
    assert not (tmp_path / "ran").exists()


def test_another_model_is_refused(tmp_path):
    save(tmp_path, "last", Progress(step=1), parts(width=3), order=ORDER)
    with pytest.raises(UserError, match="does not fit this model and optimizer: .*size mismatch"):
        resume(tmp_path, parts(width=4), ORDER, CPU)


def test_another_order_of_rows_is_refused_inside_an_epoch_only(tmp_path):
    save(tmp_path, "last", Progress(step=1, consumed=32), parts(), order=ORDER)
    with pytest.raises(
        UserError, match="saved inside an epoch whose order of rows depends on .*'seed': 0.* now .*'seed'"
    ):
        resume(tmp_path, parts(), ORDER | {"seed": 1}, CPU)
    save(tmp_path, "last", Progress(step=2, consumed=0), parts(), order=ORDER)
    assert resume(tmp_path, parts(), ORDER | {"seed": 1}, CPU).step == 2
