"""The training loop, with the workload `minimal` on made-up rows: whole runs, in this process where that is enough."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import train as script
import yaml

from fastgpu.process.config import Optim
from fastgpu.process.launch import UserError
from support import PROJECT
from support.ranks import in_world, printed_by, run_train, train_command
from support.runs import (
    at_call,
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


def test_loop_record_repeats_the_run(folder, capsys):
    train("optim.name=sgd", "optim.lr=0.05", "optim.accumulation_steps=4")
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("1 x CPU", "kept on the device", "tensorboard --logdir runs"))
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
    chosen = (written["data"]["pool_batches"], written["loader"]["num_readers"], written["train"]["precision"])
    assert "auto" not in (written["data"]["tier"], *chosen)
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


def test_loop_signal_in_a_validation(folder, monkeypatch):
    words = ("data.tier=disk", "train.epochs=2")
    train("run.name=whole", *words)
    with monkeypatch.context() as patch:
        score = at_call(2, minimal.Workload.score, signalled(signal.SIGTERM))
        patch.setattr(minimal.Workload, "score", score)
        assert train("run.name=stopped", *words) == 128 + signal.SIGTERM
    assert not val_points(folder / "runs/stopped")
    train("run.name=stopped", "run.resume=auto", *words)
    first, second = (val_points(folder / "runs" / name) for name in ("whole", "stopped"))
    assert [point["val/mse"] for point in first] == [point["val/mse"] for point in second]


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


def test_loop_resumed_with_its_own_settings(folder, capsys):
    train("optim.lr=0.02", "model.hidden_dim=8", "train.epochs=1")
    train("run.resume=runs/a", "train.epochs=2", "data.batch_size=64")
    recorded = yaml.safe_load((folder / "runs/a/config-2.yaml").read_text())
    assert (recorded["optim"]["lr"], recorded["model"]["hidden_dim"], recorded["train"]["epochs"]) == (0.02, 8, 2)
    assert len(val_points(folder / "runs/a")) == 2
    changed = re.findall("resumed with (.*)", capsys.readouterr().out)
    assert changed == ["data.batch_size=64 (was 32)", "train.epochs=2 (was 1)"]


def test_loop_finished_run_is_done_when_resumed(folder, capsys):
    for _ in range(2):
        train("train.epochs=1", "run.resume=auto")
        assert "done: epoch 1, step 21" in capsys.readouterr().out


def test_loop_loss_that_is_nan_ends_the_run(folder):
    with pytest.raises(UserError, match=r"loss is (nan|inf) at step \d+; lower optim.lr=1e\+30"):
        train("optim.lr=1e30")


@pytest.mark.slow
def test_loop_check_starts_nothing(folder):
    done = run_train("run.check=true", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "batches: 32 rows over all ranks" in done.stdout
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_loop_missing_last_checkpoint_fails_on_every_rank(folder):
    run = folder / "runs/a"
    run.mkdir(parents=True)
    (run / "checkpoints").symlink_to("/proc/self")  # takes no file: the same as a full disk
    for error in in_world(2, train_rank, "train.epochs=1"):
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
