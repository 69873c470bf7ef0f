import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Iterator
from math import inf, isnan, nan
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from fastgpu.feed import Splits
from fastgpu.process import files
from fastgpu.process.config import RunConfig, Train
from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.run import checkpoint
from fastgpu.run import run as run_module
from fastgpu.run.record import describe_model, write_or_warn
from fastgpu.run.run import Run, lock_folder, name_best
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.training.average import AveragedModel
from fastgpu.training.step import prepare_optimizer
from support.ranks import ALONE, CPU, fork, in_world
from support.runs import SHORT_CONFIG, SHORT_ORDER, SHORT_SOURCE, SHORT_STEPS, at_call, newest, step_of


def started_run(
    folder: Path,
    model: nn.Module | None = None,
    *,
    best: tuple[str, str] = ("score", "higher"),
    state: dict[str, Any] | None = None,
    splits: Splits = Splits(SHORT_SOURCE, {"val": SHORT_SOURCE}),  # noqa: B008 (immutable)
    world: World = ALONE,
    **settings: Any,
) -> Run:
    """A run of this process. settings: of the sections `run` and `train`. state: more than the model."""
    of_train = {name: settings.pop(name) for name in settings.keys() & Train.model_fields.keys()}
    cfg = SHORT_CONFIG.resolved(run={"folder": str(folder), "name": "a", **settings}, train=of_train)
    card = describe_model(cfg.flat(), splits, {"classes": ["a", "b"]}, SHORT_ORDER.fingerprint)
    state = {"model": model or nn.Linear(2, 2), **(state or {})}
    return Run(cfg.run, world, state, card, values=cfg.model_dump(), best=best)


def train_epoch(run: Run, *, loss: float = 0.5, score: float = 1.0, save_every: int = 0) -> None:
    """Four steps, and the end of an epoch."""
    at = run.progress
    for _ in range(SHORT_STEPS):
        at.advance(SHORT_STEPS)
        run.should_stop()
        if save_every and at.step % save_every == 0:
            run.save()
    run.save({"val/score": score, "val/loss": loss})
    run.wait_for_save()


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("checkpoints/*"))


def locked(folder: Path, name: str = "auto", resume: str = "never") -> Path:
    """The folder that a run takes and gives back."""
    path, lock = lock_folder(RunConfig(folder=str(folder), name=name, resume=resume))
    lock.close()
    return path


def make_run(path: Path) -> Path:
    (path / "checkpoints/last-000001").mkdir(parents=True)
    return path


def test_run_new_has_a_name_of_its_own(tmp_path, monkeypatch):
    assert len({locked(tmp_path) for _ in range(3)}) == 3
    assert all(re.fullmatch(r"20\d{6}-\d{6}-\d{6}", path.name) for path in tmp_path.iterdir())
    make_run(tmp_path / "other")
    with pytest.raises(UserError, match="run.name: .*other holds a run; run.resume=auto continues it"):
        locked(tmp_path, "other")
    # another process may begin, and end, while this one waits for its disk
    monkeypatch.setattr(run_module, "FolderLock", lambda path: FolderLock(make_run(path)))
    with pytest.raises(UserError, match="run.name: .*late holds a run"):
        locked(tmp_path, "late")


def test_run_resumed_is_the_one_that_saved_last(tmp_path):
    for number, name in enumerate(("b", "c", "a")):
        os.utime(make_run(tmp_path / name) / "checkpoints/last-000001", (number, number))
    (tmp_path / "d").mkdir()
    (tmp_path / "a/checkpoints/.partial-x").mkdir()
    (tmp_path / "d/checkpoints").mkdir()
    (tmp_path / "d/checkpoints/last-9").symlink_to("nowhere")
    assert locked(tmp_path, resume="auto").name == "a"
    assert checkpoints(tmp_path / "a") == ["last-000001"]
    assert locked(tmp_path, "c", "auto").name == "c"
    assert locked(tmp_path / "none", resume="auto").parent == tmp_path / "none"


@pytest.mark.parametrize(("name", "reason"), [("file", "Not a directory"), ("run", "symbolic link")])
def test_run_folder_that_cannot_be_written(tmp_path, name, reason):
    victim = tmp_path / "file"
    victim.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/lock").symlink_to(victim)
    with pytest.raises(UserError, match=f"run.folder: cannot write to .*{reason}.*; use another run.folder"):
        locked(tmp_path, name)
    assert victim.read_text() == "mine"


