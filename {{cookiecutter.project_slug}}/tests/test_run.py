"""Short runs of train.py: what is stopped and resumed ends with the weights of a run that was never stopped.

python tests/test_run.py N [key=value ...] is train.py, asked to stop after its step N; torchrun starts it on two ranks.
"""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from contract import ON_A_CPU

PROJECT = Path(__file__).parents[1]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
N_STEPS = 12


def train_until(step: int, folder: Path, *words: str, launcher: list[str] | None = None) -> Path:
    """Train config.yaml up to a step, in a folder of runs. Returns the folder of the run."""
    words = (*ON_A_CPU, "data.echo=1.5", f"run.folder={folder}", "run.name=run", "log.every_steps=3", *words)
    command = [*(launcher or [sys.executable]), str(Path(__file__)), str(step), *words]
    paths = {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=PROJECT, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 128 + signal.SIGTERM), done.stderr
    return folder / "run"


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    """The model of the newest checkpoint."""
    newest = max(run.glob("checkpoints/last-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    return torch.load(newest / "model.pt", weights_only=True)


def assert_same_weights(run: Path, other: Path) -> None:
    """Compare weights and running statistics bit for bit."""
    weights = weights_of(run)
    others = weights_of(other)
    assert weights.keys() == others.keys()
    for name, values in weights.items():
        assert torch.equal(values, others[name]), name


def test_a_stopped_and_resumed_run_ends_with_equal_weights(config, tmp_path):
    whole = train_until(N_STEPS, tmp_path / "whole")
    train_until(N_STEPS // 2, tmp_path / "stopped")
    resumed = train_until(N_STEPS, tmp_path / "stopped", "run.resume=auto")
    assert_same_weights(whole, resumed)
    assert (whole / "metrics.jsonl").read_text()


@pytest.mark.slow
def test_two_ranks_stop_and_resume_to_equal_weights(config, tmp_path):
    words = (f"data.batch_size={config.data.batch_size + config.data.batch_size % 2}",)
    whole = train_until(N_STEPS, tmp_path / "whole", *words, launcher=RANKS)
    train_until(N_STEPS // 2, tmp_path / "stopped", *words, launcher=RANKS)
    resumed = train_until(N_STEPS, tmp_path / "stopped", *words, "run.resume=auto", launcher=RANKS)
    assert_same_weights(whole, resumed)


@pytest.mark.skipif(not (PROJECT / "predict.py").exists(), reason="the project has no predict.py")
def test_the_validation_rows_are_predicted_from_a_checkpoint(config, tmp_path):
    if config.data.dataset != "none" or not isinstance(config.data.val, str) or config.data.val.endswith("%"):
        pytest.skip("data.val is no HDF5 file")
    run = train_until(1, tmp_path / "runs")
    command = [sys.executable, "predict.py", str(run), config.data.val, "-o", str(tmp_path / "out.csv")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "out.csv").read_text().splitlines()
    assert len(lines) > 1


def stop_after(step: int) -> None:
    """Make train.py meet SIGTERM at a step, on all ranks."""
    from fastgpu.run import Run

    def should_stop(run: Run) -> bool:
        run._stop_signal.number = int(signal.SIGTERM) if run.progress.step >= step else 0
        return run._stop_signal.number > 0

    Run.should_stop = should_stop


if __name__ == "__main__":
    stop_after(int(sys.argv.pop(1)))
    runpy.run_path(str(PROJECT / "train.py"), run_name="__main__")
