"""The training loop, with the workload `minimal` on made-up rows: whole runs, in this process where that is enough."""

import gc
import json
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from itertools import count, islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import train as script
import yaml
from torch import nn

from fastgpu.process import machine
from fastgpu.process.config import Optim
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.run import checkpoint
from fastgpu.storage.store import HDF5Dataset
from fastgpu.telemetry import clock, tensorboard
from support import PROJECT
from support.ranks import ALONE, in_world, printed_by, run_train, train_command
from support.runs import (
    at_call,
    build,
    metrics_of,
    newest,
    same_weights,
    signalled,
    step_of,
    train,
    train_rank,
    val_points,
    weights_of,
)
from workloads import minimal

STEPS_PER_EPOCH = 21
TRAIN_TAGS = {f"train/{name}" for name in ("loss", "grad_norm", "lr", "trained_rows_per_s", "step_ms")}
TAGS = TRAIN_TAGS | {"data/fresh_rows_per_s", "data/wait_pct", "data/echo", "val/mse", "run/save_s"}


def test_loop_record_repeats_the_run(folder, monkeypatch, capsys):
    monkeypatch.setattr(tensorboard, "LINE_EVERY_S", 0)
    train("optim.name=sgd", "optim.lr=0.05", "optim.accumulation_steps=4")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("1 x CPU", "kept on the device", "tensorboard --logdir runs"))
    shares = [int(share) for share in re.findall(r" (\d+) % done", printed)]
    assert shares[0] == 7  # of 63 steps, at the fifth
    assert shares == sorted(shares)
    assert shares[-1] == 99
    run = folder / "runs/a"
    points = metrics_of(run)
    assert points[-1]["step"] == 3 * STEPS_PER_EPOCH
    tags = {name for name in set().union(*points) if "/" in name}
    assert {tag for tag in tags if not tag.startswith("host/")} == TAGS
    lr = [point["train/lr"] for point in points if "train/lr" in point][-1]
    assert lr == pytest.approx(0.05 * script.schedule(62.5 / 63, Optim()))  # at mid-step
    errors = {point["step"]: point["val/mse"] for point in val_points(run)}
    assert min(errors.values()) < errors[STEPS_PER_EPOCH]
    (best,) = run.glob("checkpoints/best-*")
    assert step_of(best) == min(errors, key=errors.get)
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert written["model"] == {"hidden_dim": 64}  # the defaults of the workload, too
    # It keeps `auto`, for another machine; the model is described with what was chosen.
    chosen = json.loads((best / "model.json").read_text())["config"]
    for section, key in (("data", "tier"), ("loader", "num_readers"), ("train", "precision")):
        assert written[section][key] == "auto" != chosen[f"{section}.{key}"]
    train("--config", "runs/a/config.yaml", "run.name=b")
    assert same_weights(run, folder / "runs/b")


OTHER_SYSTEM = """
import os, runpy, sys
import h5py, pydantic.fields, psutil, pynvml, torch.utils.tensorboard, tqdm, yaml, zoneinfo
from pathlib import Path

for name in ("RWF_NOWAIT", "posix_fadvise", "O_DIRECT", "SEEK_HOLE", "SEEK_DATA", "sched_getaffinity", "nice"):
    delattr(os, name)

def refuse_proc(function):
    def call(path, *arguments, **options):
        if str(path).startswith(("/proc", "/sys")):
            raise FileNotFoundError(path)
        return function(path, *arguments, **options)
    return call

os.open, Path.read_text = refuse_proc(os.open), refuse_proc(Path.read_text)
os.preadv = lambda file, buffers, offset, preadv=os.preadv: preadv(file, buffers, offset)  # it takes no flags
sys.platform = "darwin"
runpy.run_path("train.py", run_name="__main__")
"""
"""train.py as a system would run it that has none of the calls of Linux. Nothing here ever ran on such a one."""


@pytest.mark.slow
def test_loop_without_what_only_linux_has(tmp_path):
    words = ["train.epochs=1", "data.tier=disk", "dist.device=cpu", f"run.folder={tmp_path}", "model.width=4"]
    printed_by([sys.executable, "-c", OTHER_SYSTEM, *words, "run.name=other"], PROJECT)
    printed_by(train_command(*words, "run.name=linux"), PROJECT)
    assert same_weights(tmp_path / "other", tmp_path / "linux")


