import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from harness import ALONE

from fastgpu.process.config import Run
from fastgpu.process.files import FolderLock
from fastgpu.process.launch import UserError
from fastgpu.run import folder as folder_module
from fastgpu.run.folder import (
    create_folder,
    describe_changes,
    describe_choice,
    find_changes,
    find_folder,
    refuse_another,
    save_times,
)
from fastgpu.telemetry import TensorBoard

CONFIG: dict[str, Any] = {
    "workload": "images",
    "run.name": "a",
    "run.seed": 0,
    "data.train": "a.h5",
    "data.fields": {"images": "x"},
    "data.tier": "disk",
    "data.echo": 1.0,
    "loader.num_readers": 2,
    "model.width": 32,
    "model.flip": False,
    "optim.lr": 3e-3,
    "train.epochs": 20,
}


def settings(folder: Path, name: str = "auto", resume: str = "never") -> Run:
    return Run(folder=str(folder), name=name, resume=resume)


def make_run(path: Path, config: dict[str, Any] | None = None) -> Path:
    """A run with a checkpoint and a config."""
    (path / "checkpoints" / "last-000001").mkdir(parents=True)
    tree: dict[str, Any] = {}
    for key, value in (config or CONFIG).items():
        section, _, name = key.rpartition(".")
        branch = tree.setdefault(section, {}) if section else tree
        branch[name] = value
    (path / "config.yaml").write_text(yaml.safe_dump(tree))
    return path


# ---------------------------------------------------------------------------------------------- which folder it is


def test_a_new_run_is_named_by_the_time_and_never_mixed_with_another(tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module.time, "strftime", lambda _: "20260102-030405")
    assert find_folder(settings(tmp_path)).name == "20260102-030405"
    create_folder(tmp_path / "20260102-030405")
    assert find_folder(settings(tmp_path)).name == "20260102-030405-2"
    assert find_folder(settings(tmp_path, "mine")).name == "mine"
    make_run(tmp_path / "mine")
    with pytest.raises(UserError, match="run.name: .*mine holds a run; use run.resume=auto to continue it"):
        find_folder(settings(tmp_path, "mine"))
    assert find_folder(settings(tmp_path, "mine", "auto")).name == "mine"


def test_resuming_takes_the_run_that_saved_last(tmp_path):
    for number, name in enumerate(("b", "c", "a")):
        make_run(tmp_path / name)
        os.utime(tmp_path / name / "checkpoints" / "last-000001", (number, number))
    (tmp_path / "empty").mkdir()
    assert find_folder(settings(tmp_path, resume="auto")).name == "a"


def test_what_a_run_recorded_counts_more_than_the_times_of_its_files(tmp_path):
    """A copy of a folder has new times, and a clock may be wrong."""
    for number, name in enumerate(("new", "middle", "old")):  # the old one has the newest files
        state = make_run(tmp_path / name) / "checkpoints" / "last-000001" / "state.json"
        state.write_text(json.dumps({"progress": {"saved_at": 86_400.0 * (9 - number)}}))
    chosen = find_folder(settings(tmp_path, resume="auto"))
    assert chosen.name == "new"
    text = describe_choice(chosen, settings(tmp_path, resume="auto"))
    assert text == f"run.name=auto resumes {tmp_path}/new, which saved last of 3 runs"
    assert describe_choice(chosen, settings(tmp_path, "new", "auto")) == ""


def test_resuming_without_a_run_starts_one(tmp_path):
    assert not find_folder(settings(tmp_path / "none", resume="auto")).exists()
    assert find_folder(settings(tmp_path, "mine", "auto")) == tmp_path / "mine"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.folder: cannot write to .*; use another run.folder"):
        create_folder(find_folder(settings(tmp_path / "file", "x")))
    with pytest.raises(UserError, match="run.folder: cannot write"):
        create_folder(find_folder(settings(tmp_path, "x" * 300)))


# ---------------------------------------------------------------------------------------------- whose it is


