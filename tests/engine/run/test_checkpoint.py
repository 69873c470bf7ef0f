import json
import os
from contextlib import suppress
from dataclasses import asdict
from itertools import count
from math import inf, nan
from pathlib import Path

import pytest
import torch
from harness import write_state
from torch import nn

from fastgpu.process.launch import UserError
from fastgpu.run import checkpoint
from fastgpu.run.checkpoint import Progress, Stateful, find_intact, load, newest_first, remove_partial, save

CPU = torch.device("cpu")
ORDER = {"rows": 10, "seed": 0}


def parts(value: float = 0.0, width: int = 3) -> dict:
    model = nn.Linear(width, 2)
    nn.init.constant_(model.weight, value)
    return {"model": model, "step": torch.optim.AdamW(model.parameters())}


def resume(run: Path, state: dict[str, Stateful], order: dict, device: torch.device, **options) -> Progress:
    """Load the newest intact checkpoint, as a run does."""
    path = find_intact(run)
    return load(path, state, order, device, **options) if path else Progress()


@pytest.fixture
def tmp_path(tmp_path) -> Path:
    """The folder of a run."""
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


def value_of(state: dict) -> float:
    return state["model"].weight[0, 0].item()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_was_saved_is_loaded(tmp_path):
    progress = Progress(epoch=2, pool=64, step=7, best=98.5)
    assert save(tmp_path, "last", progress, parts(1.5), order=ORDER)
    fresh = parts()
    assert resume(tmp_path, fresh, ORDER, CPU) == progress
    assert value_of(fresh) == 1.5


@pytest.mark.parametrize(
    ("direction", "scores", "best"),
    [
        ("higher", [1.0, 1.0, 2.0, nan], [1, 1, 2, 2]),
        ("lower", [1.0, 2.0, 0.5, nan], [1, 1, 0.5, 0.5]),
        ("higher", [nan, 1.0, nan], [None, 1, 1]),
        ("lower", [inf, nan, 1.0], [None, None, 1]),
    ],
)
def test_the_end_of_an_epoch_keeps_the_best_value(direction, scores, best):
    progress = Progress(epoch=3, pool=640, step=9)
    seen = []
    for score in scores:
        progress.end_epoch("val/x", score, direction)
        seen.append(progress.best)
    assert seen == best
    assert (progress.epoch, progress.pool, progress.step) == (3 + len(scores), 0, 9)
    assert progress == Progress(**json.loads(json.dumps(asdict(progress))))  # NaN is not equal to itself: it is None


def test_another_metric_starts_anew():
    progress = Progress()
    progress.end_epoch("val/accuracy", 99.0, "higher")
    progress.end_epoch("val/accuracy", 98.0, "higher")
    progress.end_epoch("val/loss", 2.0, "lower")
    assert (progress.best, progress.best_epoch) == (2.0, 3)


def test_values_on_other_validation_rows_are_not_compared(tmp_path):
    progress = Progress()
    assert not progress.validate_on("easy rows")
    assert not progress.validate_on("easy rows")
    progress.end_epoch("val/x", 0.9, "higher")
    progress.step = 1
    checkpoint.save(tmp_path, "best", progress, parts(), order=ORDER)
    assert progress.validate_on("hard rows")
    assert progress.best is None
    progress.end_epoch("val/x", 0.5, "higher")
    assert (progress.best, progress.best_epoch) == (0.5, 2)


def test_nothing_to_resume_is_a_fresh_start(tmp_path):
    assert resume(tmp_path / "none", parts(), ORDER, CPU) == Progress()


def test_only_the_newest_of_a_kind_stay_and_the_number_counts_saves(tmp_path):
    for step in (9, 9, 10):
        save(tmp_path, "last", Progress(step=step), parts(step), order=ORDER)
    for step in (9, 10):
        save(tmp_path, "best", Progress(step=step), parts(), order=ORDER)
    assert names(tmp_path) == ["best-000005", "last-000002", "last-000003"]
    (tmp_path / "checkpoints/last-000003").rename(tmp_path / "checkpoints/last-1000000")
    save(tmp_path, "last", Progress(step=11), parts(), order=ORDER)
    assert names(tmp_path) == ["best-000005", "last-1000000", "last-1000001"]
    assert resume(tmp_path, parts(), ORDER, CPU).step == 11  # by number, not by name


class Killed(BaseException):
    """Stands for SIGKILL: no handler catches it."""


CALLS = ((torch, "save"), (Path, "write_text"), (Path, "rename"), (Path, "replace"), (os, "fsync"), (os, "rmdir"))