def test_loop_signal_at_the_end_is_harmless(folder, monkeypatch, capsys):
    monkeypatch.setattr(script.Run, "__exit__", at_call(1, script.Run.__exit__, signalled(signal.SIGINT)))
    assert train("train.epochs=1") == 0
    assert "done: epoch 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "n_batches", "position"),
    [
        ((), 2, (1, 0, STEPS_PER_EPOCH, 0)),  # the last step of an epoch leads to the first one of the next
        (("train.validate_every_steps=8", "run.checkpoint_every_steps=3"), 6, (0, 16, 16, 1)),  # of 4 batches each
        (("train.steps=30",), 7, (1, 9, 30, 1)),  # the validation at the end of the run
    ],
)
def test_loop_signal_in_a_validation(folder, monkeypatch, more, n_batches, position):
    """The run that is resumed begins with it. A run that is resumed after a validation does not repeat it."""
    words = ("data.tier=disk", "train.epochs=2", *more)
    train("run.name=whole", *words)
    with monkeypatch.context() as patch:
        score = at_call(n_batches, minimal.Workload.score, signalled(signal.SIGTERM))
        patch.setattr(minimal.Workload, "score", score)
        assert train("run.name=stopped", *words) == 128 + signal.SIGTERM
    run = folder / "runs/stopped"
    at = json.loads((newest(run) / "state.json").read_text())["progress"]
    assert (at["epoch"], at["epoch_step"], at["step"], at["validations"]) == position
    assert len(val_points(run)) == at["validations"]
    for _ in range(2):
        train("run.name=stopped", "run.resume=auto", *words)
        first, second = (val_points(folder / "runs" / name) for name in ("whole", "stopped"))
        assert [point["val/mse"] for point in first] == [point["val/mse"] for point in second]
    assert same_weights(folder / "runs/whole", run)


