"""Ranks that were started with other settings, rows or code: each node has a copy of its own. Nodes come and go."""

import json
import shutil
import signal
import time
from unittest.mock import patch

import h5py
import pytest

from fastgpu.process.launch import UserError
from fastgpu.process.signals import MAX_CALLS
from fastgpu.process.world import World
from support.ranks import copy_project, in_world, run_ranks, run_train
from support.runs import at_call, build, same_weights, saved_steps, signalled, train_rank
from workloads import minimal

OTHER = "data.train=other.h5::/train"
COPY = ("data.train=copy.h5::/train", "data.tier=host", "loader.num_readers=3")
CASES = {
    "another place for the same rows": ((), COPY, ""),
    "batch size": ((), ("data.batch_size=64",), "data.batch_size is 64 on rank 1 and"),
    "fewer rows": ((), ("data.train=rows.h5::/val",), "data.train is 100 rows of digest "),
    "other rows": ((), (OTHER,), "data.train is 700 rows of digest "),
    "other rows to validate on": ((), ("data.val=other.h5::/val",), "data.val is 100 rows of digest "),
    "other rows, of which a share is held out": (("data.val=10%",), (OTHER,), "data.train is "),
    "one process for all GPUs": (("dist.strategy=dp",), (), "dist.strategy is dp, which is for one process"),
}
"""{case: (settings of both ranks, settings of rank 1 only, beginning of the error; none if it is empty)}"""


def build_cases(world: World) -> dict[str, str]:
    """The error of train.build in each case."""
    errors = dict.fromkeys(CASES, "")
    for case, (shared, of_last, _) in CASES.items():
        try:
            parts = build(*shared, *(of_last if world.rank else ()), world=world)
            parts.loader.close()
            parts.val_loader.close()
        except UserError as error:
            errors[case] = str(error)
    return errors


@pytest.mark.slow
def test_ranks_that_differ_are_one_line(folder):
    shutil.copyfile("rows.h5", "copy.h5")
    shutil.copyfile("rows.h5", "other.h5")
    with h5py.File("other.h5", "r+") as file:
        file["train/y"][350] += 1
        file["val/x"][-1] += 1  # one of the rows that stand for a file without checksums
    ours, theirs = in_world(2, build_cases)
    assert ours == theirs
    for case, (_, _, beginning) in CASES.items():
        assert ours[case].startswith(beginning), case
        assert bool(ours[case]) == bool(beginning), case


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "of_last", "message"),
    [
        ("optim.lr=1e30", (), "error: loss is "),
        ("train.epochs=1", ("run.seed=3",), "error: run.seed is 3 on rank 1 and"),
    ],
)
def test_ranks_end_with_the_same_exit_code(folder, word, of_last, message):
    done = run_ranks(word, ranks=2, cwd=folder, more_for_last=of_last)
    assert [process.returncode for process in done] == [2, 2]
    (line,) = [line for process in done for line in process.stderr.splitlines() if not line.startswith("[W")]
    assert line.startswith(message)
    assert (folder / "runs").exists() == (word == "optim.lr=1e30")


def train_and_signal(world: World, *words: str) -> int | str:
    """One rank of train.py. The last rank gets SIGTERM in its sixth step."""
    loss = minimal.Workload.loss
    if world.rank == world.world_size - 1:
        loss = at_call(6, loss, signalled(signal.SIGTERM))
    with patch.object(minimal.Workload, "loss", loss):
        return train_rank(world, *words)


@pytest.mark.slow
def test_ranks_stop_at_one_step_after_a_signal(folder):
    words = ("train.epochs=4", "data.tier=host")
    assert in_world(2, train_rank, "run.name=whole", *words) == [0, 0]
    code = 128 + signal.SIGTERM
    assert in_world(2, train_and_signal, "run.name=stopped", *words) == [code, code]
    run = folder / "runs/stopped"
    saved = max(saved_steps(run))
    assert json.loads((run / "stopped.json").read_text()) == {"step": saved}
    assert 6 <= saved <= 6 + 2 * MAX_CALLS
    assert in_world(2, train_rank, "run.name=stopped", "run.resume=auto", *words) == [0, 0]
    assert same_weights(run, folder / "runs/whole")


@pytest.mark.slow
def test_ranks_name_the_one_that_failed(folder):
    project = copy_project(folder)
    workload = project / "workloads/minimal.py"
    lines = """
import os
from fastgpu.process.launch import UserError
class Workload(Workload):
    def loss(self, model, batch):
        if os.environ["RANK"] == "1":
            raise UserError("labels of class 7 are not allowed")
        return super().loss(model, batch)
"""
    workload.write_text(workload.read_text() + lines)
    started = time.monotonic()
    done = run_train(ranks=2, cwd=folder, root=project)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0] == "error: [rank 1] labels of class 7 are not allowed"
    assert errors[1:] in (
        [],
        [
            "error: [rank 0] the other ranks are gone or hang; see the message of the rank that "
            "failed, or raise dist.timeout_s"
        ],
    )
    assert time.monotonic() - started < 120
