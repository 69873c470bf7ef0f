"""A run that makes no progress is not started again and again."""

from itertools import count

import pytest
import train as script
from harness import ALONE

from fastgpu.check import check
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import Launch, UserError

RESUME = ("run.resume=auto", "log.to=[]", "run.checkpoint_every_steps=1")
POOL_STEPS = 4
"""A checkpoint is saved after so many steps, at the end of a pool."""


def train(epochs: int = 2) -> None:
    script.train(load_config([*RESUME, f"train.epochs={epochs}"]), ALONE)


def fail_after(n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a run whose process dies after so many steps."""
    numbers = count()
    step = script.train_step

    def step_or_die(*arguments):
        if next(numbers) == n_steps:
            raise RuntimeError("killed")
        return step(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(script, "train_step", step_or_die)
        with pytest.raises(RuntimeError, match="killed"):
            train()


@pytest.mark.parametrize("steps_before", [0, POOL_STEPS])
def test_after_three_starts_without_a_checkpoint_the_fourth_is_refused(folder, monkeypatch, steps_before):
    fail_after(steps_before, monkeypatch)
    for _ in range(2 if steps_before == 0 else 3):
        fail_after(POOL_STEPS - 1, monkeypatch)
    with pytest.raises(UserError, match=r"runs/a was started 3 times without saving a checkpoint, last at 2\d\d\d-"):
        train()
    with pytest.raises(UserError, match="then delete runs/a/starts.txt"):
        check(load_config([*RESUME]), Launch())
    train(epochs=0)  # it only validates
    (folder / "runs/a/starts.txt").unlink()
    train()


def test_a_checkpoint_is_progress(folder, monkeypatch):
    for _ in range(4):
        fail_after(POOL_STEPS, monkeypatch)
    train()


def test_a_finished_run_may_be_started_at_any_time(folder):
    for _ in range(4):
        train()
    assert not (folder / "runs/a/starts.txt").exists()
