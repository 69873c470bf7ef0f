"""Ranks that were started with other settings, rows or code: each node has a copy of its own. Nodes come and go."""

import os
import shutil
import signal
from itertools import count
from pathlib import Path

import h5py
import pytest
import torch
import train as script
from harness import in_world, run_ranks, train, train_rank, weights_of

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.process.world import World

CASES = {
    "nothing differs": ((), None),
    "another place for the same rows": (("data.train=copy.h5::/train", "data.tier=host", "loader.num_readers=3"), None),
    "seed": (("run.seed=3",), "run.seed is 3 on rank 1 and"),
    "batch size": (("data.batch_size=64",), "data.batch_size is 64 on rank 1 and"),
    "model": (("model.hidden_dim=8",), "model.hidden_dim is 8 on rank 1 and"),
    "fewer rows": (("data.train=rows.h5::/val",), "data.train is 100 rows of digest "),
    "no rows": (("data.train=nowhere.h5",), "data.train: nowhere.h5 does not exist"),
    "other rows": (("data.train=other.h5::/train",), "data.train is 700 rows of digest "),
    "other rows to validate on": (("data.val=other.h5::/val",), "data.val is 100 rows of digest "),
    "other rows, of which a share is held out": (("data.train=other.h5::/train", "data.val=10%"), "data.train is "),
}
"""{case: (settings of rank 1 only, beginning of the error)}"""
ON_ALL = {
    "one process for all GPUs": (("dist.strategy=dp",), "dist.strategy is dp, which is for one process"),
}
"""The same, for settings of all ranks."""


def build_cases(world: World, folder: Path) -> dict[str, str | None]:
    """{case: the error of train.build}"""
    os.chdir(folder)
    errors: dict[str, str | None] = {}
    for name, (own, _) in CASES.items():
        shared = ["data.val=10%"] if "data.val=10%" in own else []
        errors[name] = build_error([*shared, *(own if world.rank else ())], world)
    for name, (words, _) in ON_ALL.items():
        errors[name] = build_error([*words], world)
    return errors


def build_error(overrides: list[str], world: World) -> str | None:
    try:
        parts = script.build(load_config([*dict.fromkeys(overrides)]), world)
    except UserError as error:
        return str(error)
    parts.loader.close()
    parts.val_loader.close()
    return None


@pytest.mark.slow
def test_ranks_that_differ_end_with_one_line_that_names_the_difference(folder):
    shutil.copyfile("rows.h5", "copy.h5")
    shutil.copyfile("rows.h5", "other.h5")
    with h5py.File("other.h5", "r+") as file:
        file["train/y"][350] += 1
        file["val/x"][-1] += 1  # one of the rows that stand for a file without checksums
    ranks = in_world(2, build_cases, folder)
    assert ranks[0] == ranks[1]
    for name, (_, beginning) in (CASES | ON_ALL).items():
        error = ranks[0][name]
        if beginning is None:
            assert error is None, name
        else:
            assert error, name
            assert error.startswith(beginning), name


@pytest.mark.slow
def test_every_rank_that_differs_ends_with_the_same_exit_code(folder):
    done = run_ranks("train.epochs=1", ranks=2, cwd=folder, more_for_last=("run.seed=3",))
    assert [process.returncode for process in done] == [2, 2]
    (line,) = [line for process in done for line in process.stderr.splitlines() if not line.startswith("[W")]
    assert line.startswith("error: run.seed is 3 on rank 1 and")
    assert not (folder / "runs").exists()


@pytest.mark.slow
def test_a_run_goes_on_inside_an_epoch_with_another_number_of_ranks(folder, monkeypatch):
    words = ("optim.name=sgd", "optim.lr=0.01")
    train("run.name=whole", *words)
    step, calls = script.train_step, count(1)

    def step_and_stop(*arguments):
        if next(calls) == 30:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(script, "train_step", step_and_stop)
        assert train(*words) == 128 + signal.SIGTERM
    assert in_world(2, train_rank, folder, "run.resume=auto", *words) == [0, 0]
    ours, theirs = weights_of(folder / "runs/whole"), weights_of(folder / "runs/a")
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)  # gradients are added in another order