def test_only_what_is_learned_is_compared(tmp_path):
    run = make_run(tmp_path / "a")
    assert find_changes(run, CONFIG) == {}
    assert find_changes(run, CONFIG | {"run.name": "b", "data.tier": "host", "loader.num_readers": 9}) == {}
    assert find_changes(run, CONFIG | {"model.depth": 3}) == {}  # the run knew no such setting
    changed = CONFIG | {"run.seed": 1, "optim.lr": 0.1, "data.fields": {"images": "y"}}
    assert find_changes(run, changed) == {
        "run.seed": ("0", "1"),
        "optim.lr": ("0.003", "0.1"),
        "data.fields": ('{"images": "x"}', '{"images": "y"}'),
    }


def test_the_newest_config_counts_and_none_before_the_first_checkpoint(tmp_path):
    run = make_run(tmp_path / "a")
    later = make_run(tmp_path / "b", CONFIG | {"train.epochs": 30})
    (later / "config.yaml").rename(run / "config-2.yaml")
    assert find_changes(run, CONFIG) == {"train.epochs": ("30", "20")}
    (run / "checkpoints" / "last-000001").rmdir()
    assert find_changes(run, CONFIG) == {}


@pytest.mark.parametrize("name", ["auto", "a"])
def test_another_workload_is_refused(tmp_path, name):
    changes = {"workload": ('"minimal"', '"images"'), "optim.lr": ("1", "2")}
    message = 'a was trained with workload="minimal", this is workload="images"; .*run.name'
    with pytest.raises(UserError, match=message):
        refuse_another(tmp_path / "a", settings(tmp_path, name, "auto"), changes)


@pytest.mark.parametrize(("key", "old", "new"), [("model.width", "32", "4"), ("data.train", '"a.h5"', '"b.h5"')])
def test_another_model_or_data_is_refused_unless_the_run_was_named(tmp_path, key, old, new):
    with pytest.raises(UserError) as error:
        refuse_another(tmp_path / "a", settings(tmp_path, resume="auto"), {key: (old, new)})
    assert str(error.value) == (
        f"{tmp_path}/a was trained with {key}={old}, this is {key}={new}; run.name=auto takes the newest run: name the "
        "run to resume with run.name, or use run.resume=never"
    )
    refuse_another(tmp_path / "a", settings(tmp_path, "a", "auto"), {key: (old, new)})


def test_other_changes_are_said(tmp_path):
    changes = {"train.epochs": ("20", "30"), "optim.lr": ("0.003", "0.1")}
    refuse_another(tmp_path / "a", settings(tmp_path, resume="auto"), changes)
    assert describe_changes(changes).splitlines() == [
        "resumed with train.epochs=30 (was 20): the learning rate follows the new length",
        "resumed with optim.lr=0.1 (was 0.003)",
    ]
    assert describe_changes({}) == ""


def test_a_lock_is_not_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        FolderLock(tmp_path)
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("content", [b"", b"- a list", b"\xff\xfe", b"a: &a [*a]", b"[" * 5000, b"5"])
def test_files_that_only_describe_a_run_never_stop_it(tmp_path, content):
    run = make_run(tmp_path / "a")
    for name in ("config.yaml", "run.json", "metrics.jsonl"):
        (run / name).write_bytes(content)
    assert find_changes(run, CONFIG) == {}
    assert find_folder(settings(tmp_path, resume="auto")) == run
    started = SimpleNamespace(folder=run, config={"log.wandb": ""}, first_row=0, first_step=0)
    with TensorBoard(started, 1, ALONE) as log:
        log.write(1, {"val/x": 1.0})


@pytest.mark.parametrize("saved_at", ["Infinity", "1e300", '"today"', "null", "-1.0"])
def test_a_time_that_cannot_be_is_not_believed(tmp_path, saved_at):
    state = make_run(tmp_path / "a") / "checkpoints" / "last-000001" / "state.json"
    state.write_text(f'{{"progress": {{"saved_at": {saved_at}}}}}')
    (time_s,) = save_times(tmp_path).values()
    assert time_s == state.parent.stat().st_mtime