@pytest.mark.parametrize("kind", ["last", "best"])
def test_killed_at_any_point_of_saving_a_complete_checkpoint_is_there(tmp_path, monkeypatch, kind):
    """Every call is once the last one."""
    for at in count():
        run = tmp_path / str(at)
        (run / "checkpoints").mkdir(parents=True)
        save(run, kind, Progress(step=1, best=1.0), parts(1.0), order=ORDER)
        n_calls = 0

        def deadly(function, at=at):
            def call(*arguments, **options):
                nonlocal n_calls
                n_calls += 1
                if n_calls - 1 == at:
                    raise Killed
                return function(*arguments, **options)

            return call

        with monkeypatch.context() as patch:
            for owner, name in CALLS:
                patch.setattr(owner, name, deadly(getattr(owner, name)))
            with suppress(Killed):
                save(run, kind, Progress(step=2, best=2.0), parts(2.0), order=ORDER)
        if kind == "best":
            assert checkpoint._read_state(newest_first(run, "best")[0])[0]["progress"]["best"] in (1.0, 2.0)
        else:
            fresh = parts()
            progress = resume(run, fresh, ORDER, CPU)
            assert (progress.step, value_of(fresh)) in ((1, 1.0), (2, 2.0))
        remove_partial(run)
        for later in (2, 3):  # the next saves work, and nothing is left over
            assert save(run, kind, Progress(step=later, best=9.0 + later), parts(later), order=ORDER)
        assert len(names(run)) == checkpoint.KEPT[kind]
        if n_calls <= at:
            assert at > 8
            return


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("epoch", "1"),
        ("epoch", None),
        ("epoch", True),
        ("step", -1),
        ("step", 1 << 70),
        ("step", 1.5),
        ("pool", -64),
        ("pool_steps", -1),
        ("echo", "nan"),
        ("echo", nan),
        ("echo", inf),
        ("echo", 0.5),
        ("direction", "up"),
        ("made_up", 1),
    ],
)
def test_a_value_out_of_its_range_is_damage_even_with_a_right_digest(tmp_path, capsys, name, value):
    for step in (1, 2):
        save(tmp_path, "last", Progress(step=step), parts(step), order=ORDER)
    path = tmp_path / "checkpoints" / "last-000002" / "state.json"
    state = json.loads(path.read_text())
    state["progress"][name] = value
    write_state(path, state)
    assert resume(tmp_path, parts(), ORDER, CPU).step == 1
    assert f"is damaged ({name} is {value!r}: " in capsys.readouterr().out


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("unexpected pos 704 vs 598")])
def test_a_full_disk_costs_one_checkpoint(tmp_path, monkeypatch, capsys, error):
    save(tmp_path, "last", Progress(step=1), parts(1.0), order=ORDER)

    def full(*_):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert not save(tmp_path, "last", Progress(step=2), parts(2.0), order=ORDER)
    assert "was not written" in capsys.readouterr().out
    assert names(tmp_path) == ["last-000001"]
    assert save(tmp_path, "last", Progress(step=3), parts(3.0), order=ORDER)


