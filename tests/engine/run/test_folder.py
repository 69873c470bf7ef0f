import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import ALONE

from fastgpu.process.config import Run
from fastgpu.process.launch import UserError
from fastgpu.run import folder as folder_module
from fastgpu.run.folder import find_changes, find_folder, lock
from fastgpu.telemetry import TensorBoard

CONFIG: dict[str, Any] = {
    "workload": "images",
    "run.name": "a",
    "run.seed": 0,
    "data.train": "a.h5",
    "data.fields": {"images": "x"},
    "data.tier": "disk",
    "loader.num_readers": 2,
    "model.width": 32,
    "optim.lr": 3e-3,
    "train.epochs": 20,
}


def settings(folder: Path, name: str = "auto", resume: str = "never") -> Run:
    return Run(folder=str(folder), name=name, resume=resume)


def make_run(path: Path) -> Path:
    """A run with a checkpoint."""
    (path / "checkpoints/last-000001").mkdir(parents=True)
    return path


def log_to(run: Path) -> TensorBoard:
    return TensorBoard(
        SimpleNamespace(folder=run, config={"log.wandb": ""}, first_row=0, first_step=0), planned_rows=1, world=ALONE
    )


# ---------------------------------------------------------------------------------------------- which folder it is


def test_a_new_run_is_named_by_the_time_and_never_mixed_with_another(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module.time, "strftime", lambda _: "20260102-030405")
    assert find_folder(settings(tmp_path)).name == "20260102-030405"
    (tmp_path / "20260102-030405").mkdir()
    assert find_folder(settings(tmp_path)).name == "20260102-030405-2"
    assert find_folder(settings(tmp_path, "mine")).name == "mine"
    make_run(tmp_path / "mine")
    for _ in range(2):  # the lock is given back
        with pytest.raises(UserError, match="run.name: .*mine holds a run; use run.resume=auto to continue it"):
            lock(tmp_path / "mine", is_new=True)


def test_resuming_takes_the_run_that_saved_last_or_starts_one(tmp_path):
    for number, name in enumerate(("b", "c", "a")):
        make_run(tmp_path / name)
        os.utime(tmp_path / name / "checkpoints/last-000001", (number, number))
    (tmp_path / "empty").mkdir()
    assert find_folder(settings(tmp_path, resume="auto")).name == "a"
    assert find_folder(settings(tmp_path, "c", "auto")).name == "c"
    assert not find_folder(settings(tmp_path / "none", resume="auto")).exists()


@pytest.mark.parametrize("name", ["file/x", "x" * 300])
def test_a_folder_that_cannot_be_written(tmp_path, name):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.folder: cannot write to .*; use another run.folder"):
        lock(tmp_path / name)


def test_what_a_killed_process_left_is_removed_with_the_lock(tmp_path):
    for name in (".partial-x", "copy-of-last-000001"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    lock(tmp_path).close()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["copy-of-last-000001"]


def test_a_lock_is_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "lock").symlink_to(victim)
    with pytest.raises(UserError, match="run.folder: cannot write .*symbolic links"):
        lock(run)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"- a list", b"\xff\xfe", b"a: &a [*a]", b"[" * 5000, b"5"])
def test_files_that_only_describe_a_run_never_stop_it(tmp_path, content):
    run = make_run(tmp_path / "a")
    for name in ("config.yaml", "run.json", "metrics.jsonl"):
        (run / name).write_bytes(content)
    assert find_folder(settings(tmp_path, resume="auto")) == run
    with log_to(run) as log:
        log.write(1, {"val/x": 1.0})


# ---------------------------------------------------------------------------------------------- what changed since


RUN = Path("runs/a")


def test_only_what_is_learned_is_compared():
    others = {"run.name": "b", "data.tier": "host", "loader.num_readers": 9}
    assert find_changes(RUN, CONFIG, CONFIG | others, is_named=False) == []
    assert find_changes(RUN, CONFIG, CONFIG | {"model.depth": 3}) == []  # the run knew no such setting
    changed = {"run.seed": 1, "data.fields": {"images": "y"}, "optim.lr": 0.1}
    assert find_changes(RUN, CONFIG, CONFIG | changed, is_named=False) == [
        "run.seed=1 (was 0)",
        "data.fields={'images': 'y'} (was {'images': 'x'})",
        "optim.lr=0.1 (was 0.003)",
    ]


@pytest.mark.parametrize(("key", "value"), [("model.width", 8), ("data.train", "b.h5")])
def test_the_newest_run_is_not_taken_for_one_of_another_model_or_other_data(key, value):
    changed = CONFIG | {key: value, "optim.lr": 0.1}
    assert len(find_changes(RUN, CONFIG, changed)) == 2
    with pytest.raises(UserError, match=f"run.name=auto takes the newest run, runs/a, but this is .*{key}=.*: name"):
        find_changes(RUN, CONFIG, changed, is_named=False)
