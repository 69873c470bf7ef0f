import json
import os

import pytest
import yaml
from fastgpu.telemetry.runs import describe_run, open_run

from fastgpu.process.config import Config
from fastgpu.process.config_loader import flat, load_config
from fastgpu.process.launch import UserError
from fastgpu.telemetry import runs


def saved(path, step=1):
    (path / "checkpoints" / f"last-{step:09d}").mkdir(parents=True)


def test_a_new_run_is_named_by_the_time_and_never_mixed_with_another(tmp_path, monkeypatch):
    monkeypatch.setattr(runs.time, "strftime", lambda _: "20260102-030405")
    assert open_run(str(tmp_path), "auto", False).name == "20260102-030405"
    assert open_run(str(tmp_path), "auto", False).name == "20260102-030405-2"
    assert open_run(str(tmp_path), "mine", False).name == "mine"
    saved(tmp_path / "mine")
    with pytest.raises(UserError, match="run.name: .*mine holds a run; use run.resume=auto to go on with it"):
        open_run(str(tmp_path), "mine", False)
    assert open_run(str(tmp_path), "mine", True).name == "mine"


def test_resuming_takes_the_run_that_saved_last(tmp_path):
    for number, name in enumerate(("b", "c", "a")):
        saved(tmp_path / name)
        os.utime(tmp_path / name / "checkpoints" / "last-000000001", (number, number))
    (tmp_path / "empty").mkdir()
    assert open_run(str(tmp_path), "auto", True).name == "a"


def test_resuming_without_a_run_starts_one(tmp_path):
    assert open_run(str(tmp_path / "none"), "auto", True).is_dir()
    assert open_run(str(tmp_path), "mine", True).is_dir()


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="run.folder: cannot write to .*; use another run.folder or free it"):
        open_run(str(tmp_path / "file"), "x", False)
    with pytest.raises(UserError, match="run.folder: cannot write"):
        open_run(str(tmp_path), "x" * 300, False)


def test_the_description_can_be_run_again(tmp_path):
    values = flat(Config()) | {"data.tier": "disk", "data.canonical_ranks": 8}
    describe_run(tmp_path, values)
    describe_run(tmp_path, values | {"data.canonical_ranks": 4})  # a resumed run adds its own
    assert flat(load_config(["--config", str(tmp_path / "config.yaml")])) == values
    assert yaml.safe_load((tmp_path / "config-2.yaml").read_text())["data"]["lanes"] == 4
    about = json.loads((tmp_path / "run.json").read_text())
    assert {"torch", "h5py", "numpy", "python", "cuda"} <= set(about["versions"])
    assert {"command", "started", "gpu", "git_commit", "git_changes"} <= set(about)


def test_a_disk_that_refuses_does_not_stop_the_run(tmp_path, capsys):
    describe_run(tmp_path / "gone", {})
    assert "gone/run.json (" in (told := capsys.readouterr().out)
    assert "gone/config.yaml (" in told