def test_run_checkpoints_behind_a_link_are_refused(tmp_path):
    """As after `cp -a runs/mine runs/fork`: each of the two would delete what the other saves."""
    with started_run(tmp_path, name="mine") as run:
        train_epoch(run)
    (tmp_path / "fork").mkdir()
    (tmp_path / "fork/checkpoints").symlink_to("../mine/checkpoints")
    for resume in ("never", "auto"):
        with pytest.raises(UserError, match="fork/checkpoints is a link: .*; link .*/fork instead"):
            locked(tmp_path, "fork", resume)
    (tmp_path / "linked").symlink_to("mine")
    assert locked(tmp_path, "linked", "auto") == tmp_path / "linked"  # it has the lock of `mine`


def test_run_saves_inside_and_after_an_epoch(tmp_path):
    with started_run(tmp_path) as run:
        train_epoch(run, score=2.0, save_every=3)
        # the best one first: a kill between the two repeats the epoch, and misses no best one
        assert checkpoints(tmp_path / "a") == ["best-000002", "last-000001", "last-000003"]
        assert (tmp_path / "a/checkpoints/best-000002/model.safetensors").stat().st_nlink == 2
        inside = json.loads((tmp_path / "a/checkpoints/last-000001/state.json").read_text())["progress"]
        assert (inside["epoch"], inside["epoch_step"], inside["step"]) == (0, 3, 3)
        train_epoch(run, score=1.0)
    description = json.loads((tmp_path / "a/run.json").read_text())
    assert description["best"] == ["score", "higher"]
    assert {"command", "started", "gpu", "git_commit", "versions"} < description.keys()
    with started_run(tmp_path, resume="auto") as run:
        assert run.progress == checkpoint.Progress(2, 0, 8, 2.0, 0.5, 1, run.progress.metric, 2, 8)


def questions_of(run: Run, n_epochs: int, epoch_steps: int, *, stop_at: int = 0) -> list[str]:
    """What a run asks for after each step, as a letter for each answer that is yes. It validates when it should."""
    answers = []
    while run.progress.epoch < n_epochs and not run.is_over():
        run.progress.advance(epoch_steps)
        names = {"v": run.should_validate, "s": run.should_save, ".": run.is_over}
        answers.append("".join(letter for letter, question in names.items() if question()))
        if run.progress.step == stop_at:
            run.save()
            break
        if run.should_validate():
            run.save({"val/score": 1.0})
    return answers


@pytest.mark.parametrize(
    ("length", "answers"),
    [
        ({}, ["", "", "s", "v", "", "s", "", "v."]),
        ({"validate_every_steps": 3}, ["", "", "vs", "", "", "vs", "", "v."]),
        ({"steps": 6}, ["", "", "s", "v", "", "vs."]),
        ({"steps": 6, "validate_every_steps": 5}, ["", "", "s", "", "v", "vs."]),
        ({"steps": 2, "validate_every_steps": 100}, ["", "v."]),
        ({"steps": 10**6, "validate_every_steps": 2}, ["", "v", "s", "v", "", "vs", "", "v"]),
    ],
)
def test_run_asks_for_validations_and_saves(tmp_path, length, answers):
    """Two epochs of four steps. A run that is stopped at any step, and resumed, asks for the same."""
    options = {**length, "checkpoint_every_steps": 3}
    with started_run(tmp_path, name="whole", **options) as run:
        assert questions_of(run, 2, SHORT_STEPS) == answers
        assert not run.should_validate()
        assert run.progress.validations == sum("v" in each for each in answers)
    for step, expected in enumerate(answers, 1):
        with started_run(tmp_path, name=f"stop{step}", **options) as run:
            assert questions_of(run, 2, SHORT_STEPS, stop_at=step) == answers[:step]
        with started_run(tmp_path, name=f"stop{step}", resume="auto", **options) as run:
            assert run.should_validate() == ("v" in expected)
            if run.should_validate():
                run.save({"val/score": 1.0})
            assert questions_of(run, 2, SHORT_STEPS) == answers[step:]


def test_run_share_that_is_done(tmp_path):
    """In the middle of each step. It depends on the unit that decides where the run ends."""
    for length, n_steps in (({}, 8), ({"steps": 5}, 5), ({"steps": 11}, 11)):
        with started_run(tmp_path, name=f"to{n_steps}", **length) as run:
            shares = []
            while not run.is_over():
                shares.append(run.share_done(SHORT_STEPS))
                run.progress.advance(SHORT_STEPS)
            assert shares == [(step + 0.5) / n_steps for step in range(n_steps)]