@pytest.mark.parametrize("file", ["model.pt", "step.pt", "state.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "remove"])
def test_damage_is_found_and_the_one_before_is_taken(tmp_path, capsys, file, damage):
    save(tmp_path, "last", Progress(step=1), parts(1.0), order=ORDER)
    save(tmp_path, "last", Progress(step=2), parts(2.0), order=ORDER)
    path = tmp_path / "checkpoints" / "last-000002" / file
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


def test_no_flipped_bit_of_the_state_is_accepted(tmp_path, capsys):
    progress = Progress(epoch=2, pool=5, step=44, best=0.5, metric="val/loss")
    save(tmp_path, "last", progress, parts(1.0), order=ORDER)
    path = tmp_path / "checkpoints" / "last-000001" / "state.json"
    content = path.read_bytes()
    for number in range(0, 8 * len(content), 11):
        damaged = bytearray(content)
        damaged[number // 8] ^= 1 << number % 8
        path.write_bytes(damaged)
        with suppress(UserError):  # it has found the damage
            assert resume(tmp_path, parts(), ORDER, CPU) == progress  # only white space has changed
        with suppress(FileNotFoundError):
            (tmp_path / "checkpoints/damaged-last-000001").rename(path.parent)


def test_what_is_damaged_counts_no_more_and_costs_no_intact_one(tmp_path, capsys):
    for step in (1, 2):
        save(tmp_path, "last", Progress(step=step), parts(step), order=ORDER)
    (tmp_path / "checkpoints/last-000002/model.pt").write_bytes(b"damage")
    assert resume(tmp_path, parts(), ORDER, CPU).step == 1
    save(tmp_path, "last", Progress(step=3), parts(3.0), order=ORDER)
    assert names(tmp_path) == ["damaged-last-000002", "last-000001", "last-000002"]
    (tmp_path / "checkpoints/last-000002/model.pt").write_bytes(b"damage")
    assert resume(tmp_path, parts(), ORDER, CPU).step == 1  # the second generation is still there
    assert names(tmp_path) == ["damaged-last-000002", "last-000001"]


def test_a_checkpoint_of_an_older_version_is_refused_by_name(tmp_path):
    save(tmp_path, "last", Progress(step=1), parts(), order=ORDER)
    path = tmp_path / "checkpoints/last-000001/state.json"
    state = json.loads(path.read_text())
    del state["format"]
    write_state(path, state)
    with pytest.raises(
        UserError, match=r"last-000001 has format 1 and this version reads 2; resume it with the version"
    ):
        resume(tmp_path, parts(), ORDER, CPU)
    assert names(tmp_path) == ["last-000001"]


@pytest.mark.parametrize("name", ["last-final", "last-000001.old", "last-000001 (copy)", "last-٣٣٣"])
def test_other_folders_are_left_alone(tmp_path, name):
    stranger = tmp_path / "checkpoints" / name
    stranger.mkdir(parents=True)
    for step in range(1, 5):
        save(tmp_path, "last", Progress(step=step), parts(step), order=ORDER)
    assert resume(tmp_path, parts(), ORDER, CPU).step == 4
    assert stranger.exists()


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    class Attack:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    save(tmp_path, "last", Progress(step=1), parts(), order=ORDER)
    folder = tmp_path / "checkpoints" / "last-000001"
    torch.save({"weight": Attack()}, folder / "model.pt")
    state = json.loads((folder / "state.json").read_text())
    state["sha256"]["model.pt"] = checkpoint.sha256_of(folder / "model.pt")
    write_state(folder / "state.json", state)
    with pytest.raises(UserError, match=r"model.pt does not fit: .*[Ww]eights"):
        resume(tmp_path, parts(), ORDER, CPU)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(4, 2), "size mismatch for weight: .*"),
        (nn.Linear(3, 2, bias=False), 'Unexpected key.s. in state_dict: "bias"[.]'),
        (nn.ModuleDict({f"layer{n}": nn.Linear(3, 2) for n in range(99)}), 'Missing key.s. .*: "layer0.weight"'),
    ],
)
def test_another_model_is_refused_in_one_short_line(tmp_path, model, message):
    save(tmp_path, "last", Progress(step=1), parts(), order=ORDER)
    other = {"model": model, "step": torch.optim.AdamW(model.parameters())}
    with pytest.raises(UserError, match=rf"last-000001/model.pt does not fit: {message} see there$") as error:
        resume(tmp_path, other, ORDER, CPU, hint="see there")
    assert len(str(error.value)) - len(str(tmp_path)) < 250


def test_another_optimizer_is_refused_in_one_short_line(tmp_path):
    save(tmp_path, "last", Progress(step=1), parts(), order=ORDER)
    other = parts()
    other["step"] = torch.optim.AdamW([{"params": [weight]} for weight in other["model"].parameters()])
    with pytest.raises(UserError, match="step.pt does not fit: loaded state dict has a different number of param"):
        resume(tmp_path, other, ORDER, CPU)


def test_a_part_that_only_the_resumed_run_has_begins_anew(tmp_path):
    """train.ema may be switched on, and off, when a run is resumed."""
    save(tmp_path, "last", Progress(step=1), parts(1.5), order=ORDER)
    fresh = parts()
    averaged = nn.Linear(3, 2)
    before = averaged.weight.clone()
    assert resume(tmp_path, fresh | {"ema": averaged}, ORDER, CPU).step == 1
    assert value_of(fresh) == 1.5
    assert torch.equal(averaged.weight, before)


def test_another_order_of_rows_is_refused_inside_an_epoch_only(tmp_path):
    save(tmp_path, "last", Progress(step=1, pool=32), parts(), order=ORDER)
    changed = ORDER | {"seed": 1, "weights": 3}
    message = "order of rows depends on what has changed: run.seed was 0, is 1; weights was None, is 3. Resume with"
    with pytest.raises(UserError, match=message):
        resume(tmp_path, parts(), changed, CPU)
    save(tmp_path, "last", Progress(step=2, pool=0), parts(), order=ORDER)
    assert resume(tmp_path, parts(), changed, CPU).step == 2