def test_loop_ends_inside_an_epoch(folder, capsys):
    words = ("train.validate_every_steps=20", "run.resume=auto", "log.every_steps=6", "data.tier=disk")
    train("train.steps=50", *words)
    printed = capsys.readouterr().out
    assert "config.yaml:5: train.epochs has no effect: train.steps=50 ends the run" in printed
    assert re.findall(r"^step (\d+/50) train/loss .*val/mse", printed, re.MULTILINE) == ["20/50", "40/50", "50/50"]
    assert "done: epoch 2, step 50;" in printed
    run = folder / "runs/a"
    lr = [point["train/lr"] for point in metrics_of(run) if "train/lr" in point][-1]
    assert lr == pytest.approx(3e-3 * script.schedule(49.5 / 50, Optim()))
    best = min(val_points(run), key=lambda point: point["val/mse"])
    assert step_of(newest(run, "best")) == best["step"]
    for n_steps in (50, 60):  # it has ended; it goes on
        train(f"train.steps={n_steps}", *words)
        assert step_of(newest(run)) == n_steps
        assert [point["step"] for point in val_points(run)] == [20, 40, 50, 60][: n_steps // 10 - 2]


def test_loop_early_stop_of_the_page(folder, monkeypatch):
    """Nothing is learned, so the first validation stays the best one."""

    def validate(t: script.Training, run: script.Run, *more: Any) -> bool:
        at = run.progress
        return whole(t, run, *more) and at.validations - at.best_validation < 5

    assert "`return at.validations - at.best_validation < 5`" in (PROJECT / "docs/code.md").read_text()
    whole = script.validate
    monkeypatch.setattr(script, "validate", validate)
    monkeypatch.setattr(minimal.Workload, "metrics", lambda self, sums: {"mse": next(errors)})
    errors = count(1)
    assert train("train.validate_every_steps=4") == 0
    run = folder / "runs/a"
    assert [point["step"] for point in val_points(run)] == [4, 8, 12, 16, 20, 24]
    assert (step_of(newest(run)), step_of(newest(run, "best"))) == (24, 4)


def test_loop_threads_outlive_a_validation(folder, monkeypatch):
    """Those of both loaders, with what they have read ahead: no validation but the first one starts any."""
    threads: list[set[threading.Thread]] = []

    def look(*arguments: Any, **options: Any) -> dict[str, float] | None:
        threads.append(readers())
        metrics = evaluate(*arguments, **options)
        threads.append(readers())
        return metrics

    def readers() -> set[threading.Thread]:
        return {each for each in threading.enumerate() if each.name.startswith(("reader_", "feeder"))} - others

    others = {*threading.enumerate()}  # a test that failed in this process may have left some
    evaluate = script.training.evaluate
    monkeypatch.setattr(script.training, "evaluate", look)
    train("data.tier=disk", "data.echo=2.5", "loader.num_readers=2", "train.validate_every_steps=7")
    before, first, *later = threads
    assert len(before) == 3
    assert len(first) == 6
    assert len(later) > 40
    assert all(before <= each <= first for each in later[:-6])  # those of the training end with its last pool
    assert all(each <= first for each in later)


@pytest.mark.parametrize(("n_given", "n_said"), [(18, 21), (0, 21), (22, 21), (0, 0)])
def test_loop_loader_that_gives_other_batches_than_it_says(folder, n_given, n_said):
    """Without this error, a run whose epochs never end would begin them again and again."""
    parts = build("train.epochs=2")
    batch = next(parts.loader.batches(0))
    loader = SimpleNamespace(
        fingerprint={},
        steps_per_epoch=lambda epoch: n_said,
        batches=lambda epoch, start=0: repeat(batch, n_given - start),
        close=parts.loader.close,
    )
    message = f"the loader gave {n_given} batches of epoch 0, and its steps_per_epoch says {n_said}"
    try:
        with pytest.raises(UserError, match=message):
            script.train(parts._replace(loader=loader), ALONE)
    finally:
        gc.unfreeze()
    saved = [step_of(path) for path in (folder / "runs/a").glob("checkpoints/last-*")]
    assert max(saved, default=0) == min(n_given, n_said)


@pytest.mark.parametrize("n_reads", [4, 7])  # of six pools to train on, and one to validate on
def test_loop_feed_that_fails_costs_no_step(folder, monkeypatch, capsys, n_reads):
    """Such as a server that is gone. The resumed run ends with the weights of an undisturbed one."""

    def fail() -> None:
        raise UserError("rows.h5 cannot be read")

    words = ("data.tier=disk", "train.epochs=1", "loader.num_readers=1")
    train("run.name=whole", *words)
    with monkeypatch.context() as patch:
        patch.setattr(HDF5Dataset, "gathers", lambda *_: [])
        patch.setattr(HDF5Dataset, "read", at_call(n_reads, HDF5Dataset.read, fail))
        with pytest.raises(UserError, match="rows.h5 cannot be read"):
            train(*words)
    step = step_of(newest(folder / "runs/a"))
    assert 0 < step <= STEPS_PER_EPOCH
    assert f"the loader failed; step {step} is saved" in capsys.readouterr().out
    train("run.resume=auto", *words)
    assert same_weights(folder / "runs/whole", folder / "runs/a")


def test_loop_save_and_validation_are_in_no_interval(folder, monkeypatch):
    """A clock that ticks at each look at it, and 1,000 times in each save and each batch of a validation."""
    ticks = count()
    copy, score = checkpoint.take_snapshot, minimal.Workload.score
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(checkpoint, "take_snapshot", lambda *words: (list(islice(ticks, 1000)), copy(*words))[1])
    monkeypatch.setattr(minimal.Workload, "score", lambda *words: (list(islice(ticks, 1000)), score(*words))[1])
    train("train.epochs=1", "log.every_steps=5", "run.checkpoint_every_steps=7", "train.validate_every_steps=9")
    points = metrics_of(folder / "runs/a")
    intervals = [point for point in points if "seconds" in point]
    assert [point["step"] for point in intervals] == [5, 7, 9, 14, 18, 21]
    assert [point["step"] for point in points if "run/save_s" in point] == [7, 9, 14, 18, 21]
    assert [point["step"] for point in points if "val/mse" in point] == [9, 18, 21]
    assert sum(point["steps"] for point in intervals) == STEPS_PER_EPOCH
    assert all(point["wait_s"] < point["seconds"] < 1000 and "run/save_s" not in point for point in intervals)


def test_loop_average_is_validated_and_may_end(folder):
    plain, averaged = folder / "runs/plain", folder / "runs/averaged"
    train("run.name=plain", "train.epochs=1")
    train("run.name=averaged", "train.epochs=1", "train.ema=0.9")
    assert same_weights(plain, averaged)  # the weights that are trained
    assert not list(plain.glob("checkpoints/*/ema.pt"))
    assert weights_of(averaged, "ema")["n_averaged"] == STEPS_PER_EPOCH
    assert val_points(plain)[-1]["val/mse"] != val_points(averaged)[-1]["val/mse"]
    train("run.name=averaged", "run.resume=auto", "train.epochs=2")
    assert len(val_points(averaged)) == 2


def count_graphs(world: World, *words: str) -> int:
    """Graphs that a run with train.compile=true compiles. The weights of a checkpoint keep their names."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compile_ = torch.compile
    torch.compile = partial(compile_, backend="aot_eager")
    try:
        train("train.epochs=1", "train.compile=true", *words, world=world)
    finally:
        torch.compile = compile_
    assert list(weights_of(Path("runs/a"))) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.filterwarnings("default", "ignore::ResourceWarning")  # torch warns of its own parts while it traces
@pytest.mark.parametrize(
    ("n_ranks", "words"),
    [(1, ()), (1, ("train.ema=0.9",)), (1, ("dist.strategy=dp",)), pytest.param(2, (), marks=pytest.mark.slow)],
)
def test_loop_compiles_the_steps_only(folder, n_ranks, words):
    """Also where the model is a module of torch itself; validation is the same for any number of ranks."""
    graphs = in_world(2, count_graphs, *words) if n_ranks == 2 else [count_graphs(ALONE, *words)]
    assert graphs == [1] * n_ranks


def test_loop_resumed_with_its_own_settings(folder, capsys):
    train("optim.lr=0.02", "model.hidden_dim=8", "train.epochs=1")
    train("run.resume=runs/a", "train.epochs=2", "data.batch_size=64")
    recorded = yaml.safe_load((folder / "runs/a/config-2.yaml").read_text())
    assert (recorded["optim"]["lr"], recorded["model"]["hidden_dim"], recorded["train"]["epochs"]) == (0.02, 8, 2)
    assert len(val_points(folder / "runs/a")) == 2
    changed = re.findall("resumed with (.*)", capsys.readouterr().out)
    assert changed == ["data.batch_size=64 (was 32)", "train.epochs=2 (was 1)"]


@pytest.mark.parametrize("resume", ["runs/a", "auto"])
def test_loop_resumed_chooses_for_its_machine(folder, monkeypatch, resume):
    """Whichever way it is resumed, and only what was `auto`."""
    train("train.epochs=1", "data.tier=disk")
    monkeypatch.setattr(machine, "available_cpus", lambda: 5)
    parts = build(f"run.resume={resume}", "data.tier=disk")
    assert (parts.config.loader.num_readers, parts.config.data.tier) == (5, "disk")
    parts.close()


def test_loop_finished_run_is_done_when_resumed(folder, capsys):
    for _ in range(2):
        train("train.epochs=1", "run.resume=auto")
        assert "done: epoch 1, step 21" in capsys.readouterr().out


@pytest.mark.parametrize("is_in_groups", [True, False])
def test_loop_part_that_is_set_free_later(folder, monkeypatch, is_in_groups):
    """As docs/code.md says: it needs gradients when the groups are made, or it would never train."""
    models = []

    def model(workload: minimal.Workload) -> nn.Module:
        models.append(make_model(workload))
        models[0][0].requires_grad_(is_in_groups)
        return models[0]

    def free() -> None:
        models[0][0].requires_grad_(True)

    make_model = minimal.Workload.model
    monkeypatch.setattr(minimal.Workload, "model", model)
    monkeypatch.setattr(minimal.Workload, "score", at_call(1, minimal.Workload.score, free))  # in the validation
    parts = build("train.epochs=2")
    models[0][0].requires_grad_(False)
    before = models[0][0].weight.clone()
    try:
        if is_in_groups:
            script.train(parts, ALONE)
        else:
            with pytest.raises(UserError, match="no group of the optimizer has 0.weight, 0.bias, so training would"):
                script.train(parts, ALONE)
    finally:
        gc.unfreeze()
    saved = sorted((folder / "runs/a").glob("checkpoints/last-*"))
    weights = [torch.load(path / "model.pt", weights_only=True)["0.weight"] for path in saved]
    assert [torch.equal(each, before) for each in weights] == [True, False][: len(weights)]


def test_loop_loss_that_is_nan_ends_the_run(folder):
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step \d+; lower optim.lr=1e\+30"):
        train("optim.lr=1e30")


@pytest.mark.slow
def test_loop_check_starts_nothing(folder):
    done = run_train("run.check=true", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "batches: 32 rows over all ranks" in done.stdout
    assert not (folder / "runs").exists()


def train_on_a_full_disk(world: World) -> int | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save_model", Mock(side_effect=OSError(28, "No space left on device")))
        return train_rank(world, "train.epochs=1")


@pytest.mark.slow
def test_loop_missing_last_checkpoint_fails_on_every_rank(folder):
    for error in in_world(2, train_on_a_full_disk):
        assert "the last checkpoint is not in" in str(error)


@pytest.mark.parametrize("redirect", [">/dev/full", ">&- 2>&-"])
def test_loop_lost_output_is_one_warning(folder, redirect):
    command = ["bash", "-c", f'"$@" {redirect}', "-", *train_command("train.epochs=1")]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert step_of(newest(folder / "runs/a")) == STEPS_PER_EPOCH
    assert done.stderr.count("warning: stdout is lost from here on") == (redirect == ">/dev/full")


def test_loop_exit_code_without_output(folder):
    with Path("/dev/full").open("w") as full:
        command = train_command("data.trian=nowhere.h5")
        assert subprocess.run(command, stdout=full, stderr=full, check=False).returncode == 2