def test_run_state_comes_back(tmp_path):
    """What a scheduler changed comes back, too; options that an optimizer is made with only today hold."""
    model = nn.Linear(2, 2)
    for epoch in range(2):
        second = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.5 * epoch, momentum=0.9)
        prepare_optimizer(model, second)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(second, 0.5)
        with started_run(tmp_path, model, resume="auto", state={"second": second, "scheduler": scheduler}) as run:
            assert (scheduler.last_epoch, second.param_groups[0]["lr"]) == (epoch, 0.1 * 0.5**epoch)
            assert second.param_groups[0]["weight_decay"] == 0.5 * epoch
            assert second.param_groups[0]["momentum"] == 0.9 - 0.1 * epoch
            second.param_groups[0]["momentum"] = 0.8
            second.step()
            scheduler.step()
            train_epoch(run)
    saved = {path.stem for path in newest(tmp_path / "a").glob("*.pt")}
    assert saved == {"model", "second", "scheduler"}


@pytest.mark.parametrize(
    ("direction", "scores", "epochs"),
    [("higher", [nan, 3, 1, nan, 4, 2, 4], [0, 2, 2, 2, 5, 5, 7]), ("lower", [inf, 1, 2, nan, 0.5], [0, 2, 2, 2, 5])],
)
def test_run_best_follows_the_metric(tmp_path, capsys, direction, scores, epochs):
    kept = []
    with started_run(tmp_path, best=("score", direction)) as run:
        for score in scores:
            train_epoch(run, score=score)
            warning = "warning: val/score is nan, which no checkpoint can be judged by"
            assert (warning in capsys.readouterr().out) == isnan(score)
            kept.append(run.progress.best_validation)
            best = [step_of(path) // SHORT_STEPS for path in (tmp_path / "a").glob("checkpoints/best-*")]
            assert best == [epoch for epoch in kept[-1:] if epoch]
    assert kept == epochs


@pytest.mark.parametrize(
    ("losses", "best_validation"),
    [((0.3, 0.1, 0.2), 2), ((0.2, 0.2, 0.3), 2), ((0.1, nan, 0.2), 1), ((None, None, None), 3)],
)
def test_run_best_of_equal_values_by_the_loss(tmp_path, losses, best_validation):
    for loss in losses:
        with started_run(tmp_path, resume="auto") as run:
            run.progress.epoch += 1
            run.save({"val/score": 1.0} | ({} if loss is None else {"val/loss": loss}))
    assert run.progress.best_validation == best_validation


def test_run_best_of_several_sets_by_the_loss_of_the_first(tmp_path):
    sets = Splits(SHORT_SOURCE, {"val/day": SHORT_SOURCE, "val/night": SHORT_SOURCE})
    with started_run(tmp_path, splits=sets) as run:
        for loss in (0.3, 0.1, 0.2):
            run.save({"val/day/score": 1.0, "val/day/loss": loss, "val/night/loss": -loss, "val/night/score": -1.0})
    assert (run.progress.best, run.progress.best_validation) == (1.0, 2)


@pytest.mark.parametrize(
    ("metric", "sets", "named"),
    [
        ("mse", (), ("", "mse")),
        ("group/mse", (), ("", "group/mse")),
        ("mse", ("day", "night"), ("day", "day/mse")),
        ("night/mse", ("day", "night"), ("night", "night/mse")),
        ("group/mse", ("day", "night"), ("day", "day/group/mse")),
    ],
)
def test_run_best_names_its_validation_set(metric, sets, named):
    assert name_best((metric, "lower"), sets) == (named[0], (named[1], "lower"))


def lose_the_best(world: World, folder: Path) -> list[tuple[float | None, int]]:
    """(best, best_validation) after each of four epochs. The disk is full when the first best model is written."""
    known = []
    written = at_call(1, checkpoint.save_model, Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.MonkeyPatch.context() as patch, started_run(folder, world=world) as run:
        patch.setattr(checkpoint, "save_model", written)
        for score in (90.0, 50.0, 40.0, 60.0):
            train_epoch(run, score=score)
            known.append((run.progress.best, run.progress.best_validation))
            best = [step_of(path) // SHORT_STEPS for path in (folder / "a").glob("checkpoints/best-*")]
            assert not world.is_main or best == [epoch for _, epoch in known[-1:] if epoch]
    return known


@pytest.mark.parametrize("n_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_run_best_is_what_is_on_disk(tmp_path, n_ranks):
    known = in_world(2, lose_the_best, tmp_path) if n_ranks == 2 else [lose_the_best(ALONE, tmp_path)]
    assert known == [[(None, 0), (50, 2), (50, 2), (60, 4)]] * n_ranks


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """No checkpoint is written before it is set."""
    opened, save = threading.Event(), checkpoint.save
    monkeypatch.setattr(checkpoint, "save", lambda *words, **more: opened.wait(60) and save(*words, **more))
    return opened


def test_run_goes_on_while_a_thread_saves(tmp_path, gate):
    """What is written is the state of the save, whatever steps follow."""
    model = nn.Linear(2, 2)
    with started_run(tmp_path, model, state={"ema": AveragedModel(model, 0.5)}) as run:
        weights = model.weight.detach().clone()
        run.progress.step = 1
        run.save({"val/score": 1.0})
        nn.init.zeros_(model.weight)
        run.progress.step = 2
        assert checkpoints(tmp_path / "a") == []
        assert run.progress.best == 1.0
        gate.set()
    assert checkpoints(tmp_path / "a") == ["best-000001", "last-000002"]
    assert step_of(newest(tmp_path / "a", "last")) == 1
    for name, key in (("model", "weight"), ("ema", "module.weight")):
        saved = torch.load(newest(tmp_path / "a", "last") / f"{name}.pt", weights_only=True)
        assert torch.equal(saved[key], weights)


def test_run_save_waits_for_the_one_before(tmp_path, gate):
    with started_run(tmp_path) as run:
        run.progress.step = 1
        run.save()
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        run.progress.step = 2
        run.save()
        assert "last-000001" in checkpoints(tmp_path / "a")
        run.end()
        assert step_of(newest(tmp_path / "a", "last")) == 2


def test_run_forgets_a_best_that_a_thread_could_not_write(tmp_path, gate):
    with started_run(tmp_path) as run:
        gate.set()
        train_epoch(run, score=50.0)
        gate.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint, "save_model", Mock(side_effect=OSError(28, "No space left on device")))
            run.progress.epoch = 2
            run.save({"val/score": 90.0})
            assert (run.progress.best, run.progress.best_validation) == (90, 2)
            gate.set()
            run.wait_for_save()
        assert (run.progress.best, run.progress.best_validation) == (50, 1)
        train_epoch(run, score=70.0)
        assert (run.progress.best, run.progress.best_validation) == (70, 3)


def test_run_error_of_the_saving_thread_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "save", Mock(side_effect=KeyError("a bug")))
    with started_run(tmp_path) as run:
        run.save()
        with pytest.raises(KeyError, match="a bug"):
            run.save()


def test_run_saves_into_the_same_memory(tmp_path, monkeypatch):
    """Copies for a save take no new memory, unless a tensor has another shape."""
    model, take_snapshot, taken = nn.Linear(2, 2), checkpoint.take_snapshot, []
    monkeypatch.setattr(checkpoint, "take_snapshot", lambda *words: taken.append(take_snapshot(*words)) or taken[-1])
    with started_run(tmp_path, model) as run:
        run.save()
        run.save()
        first, second = ([copy.data_ptr() for copy in each.state_dicts["model"].values()] for each in taken)
        assert first == second
        model.weight = nn.Parameter(torch.ones(3, 2))
        run.save()
        run.wait_for_save()
    saved = torch.load(newest(tmp_path / "a", "last") / "model.pt", weights_only=True)
    assert torch.equal(saved["weight"], torch.ones(3, 2))


def test_run_best_that_was_removed_is_forgotten(tmp_path):
    with started_run(tmp_path) as run:
        train_epoch(run, score=90.0)
    shutil.rmtree(newest(tmp_path / "a", "best"))
    with started_run(tmp_path, resume="auto") as run:
        train_epoch(run, score=50.0)
    assert step_of(newest(tmp_path / "a", "best")) == 2 * SHORT_STEPS


def train_until_the_loader_fails(run: Run, model: nn.Module, problem: str) -> None:
    """Three steps, and then the error of the loader."""

    def batches() -> Iterator[int]:
        yield from range(3 * (problem != "at once"))
        raise UserError("the server is gone")

    for _ in run.guard(batches()):
        run.progress.step += 1
        run.progress.epoch_step += 1
        if problem == "nan":
            nn.init.constant_(model.weight, nan)
        if problem in ("saved before", "validation"):
            run.save()
        if problem == "validation":  # of an epoch whose last step is saved
            run.progress.epoch += 1


@pytest.mark.parametrize(
    ("problem", "saved", "printed"),
    [
        ("", ["last-000001"], "warning: the loader failed; step 3 is saved\n"),
        ("nan", [], "warning: the loader failed; steps 1 to 3 are in no checkpoint and lost\n"),
        ("disk", [], "warning: .*last-000001 was not written: .*warning: the loader failed; steps 1 to 3 are in .*"),
        ("saved before", ["last-000002", "last-000003"], "warning: the loader failed; step 3 is saved\n"),
        ("at once", [], ""),
    ],
)
def test_run_loader_that_fails_costs_no_step(tmp_path, monkeypatch, capsys, problem, saved, printed):
    """The error of the loader is raised, whatever comes of saving."""
    if problem == "disk":
        monkeypatch.setattr(checkpoint, "save_model", Mock(side_effect=OSError(28, "No space left on device")))
    model = nn.Linear(2, 2)
    with started_run(tmp_path, model) as run, pytest.raises(UserError, match="the server is gone"):
        train_until_the_loader_fails(run, model, problem)
    assert checkpoints(tmp_path / "a") == saved
    lines = capsys.readouterr().out.splitlines(keepends=True)
    assert re.fullmatch(printed, "".join(line for line in lines[1:] if "validation rows" not in line), re.DOTALL)
    assert all(step_of(path) == 3 for path in (tmp_path / "a").glob("checkpoints/*3"))


@pytest.mark.parametrize(
    ("problem", "saved", "told"),
    [
        ("", [], "steps 1 to 3 are in no checkpoint and lost"),
        ("validation", ["last-000002", "last-000003"], "step 3 is saved"),
    ],
)
def test_run_loader_that_fails_on_a_rank_of_two(tmp_path, monkeypatch, capsys, problem, saved, told):
    """Saving needs both, and the other one waits in its step."""
    for name, text in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, text)
    for name in ("all_gather_object", "get_backend"):  # both have the same values until then
        monkeypatch.setattr(torch.distributed, name, Mock(return_value="gloo"))
    model = nn.Linear(2, 2)
    run = started_run(tmp_path, model, world=World(0, 2, 2, CPU))
    with run, pytest.raises(UserError, match="the server is gone"):
        train_until_the_loader_fails(run, model, problem)
    assert f"warning: [rank 1] the loader failed; {told}\n" in capsys.readouterr().out
    assert checkpoints(tmp_path / "a") == saved


@pytest.mark.parametrize(("n_rows", "is_told"), [(199, True), (200, False)])
def test_run_best_of_few_rows_is_a_warning(tmp_path, capsys, n_rows, is_told):
    rows = ArrayDataset("few", {"x": np.zeros((n_rows, 100), np.uint8)})
    with started_run(tmp_path, splits=Splits(rows, {"val": rows})):
        pass
    line = f"warning: the best checkpoint is chosen on {n_rows} validation rows (one row is 0.5 %); use more\n"
    assert (line in capsys.readouterr().out) == is_told


def test_run_best_of_another_metric(tmp_path, capsys):
    with started_run(tmp_path) as run:
        train_epoch(run, score=1000.0, loss=0.5)
    with started_run(tmp_path, best=("loss", "lower"), resume="auto") as run:
        train_epoch(run, loss=0.6)
        assert run.progress.best == 0.6
    others = ArrayDataset("others", {"x": np.ones((9, 100), np.uint8)})
    splits = Splits(SHORT_SOURCE, {"val": others})
    with started_run(tmp_path, best=("loss", "lower"), resume="auto", splits=splits) as run:
        train_epoch(run, loss=0.7)
        assert run.progress.best == 0.7
    with started_run(tmp_path, best=("recall", "higher"), resume="auto") as run:
        train_epoch(run)
    assert "`best` of the workload is recall, but `metrics` gives val/score, val/loss" in capsys.readouterr().out
    assert [step_of(newest(tmp_path / "a", kind)) for kind in ("best", "last")] == [12, 16]


def test_run_newest_of_other_rows_is_refused(tmp_path):
    with started_run(tmp_path) as run:
        train_epoch(run)
    others = ArrayDataset("others", {"x": np.ones((9, 100), np.uint8)})
    with pytest.raises(UserError, match="run.name: the newest run, .*/a, has other rows; use run.resume=FOLDER"):
        started_run(tmp_path, name="auto", resume="auto", splits=Splits(others, {"val": others}))


def test_run_full_disk_costs_the_description(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as patch:
        patch.setattr(files, "flush", Mock(side_effect=OSError(28, "No space left on device")))
        run = started_run(tmp_path)
        printed = capsys.readouterr().out
        for name in ("run.json", "config.yaml"):
            assert re.search(f"warning: cannot write .*/a/{name} .*; training continues", printed)
        train_epoch(run)
        assert {path.name for path in tmp_path.rglob("*")} == {"a", "checkpoints", "lock"}  # and no part of a file
        with pytest.raises(UserError, match="last checkpoint is not in .*/a: make room, and resume the run"):
            run.end()
    with run:
        train_epoch(run)
        assert "done:" not in capsys.readouterr().out
        assert run.end() == 0


def test_run_file_that_is_not_needed_costs_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "touch", Mock(side_effect=OSError(28, "No space left on device")))
    write_or_warn(tmp_path / "stopped.json", "{}")
    assert re.fullmatch(r"warning: cannot write .*No space left.*; training continues\n", capsys.readouterr().out)


def test_run_folder_that_refuses_files_costs_warnings(tmp_path, monkeypatch, capsys):
    for name in ("touch", "unlink"):
        monkeypatch.setattr(Path, name, Mock(side_effect=PermissionError(13, "Permission denied")))
    with started_run(tmp_path) as run:
        train_epoch(run)
    warned = re.findall(r"warning: cannot write .*/a/(\S+) .*; training continues", capsys.readouterr().out)
    assert warned == ["stopped.json", "run.json", "config.yaml"]
    assert checkpoints(tmp_path / "a") == ["best-000001", "last-000002"]


def lose_a_value(world: World, folder: Path, name: str = "queue") -> str:
    """What a rank says when the last rank alone loses a value after the first epoch."""
    model = nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    model.register_buffer("queue", torch.zeros(2))
    with started_run(folder, model, world=world) as run:
        train_epoch(run)
        if world.rank == world.world_size - 1:
            model.state_dict()[name][0] = nan
        with pytest.raises(UserError) as error:
            train_epoch(run)
    return str(error.value)


@pytest.mark.parametrize(
    ("n_ranks", "name"), [(1, "running_mean"), (1, "weight"), pytest.param(2, "queue", marks=pytest.mark.slow)]
)
def test_run_nan_is_not_saved(tmp_path, n_ranks, name):
    errors = in_world(2, lose_a_value, tmp_path) if n_ranks == 2 else [lose_a_value(ALONE, tmp_path, name)]
    for error in errors:
        assert re.search(rf"{name}.* is not finite at step 8; nothing is saved", error)
    assert checkpoints(tmp_path / "a") == ["best-000001", "last-000002"]


def test_run_lock_refuses_a_second_process(tmp_path):
    def hold(pipe: Connection) -> None:
        lock = FolderLock(tmp_path)
        if child := os.fork():
            pipe.send(child)
        time.sleep(600)
        lock.close()

    holder, pipe = fork(hold)
    child = pipe.recv()
    with pytest.raises(
        UserError, match=f"{tmp_path} is in use by process {holder.pid} on {socket.gethostname()} since 2"
    ):
        FolderLock(tmp_path)
    holder.kill()
    holder.join()
    FolderLock(tmp_path).close()  # the kernel released the lock, at once
    os.kill(child, signal.SIGKILL)  # which has lived until here


@pytest.mark.parametrize("how", ["moved", "replaced", "taken"])
def test_run_lock_lost_stops_writing(tmp_path, how):
    with started_run(tmp_path) as run:
        train_epoch(run)
        lock = run.folder / "lock"
        if how == "moved":
            run.folder.rename(tmp_path / "b")
        if how == "replaced":
            content = lock.read_bytes()
            lock.unlink()
            lock.write_bytes(content)
        if how == "taken":
            lock.write_text("process 1 on another machine")
        saved = sorted(tmp_path.rglob("*-0*"))
        with pytest.raises(UserError, match="a/lock is no longer the lock of this process"):
            train_epoch(run)
    assert sorted(tmp_path.rglob("*-0*")) == saved
