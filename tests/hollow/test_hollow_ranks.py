"""Two ranks over NCCL that are asked to stop, fail, or are killed."""

import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from fastgpu.process.launch import Launch
from support.hollow import edited_project, hollow, read_reports
from support.ranks import (
    TIMEOUT_S,
    free_port,
    launch_variables,
    printed_by,
    run_ranks,
    run_to_end,
    started_ranks,
    train_command,
)
from support.runs import same_weights, saved_steps, wait_for_step

pytestmark = [pytest.mark.hollow, pytest.mark.slow]

WORDS = ("dist.device=cuda", "dist.timeout_s=60", "train.epochs=6", "run.checkpoint_every_steps=5", "run.resume=auto")


def rank_of(process: subprocess.Popen, rank: int) -> psutil.Process:
    """A rank that torchrun has started."""
    children = psutil.Process(process.pid).children(recursive=True)
    return next(child for child in children if child.environ().get("RANK") == str(rank))


def test_hollow_ranks_stop_and_are_killed(folder):
    """SIGTERM to one rank, a resume that is killed, and another resume: the weights of a run that nobody disturbs."""
    printed_by(train_command(*WORDS, "run.name=whole", ranks=2), folder, **hollow(folder / "report", devices=2))
    command = train_command(*WORDS, ranks=2)
    run = folder / "runs/a"
    env = os.environ | hollow(folder / "report", devices=2)
    with subprocess.Popen(command, cwd=folder, env=env, stdout=subprocess.PIPE, text=True) as process:
        wait_for_step(run, 5, process)
        rank_of(process, 1).send_signal(signal.SIGTERM)
        shown, _ = process.communicate()
    assert process.returncode == 0
    stopped_at = saved_steps(run)[-1]
    assert f"asked to stop at step {stopped_at}, which is saved" in shown
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        wait_for_step(run, stopped_at + 10, process)
        rank_of(process, 0).kill()
    assert process.returncode
    printed_by(command, folder, **hollow(folder / "report", devices=2))
    assert same_weights(folder / "runs/whole", run)
    reports = read_reports(folder / "report")
    assert {tuple(report.contexts) for report in reports} == {(0,), (1,)}
    assert [note for report in reports for note in report.notes] == []


def test_hollow_two_ranks_on_one_gpu_are_one_line(folder):
    """As on two machines of which each has one rank, but which are the same one. NCCL refuses it."""
    launches = [Launch(rank, 2, 0, 1) for rank in range(2)]
    port = free_port()
    with ThreadPoolExecutor(2) as pool:
        environments = [hollow(folder / "report", devices=1) | launch_variables(launch, port) for launch in launches]
        command = train_command("dist.device=cuda", "dist.timeout_s=60")
        first, second = pool.map(lambda environment: run_to_end(command, folder, **environment), environments)
    for rank in (first, second):
        assert rank.returncode == 2
        assert "Traceback" not in rank.stderr
    assert "Duplicate GPU detected : rank 0 and rank 1 both on GPU 0" in first.stderr


def test_hollow_unused_parameter_is_one_line(tmp_path):
    model = "network = resnet(self.shape_CHW, self.n_outputs, o.width, o.blocks)"
    unused = f"{model}\n            network.unused = nn.Parameter(torch.zeros(1))"
    project = edited_project(tmp_path, "workloads/images.py", model, unused)
    command = train_command("train.epochs=1", f"run.folder={tmp_path}", ranks=2, root=project)
    done = run_to_end(command, project, **hollow(tmp_path / "report", devices=2))
    assert done.returncode
    assert "DDP: the loss does not depend on all parameters of the model" in done.stderr
    assert "]: Traceback" not in done.stderr  # of a rank: torchrun ends with its own


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_hollow_lost_rank_ends_the_others(folder, number):
    """torch's watchdog ends a rank that has waited for another one for dist.timeout_s. A line of ours comes before."""
    words = ("dist.device=cuda", "dist.timeout_s=5", "train.epochs=10000", "run.checkpoint_every_steps=5")
    environment = hollow(folder / "report", devices=2) | {"TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100"}
    with started_ranks(*words, cwd=folder, **environment) as (first, second):
        wait_for_step(folder / "runs/a", 5, first)
        second.send_signal(number)
        shown, errors = first.communicate(timeout=TIMEOUT_S)
    assert first.returncode == -signal.SIGABRT
    assert "warning: [rank 0] waiting for another rank for " in shown
    assert "Watchdog caught collective operation timeout" in errors


@pytest.mark.parametrize(
    ("words", "of_last", "message"),
    [
        (("optim.lr=1e38", "train.precision=fp32"), (), "loss is nan at step"),
        (("data.batch_size=33",), (), "data.batch_size is 33"),
        ((), ("data.train=missing.h5",), "missing.h5"),
        ((), ("optim.lr=0.5",), "optim.lr is 0.5 on rank 1"),
    ],
)
def test_hollow_error_ends_all_ranks(folder, monkeypatch, words, of_last, message):
    """Whatever rank raises it: the group is left in order, each rank ends with the same code, and rank 0 says why."""
    for name, value in hollow(folder / "report", devices=2).items():
        monkeypatch.setenv(name, value)
    done = run_ranks("dist.device=cuda", "dist.timeout_s=60", *words, ranks=2, cwd=folder, more_for_last=of_last)
    assert [rank.returncode for rank in done] == [2, 2]
    assert message in done[0].stderr
    assert len(done[0].stderr.splitlines()) == 1
    assert done[1].stderr == ""
    for report in read_reports(folder / "report"):
        assert report.counts["ncclCommDestroy"] == report.counts["ncclCommInit"] > 0
        assert not report.notes
