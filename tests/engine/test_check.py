"""`train.py --check` says what training would say, for any number of ranks, and leaves no run behind."""

import shutil
from collections import namedtuple

import h5py
import pytest
import torch
import train as script
from harness import ALONE, run_train
from torch import distributed as dist

from fastgpu.check import _checkpoint_bytes, check
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import Launch, UserError
from fastgpu.process.world import join
from workloads import minimal

SIXTEEN = Launch(world_size=16, local_world_size=8)
MISTAKES = [
    ["data.train=none.h5"],
    ["data.train=rows.h5::/other"],
    ["data.val=100%"],
    ["data.fields={x: z, y: y}"],
    ["data.verify=true"],  # the file has no checksums
    ["data.balance=classes"],
    ["data.canonical_ranks=5"],
    ["data.batch_size=100000"],
    ["optim.accumulation_steps=5"],
    ["model.hidden=0"],
    ["model.hidden_dim=wide"],
    ["workload=other"],
    ["dist.device=cuda"],
]


def check_words(*words: str, launch: Launch = SIXTEEN) -> None:
    check(load_config([*words]), launch)


def test_what_is_checked_is_printed_and_nothing_is_started(folder, capsys):
    check_words()
    printed = capsys.readouterr().out
    assert "16 CPU processes" in printed
    assert "batches: 32 rows over all ranks, 2 on each" in printed
    assert "data.train: 700 rows; the first block of 1 files is read, and verified in 0" in printed
    n_weights = sum(parameter.numel() for parameter in script.build(load_config([]), ALONE).model.parameters())
    assert f"model: {n_weights:,} weights" in printed
    assert not dist.is_initialized()
    assert not list((folder / "runs").iterdir())


def train(*words: str) -> None:
    config = load_config([*words])
    with join(Launch(), config.dist) as world:
        script.train(config, world)


@pytest.mark.parametrize("words", MISTAKES, ids=str)
@pytest.mark.skipif(torch.cuda.is_available(), reason="one of the mistakes is to ask for a GPU")
def test_a_mistake_has_the_message_of_training(folder, words):
    with pytest.raises(UserError) as of_check:
        check_words(*words, launch=Launch())
    with pytest.raises(UserError) as of_training:
        train(*words)
    assert str(of_check.value) == str(of_training.value)


def test_the_batch_is_checked_for_the_ranks_of_the_job(folder):
    with pytest.raises(UserError, match=r"data.batch_size is 40; it should be a multiple of 16 \(16 ranks"):
        check_words("data.batch_size=40")
    check_words("data.batch_size=40", launch=Launch())


def test_every_size_that_a_job_may_have_is_checked(folder, monkeypatch):
    monkeypatch.setenv("PET_NNODES", "1:2")
    with pytest.raises(UserError, match="means 8 for 8 ranks, 16 for 16 ranks: the batches would change .*ranks=16"):
        check_words()
    check_words("data.canonical_ranks=16")
    monkeypatch.setenv("PET_NNODES", "1:3")
    with pytest.raises(UserError, match=r"data.batch_size is 32; it should be a multiple of 24 \(24 ranks"):
        check_words()
    monkeypatch.setenv("PET_NNODES", "1:2")
    check_words(launch=Launch(world_size=2))


def test_a_damaged_first_block_is_found_in_any_shard(folder):
    for number in range(3):
        shutil.copyfile("rows.h5", f"part-{number}.h5")
    with h5py.File("part-2.h5", "r+") as file:
        data = file["train/x"]
        digests = file.create_group("train/fastgpu_sha256")
        digests.create_dataset("x", data=[[0] * 32] * -(-len(data) // data.chunks[0]), dtype="u1")
        digests.create_dataset("y", data=[[0] * 32], dtype="u1")
    with pytest.raises(UserError, match=r"part-2.h5::/train: x: block 0 is damaged"):
        check_words("data.train=[part-0.h5::/train, part-1.h5::/train, part-2.h5::/train]")


def test_room_for_the_checkpoints(folder, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("fastgpu.check.shutil.disk_usage", lambda path: usage(1000))
    with pytest.raises(UserError, match=r"run.folder is runs, where 0.0 MiB are free, but the checkpoints .* take"):
        check_words()


def test_the_estimate_of_a_checkpoint_is_near(folder):
    script.train(load_config(["train.epochs=1", "train.ema=0.9"]), ALONE)
    saved = folder / "runs/a/checkpoints/last-000000021"
    written = sum(path.stat().st_size for path in saved.iterdir())
    config = load_config(["train.ema=0.9"])
    estimate = _checkpoint_bytes(script.build(config, ALONE).model, config.optim, has_average=True)
    assert estimate < written < estimate + 20_000  # names, shapes and JSON


def test_a_model_that_looks_at_its_weights_is_made_on_the_cpu(folder, monkeypatch):
    def model(self) -> torch.nn.Module:
        return torch.nn.Linear(6, round(float(torch.linspace(0, 2, 3)[-1])))

    monkeypatch.setattr(minimal.Workload, "model", model)
    check_words()


def test_a_run_of_that_name_is_refused_as_in_training(folder):
    script.train(load_config(["train.epochs=1"]), ALONE)
    with pytest.raises(UserError, match="holds a run; use run.resume=auto"):
        check_words()
    check_words("run.resume=auto")
    with pytest.raises(UserError, match="was trained with"):
        check_words("run.resume=auto", "run.name=auto", "data.train=rows.h5::/val", launch=Launch())


@pytest.mark.slow
def test_the_exit_code_is_that_of_a_mistake(folder):
    environment = {"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    good = run_train("--check", **environment)
    assert good.returncode == 0, good.stderr
    bad = run_train("data.batch_size=40", "--check", cwd=folder, **environment)
    assert bad.returncode == 2
    assert bad.stderr.startswith("error: data.batch_size is 40")
    assert len(bad.stderr.splitlines()) == 1
