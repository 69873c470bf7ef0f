"""Ranks that were started with other settings or rows: each node has a copy of its own."""

import re
import shutil
import signal

import h5py
import pytest

from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from support.ranks import TIMEOUT_S, in_world, run_ranks, started_ranks
from support.runs import build, wait_for_step

OTHER = "data.train=other.h5::/train"
COPY = ("data.train=copy.h5::/train", "data.tier=host", "loader.num_readers=3")
CASES = {
    "another place for the same rows": ((), COPY, ""),
    "batch size": ((), ("data.batch_size=64",), "data.batch_size is 64 on rank 1 and"),
    "fewer rows": ((), ("data.train=rows.h5::/val",), "data.train is 100 rows of fingerprint "),
    "other rows": ((), (OTHER,), "data.train is 700 rows of fingerprint "),
    "other rows to validate on": ((), ("data.val=other.h5::/val",), "data.val is 100 rows of fingerprint "),
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
            parts.close()
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


@pytest.mark.slow
def test_ranks_that_wait_for_a_stopped_one_say_so(folder):
    """One line, after dist.timeout_s: that of gloo, which ends with an error that Python sees."""
    with started_ranks("dist.timeout_s=3", "train.epochs=10000", "run.checkpoint_every_steps=5", cwd=folder) as ranks:
        wait_for_step(folder / "runs/a", 5, ranks[0])
        ranks[1].send_signal(signal.SIGSTOP)
        _, errors = ranks[0].communicate(timeout=TIMEOUT_S)
    (line,) = [line for line in errors.splitlines() if not line.startswith("[W")]
    assert re.fullmatch("error: .rank 0. the other ranks are gone or hang; .*, or raise dist.timeout_s", line)
    assert ranks[0].returncode == 2
