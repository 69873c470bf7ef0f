"""Whole runs on GPUs: one is killed and resumed, on one GPU and on two over NCCL."""

import subprocess

import pytest
import torch

from support.ranks import kill_tree, needs_gpu, printed_by, train_command
from support.runs import same_weights, wait_for_step

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=two_gpus)])
def test_killed_gpu_run_same_weights(folder, ranks):
    words = (
        "dist.device=cuda",
        "run.deterministic=true",
        "run.checkpoint_every_steps=1",
        "train.epochs=20",
        "data.echo=2.5",
    )
    shown = printed_by(train_command("run.name=whole", *words, ranks=ranks), folder)
    assert torch.cuda.get_device_name(0) in shown
    assert ranks == 1 or "nccl" in shown
    run = folder / "runs/a"
    with subprocess.Popen(train_command(*words, ranks=ranks), cwd=folder, stdout=subprocess.DEVNULL) as process:
        wait_for_step(run, 60, process)  # inside the second epoch, which has 52 or 53 steps
        kill_tree(process)
    printed_by(train_command(*words, "run.resume=auto", ranks=ranks), folder)
    assert same_weights(folder / "runs/whole", run)
