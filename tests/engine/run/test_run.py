import json
import re
import time
from math import nan
from pathlib import Path

import pytest
from short_run import STEPS_PER_EPOCH, parts_of, started_run, train_epoch
from torch import nn

from fastgpu import TEMPLATE_VERSION
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.run import checkpoint, record
from fastgpu.run import folder as folder_module
from fastgpu.run.folder import save_times


@pytest.fixture
def model() -> nn.Module:
    return nn.Linear(2, 2)


def checkpoints(folder, kind=""):
    return sorted(path.name for path in (folder / "checkpoints").glob(f"{kind}*"))


# ---------------------------------------------------------------------------------------------- what it ran with


def test_the_config_of_a_run_is_a_valid_config_file(tmp_path, model):
    with started_run(tmp_path, model):
        pass
    written = parts_of(tmp_path, model).config
    assert load_config(["--config", str(tmp_path / "a" / "config.yaml")]).flat() == written.flat()
    with started_run(tmp_path, model, sections={"data": {"pool_batches": 4}}, resume="auto"):
        pass  # a resumed run adds its own
    assert load_config(["--config", str(tmp_path / "a" / "config.yaml")]).flat() == written.flat()
    assert load_config(["--config", str(tmp_path / "a" / "config-2.yaml")]).data.pool_batches == 4


def test_a_run_says_what_it_ran_with_and_what_it_trained(tmp_path, model, monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    with started_run(tmp_path, model):
        pass
    description = json.loads((tmp_path / "a" / "run.json").read_text())
    assert description["template_version"] == TEMPLATE_VERSION
    assert description["best"] == ["score", "higher"]
    assert description["environment"]["NCCL_DEBUG"] == "WARN"
    assert "WANDB_API_KEY" not in description["environment"]
    assert {"torch", "h5py", "numpy", "python", "cuda"} <= set(description["versions"])
    assert {"command", "started", "gpu", "git_commit", "git_changes"} <= set(description)


def test_a_disk_that_refuses_the_description_does_not_stop_the_run(tmp_path, model, monkeypatch, capsys):
    def refuse(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record, "write_own", refuse)
    with started_run(tmp_path, model) as run:
        train_epoch(run)
    printed = capsys.readouterr().out
    assert re.search("warning: cannot write .*/a/run.json .*; training goes on", printed)
    assert re.search("warning: cannot write .*/a/config.yaml .*; training goes on", printed)


# ---------------------------------------------------------------------------------------------- the loop


def test_a_short_run_from_start_to_end(tmp_path, model, capsys):
    with started_run(tmp_path, model) as run:
        train_epoch(run, score=2.0)
        train_epoch(run, score=1.0)
        run.finish()
    folder = tmp_path / "a"
    assert checkpoints(folder) == ["best-000000004", "last-000000004", "last-000000008"]
    assert "done: epoch 2, step 8; " in capsys.readouterr().out


def test_checkpoints_inside_an_epoch(tmp_path, model):
    with started_run(tmp_path, model, checkpoint_every_steps=3) as run:
        for step in range(1, STEPS_PER_EPOCH + 1):
            run.count()
            run.end_pool()
            assert (tmp_path / "a" / "checkpoints").exists() == (step >= 3)
    assert checkpoints(tmp_path / "a") == ["last-000000003"]


def test_no_run_saves_earlier_than_one_before_whatever_the_clock_shows(tmp_path, model, monkeypatch):
    """So run.name=auto resumes the run that saved last, although its clock was an hour slow."""
    for name, clock_s in (("first", 10_000.0), ("second", 6_400.0)):
        with monkeypatch.context() as patch, started_run(tmp_path, model, name=name) as run:
            patch.setattr(time, "time", lambda clock_s=clock_s: clock_s)
            train_epoch(run)
    assert [path.name for path in save_times(tmp_path)] == ["second", "first"]


def test_a_resumed_run_continues_where_it_was(tmp_path, model):
    with started_run(tmp_path, model) as run:
        train_epoch(run, score=2.0)
    with started_run(tmp_path, nn.Linear(2, 2), resume="auto") as run:
        progress = run.progress
        assert (progress.epoch, progress.step, progress.pool, progress.best) == (1, 4, 0, 2.0)


def test_the_best_checkpoint_is_kept_by_the_value_of_the_metric(tmp_path, model):
    kept = []
    with started_run(tmp_path, model) as run:
        for score in (3.0, 1.0, nan, 4.0, 2.0, 4.0):
            train_epoch(run, score=score)
            (name,) = checkpoints(tmp_path / "a", "best")
            kept.append(int(name.removeprefix("best-")) // STEPS_PER_EPOCH)
    assert kept == [1, 1, 1, 4, 4, 4]


def test_a_kill_between_two_checkpoints_loses_no_best_one(tmp_path, model, monkeypatch):
    save = checkpoint.save

    def killed_before_the_last(run, kind, *arguments, **options):
        if kind == "last":
            raise KeyboardInterrupt
        return save(run, kind, *arguments, **options)

    monkeypatch.setattr(checkpoint, "save", killed_before_the_last)
    with started_run(tmp_path, model) as run, pytest.raises(KeyboardInterrupt):
        train_epoch(run)
    assert checkpoints(tmp_path / "a") == [f"best-{STEPS_PER_EPOCH:09d}"]


def test_a_first_value_that_is_not_a_number_does_not_stay_the_best(tmp_path, model):
    with started_run(tmp_path, model) as run:
        train_epoch(run, score=nan)
        assert checkpoints(tmp_path / "a", "best") == []
        train_epoch(run, score=0.1)
        assert checkpoints(tmp_path / "a", "best") == ["best-000000008"]


def test_any_metric_may_decide_which_checkpoint_is_the_best(tmp_path, model):
    with started_run(tmp_path, model, best=("loss", "lower")) as run:
        for number, loss in enumerate((0.5, 0.3, 0.4)):
            train_epoch(run, loss=loss, score=number)  # the score is the best in the last epoch
    assert checkpoints(tmp_path / "a", "best") == ["best-000000008"]


def test_a_resumed_run_may_choose_another_metric(tmp_path, model):
    with started_run(tmp_path, model) as run:
        train_epoch(run, score=1000.0, loss=0.5)
    with started_run(tmp_path, model, best=("loss", "lower"), resume="auto") as run:
        train_epoch(run, score=0.0, loss=0.6)
        assert run.progress.best == 0.6
    assert checkpoints(tmp_path / "a", "best") == ["best-000000008"]


def test_a_run_whose_last_checkpoint_is_not_on_disk_ends_with_an_error(tmp_path, model, capsys):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "checkpoints").touch()  # as good as a full disk
    with started_run(tmp_path, model) as run:
        train_epoch(run)
        with pytest.raises(UserError, match="last checkpoint is not in .*/a: make room, and resume it"):
            run.finish()
    printed = capsys.readouterr().out
    assert "last-000000004 was not written: " in printed
    assert "done:" not in printed


@pytest.mark.parametrize("resume", ["never", "auto"])
def test_a_folder_in_which_another_process_began_meanwhile_is_left_alone(tmp_path, model, monkeypatch, resume):
    lock = folder_module.lock

    def wait_for_the_other(path: Path):
        (path / "checkpoints/last-000000001").mkdir(parents=True)
        return lock(path)

    monkeypatch.setattr(folder_module, "lock", wait_for_the_other)
    message = "another process has begun a run in .*/a meanwhile; use another run.name"
    with pytest.raises(UserError, match=message), started_run(tmp_path, model, resume=resume):
        pass
    assert not (tmp_path / "a/config.yaml").exists()
