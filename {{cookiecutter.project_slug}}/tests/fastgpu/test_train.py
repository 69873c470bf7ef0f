"""The whole program, as a person starts it."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import psutil
import pytest
import torch
import yaml
from harness import ROOT, numbered, run_ranks, run_train
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fastgpu.process.config import Config
from fastgpu.process.config_loader import keys, load_config

TAGS = {
    "train/loss",
    "train/lr",
    "train/trained_rows_per_s",
    "data/fresh_rows_per_s",
    "data/wait_pct",
    "data/echo",
    "train/step_ms",
    "val/loss",
    "val/top1_pct",
    "val/top5_pct",
}


def test_the_shipped_file_names_every_key_with_its_default():
    with (ROOT / "config.yaml").open() as file:
        tree = yaml.safe_load(file)
    shipped = {f"{s}.{k}": v for s, section in tree.items() if isinstance(section, dict) for k, v in section.items()}
    assert {"workload", *shipped} == {key for key in keys() if not key.startswith("recsys.")}
    assert load_config(["--config", str(ROOT / "config.yaml")]) == Config()


def test_the_shipped_file_is_short_and_points_to_its_schema():
    lines = (ROOT / "config.yaml").read_text().splitlines()
    assert lines[0] == "# yaml-language-server: $schema=config.schema.json"
    assert len(lines) <= 67


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    last = max(folder.glob("checkpoints/last-*"))
    return torch.load(last / "model.pt", weights_only=True)


def short(tmp_path: Path, name: str, *arguments: str) -> list[str]:
    """A run of 3 epochs of 5 pools of 4 steps."""
    small = ("train.epochs=3", "data.pool_batches=4", "log.every_steps=5", "model.width=8")
    return [f"run.folder={tmp_path}", f"run.name={name}", *small, *arguments]


def test_the_shipped_config_reaches_its_accuracy_and_leaves_a_record(tmp_path):
    done = run_train(f"run.folder={tmp_path}", "run.name=digits")
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "digits"
    final = lines(folder)[-1]
    assert final["val/top1_pct"] >= 98
    assert final["step"] == 440  # 20 epochs of 22 whole batches
    tags = set().union(*lines(folder)) - {"step", "time_s"}
    assert {tag for tag in tags if not tag.startswith("host/")} == TAGS
    assert {"host/cpu_user_pct", "host/rss_gib"} <= tags
    events = EventAccumulator(str(folder))
    events.Reload()
    assert set(events.Tags()["scalars"]) == tags
    assert "config/text_summary" in events.Tags()["tensors"]
    left = {"config.yaml", "run.json", "metrics.jsonl", "report.html", "checkpoints"}
    assert left <= {path.name for path in folder.iterdir()}
    assert re.search(r"data wait +[\d.]+ % of the time", done.stdout)
    assert len(list(folder.glob("checkpoints/best-*"))) == 1
    assert "1 CPU process" in done.stdout
    assert "on the device tier" in done.stdout
    assert "tensorboard --logdir" in done.stdout.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("echo", ["1", "2.5"])
def test_killed_and_resumed_is_as_if_nothing_had_happened(tmp_path, ranks, echo):
    options = (f"data.echo={echo}", "run.checkpoint_every_steps=1", "data.tier=disk")
    assert run_train(*short(tmp_path, "whole", *options), ranks=ranks).returncode == 0
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    command = [sys.executable, *launcher, "train.py", *short(tmp_path, "killed", *options)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        wait_for_step(tmp_path / "killed", 30)  # inside the second epoch
        for process in (*psutil.Process(running.pid).children(recursive=True), running):
            process.kill()
    steps = [int(path.name[5:]) for path in (tmp_path / "killed" / "checkpoints").glob("last-*")]
    done = run_train(*short(tmp_path, "killed", *options), "run.resume=auto", ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert f"at step {max(steps)}" in done.stdout
    expected, got = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(expected[name], got[name]) for name in expected)
    assert [x["val/loss"] for x in lines(tmp_path / "whole") if "val/loss" in x][-1] == lines(tmp_path / "killed")[-1][
        "val/loss"
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("crop_pad", "most"), [(1, 4), (0, 2)])
def test_echo_auto_trains_again_while_slow_rows_come(tmp_path, crop_padding, most):
    """A row takes 10 ms to read and far less to train on: the first epoch measures it, the others echo."""
    (tmp_path / "mine.py").write_text(
        "import time, numpy as np\n"
        "from torch.utils.data import Dataset\n"
        "class Slow(Dataset):\n"
        "    class_names = ['a', 'b']\n"
        "    def __init__(self, path): pass\n"
        "    def __len__(self): return 128\n"
        "    def __getitem__(self, i): time.sleep(0.01); return np.full((1, 8, 8), i, np.uint8), i % 2\n"
    )
    options = (
        "data.echo=auto",
        "data.dataset=mine:Slow",
        "data.batch_size=16",
        "data.pool_batches=2",
        "run.name=a",
        "loader.num_workers=1",
        f"model.crop_padding={crop_padding}",
        "log.every_steps=1",
        "model.width=4",
    )
    config = ["--config", str(ROOT / "config.yaml"), *options]
    for epochs, factors in ((1, [1]), (3, [1, most, most])):
        done = run_train(*config, f"train.epochs={epochs}", "run.resume=auto", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        points = [line for line in lines(tmp_path / "runs" / "a") if "data/echo" in line]
        expected = [factor for factor in factors for _ in range(8 * factor)]
        assert [point["data/echo"] for point in points] == pytest.approx(expected)
    assert f"echo {most}" in done.stdout
    assert f"  echo: {most}.0\n" in (tmp_path / "runs" / "a" / "config-2.yaml").read_text()


def wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 120
    while not any(int(path.name[5:]) >= step for path in folder.glob("checkpoints/last-*")):
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.01)


@pytest.mark.slow
def test_a_run_killed_between_the_last_pool_and_validation_goes_on_with_that(tmp_path):
    assert run_train(*short(tmp_path, "a", "train.epochs=1")).returncode == 0
    (state,) = tmp_path.glob("a/checkpoints/last-*/state.json")
    saved = json.loads(state.read_text())
    saved["progress"] |= {"epoch": 0, "consumed": 22 * 64, "best": None}
    state.write_text(json.dumps(saved))
    done = run_train(*short(tmp_path, "a", "train.epochs=2", "run.resume=auto"))
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in lines(tmp_path / "a") if "val/loss" in line] == [22, 22, 44]


@pytest.mark.slow
def test_two_ranks_train_stop_and_resume_under_torchrun(tmp_path):
    first = run_train(*short(tmp_path, "two", "train.epochs=1"), ranks=2)
    assert first.returncode == 0, first.stderr
    assert "2 CPU processes over gloo" in first.stdout
    assert first.stdout.count("epoch 1/1") == 1  # one rank speaks
    second = run_train(*short(tmp_path, "auto", "train.epochs=2", "run.resume=auto"), ranks=2)
    assert second.returncode == 0, second.stderr
    assert f"{tmp_path / 'two'}: 2 CPU processes" in second.stdout  # the newest run is found by itself
    assert [line["step"] for line in lines(tmp_path / "two") if "val/loss" in line] == [22, 44]
    third = run_train(*short(tmp_path, "two", "train.epochs=2", "run.resume=auto"), ranks=2)
    assert third.returncode == 0
    assert "done: epoch 2, step " in third.stdout


@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_torchrun(tmp_path):
    arguments = short(tmp_path, "restart", "run.resume=auto", "run.checkpoint_every_steps=1", "train.epochs=6")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with subprocess.Popen([*launcher, "train.py", *arguments], cwd=ROOT, stderr=subprocess.DEVNULL) as running:
        wait_for_step(tmp_path / "restart", 30)
        ranks = [child for child in psutil.Process(running.pid).children() if "train.py" in child.cmdline()]
        ranks[-1].kill()
        assert running.wait(120) == 0
    assert lines(tmp_path / "restart")[-1]["step"] == 6 * 22


@pytest.mark.slow
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_every_tier_trains_the_same_weights(tmp_path, tier):
    for name in ("device", tier):
        run_train(*short(tmp_path, name, f"data.tier={name}", "run.resume=auto", "loader.num_readers=3"))
    expected, got = weights(tmp_path / "device"), weights(tmp_path / tier)
    assert all(torch.equal(expected[name], got[name]) for name in expected)


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("data.train=nowhere.h5", "error: data.train: nowhere.h5 does not exist"),
        ("data.batch_size=63", r"error: data.batch_size is 63; it should be a multiple of 2 (2 ranks"),
        ("data.batch_size=2000", "error: data.batch_size is 2000, but data/digits.h5::/train has 1,442 rows"),
        ("dist.device=cuda", "error: dist.device is cuda, but torch"),
        ("dist.strategy=dp", "error: dist.strategy is dp, which drives all GPUs from one process, but there are 2"),
        ("run.folder=/proc/nowhere", "error: run.folder: cannot write to /proc/nowhere"),
        ("workload=tables", "error: workload is tables, but workloads/tables.py does not exist; there are: images"),
        ("optim.lr=1e30", "error: the loss is nan at step"),
        ("data.bach_rows=3", "error: command line: unknown key data.bach_rows (did you mean data.batch_size?)"),
    ],
)
def test_bad_input_is_one_line_and_the_same_exit_code_on_every_rank(tmp_path, argument, message):
    if torch.cuda.is_available() and argument == "dist.device=cuda":
        pytest.skip("there is a GPU")
    done = run_ranks(*short(tmp_path, "bad"), argument, ranks=2)
    assert [each.returncode for each in done] == [2, 2]
    errors = [line for each in done for line in each.stderr.splitlines() if not line.startswith("[W")]
    assert len(errors) == 1, errors
    assert errors[0].startswith(message)
    assert not list(tmp_path.glob("**/*.partial"))


def test_a_run_without_its_last_checkpoint_does_not_end_well(tmp_path):
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "checkpoints").touch()  # as good as a full disk
    done = run_ranks(*short(tmp_path, "bad", "train.epochs=1"), ranks=2)
    assert [each.returncode for each in done] == [2, 2]
    assert "epoch 1/1" in done[0].stdout
    assert "was not written (" in done[0].stdout
    assert "error: the run is over, but its last checkpoint is not in" in done[0].stderr


def test_more_ranks_than_blocks(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"], file["labels"] = numbered(40, (1, 8, 8)), np.arange(40) % 3
    data = f"{tmp_path}/x.h5"
    done = run_ranks(*short(tmp_path, "bad"), f"data.train={data}", f"data.val={data}", "data.batch_size=8", ranks=2)
    assert [each.returncode for each in done] == [2, 2]
    assert "2 ranks are more than the 1 blocks (chunks)" in done[0].stderr
    assert done[1].stderr == ""


def test_a_file_cut_during_training_stops_with_its_name(tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("images", data=numbered(4000, (3, 64, 64)), chunks=(20, 3, 64, 64))
        file["labels"] = np.arange(4000) % 3
    path = tmp_path / "x.h5"
    command = [
        sys.executable,
        "train.py",
        *short(tmp_path, "cut", f"data.train={path}", "data.tier=disk", "log.every_steps=1"),
    ]
    with subprocess.Popen(
        [*command, "data.val=" + str(path), "data.pool_batches=1"], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as run:
        while not (tmp_path / "cut" / "metrics.jsonl").exists():
            time.sleep(0.01)
            assert run.poll() is None
        os.truncate(path, path.stat().st_size // 4)
        _, error = run.communicate(timeout=60)
    assert run.returncode != 0
    assert re.fullmatch(r"error: .*/x.h5 (was changed|ends at byte .*) while in use; restore the file.*\n", error)


def test_every_config_field_is_read_by_the_script():
    scripts = (ROOT / "train.py", ROOT / "fastgpu/config.py")  # where `options` hands on whole sections
    read = {
        ".".join(ast.unparse(node).split(".")[-2:])  # of cfg.data.tier, and of data.tier where data is cfg.data
        for script in scripts
        for node in ast.walk(ast.parse(script.read_text()))
        if isinstance(node, ast.Attribute)
    }
    for section, field in Config.model_fields.items():
        whole = f"{section}.model_dump" in read  # handed on, name by name
        for key in getattr(field.annotation, "model_fields", {}):
            assert whole or f"{section}.{key}" in read, f"{section}.{key} is read by nobody"
