"""Short runs of train.py: what is stopped and resumed ends with the weights of a run that was never stopped.

python tests/test_run.py N [key=value ...] is train.py, asked to stop after its step N; torchrun starts it on two ranks.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROJECT = Path(__file__).parents[1]
RANKS = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
N_STEPS = 4
STOP_AT = 3  # inside the second pool, which is trained on twice


def train_until(step: int, folder: Path, *words: str, launcher: list[str] | None = None) -> Path:
    """Train config.yaml up to a step, in a folder of runs. Returns the folder of the run."""
    words = (*words, "data.echo=1.5", f"run.folder={folder}", "run.name=run", "log.every_steps=1")
    command = [*(launcher or [sys.executable]), str(Path(__file__)), str(step), *words]
    paths = {"PYTHONPATH": str(PROJECT)}
    done = subprocess.run(command, cwd=PROJECT, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
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


@pytest.mark.parametrize("launcher", [None, pytest.param(RANKS, marks=pytest.mark.slow)], ids=["alone", "two ranks"])
def test_a_stopped_and_resumed_run_ends_with_equal_weights(words, tmp_path, launcher):
    whole = train_until(N_STEPS, tmp_path / "whole", *words, launcher=launcher)
    train_until(STOP_AT, tmp_path / "stopped", *words, launcher=launcher)
    resumed = train_until(N_STEPS, tmp_path / "stopped", *words, "run.resume=auto", launcher=launcher)
    assert_same_weights(whole, resumed)
    assert (whole / "metrics.jsonl").read_text()


@pytest.mark.skipif(not (PROJECT / "predict.py").exists(), reason="the project has no predict.py")
def test_rows_are_predicted_from_a_checkpoint(config, words, tmp_path):
    first = next(iter(config.data.val_sets.values()))
    rows = config.data.train if str(first).endswith("%") else first
    if config.data.dataset != "none" or not isinstance(rows, str):
        pytest.skip("the rows are not one HDF5 file")
    run = train_until(1, tmp_path / "runs", *words)
    command = [sys.executable, "predict.py", str(run), rows, "-o", str(tmp_path / "out.csv")]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out.csv").read_text().splitlines()) > 1


def stop_after(step: int) -> None:
    """Let train.py save and end after a step, on all ranks."""
    from fastgpu.run import Run

    def should_stop(run: Run) -> bool:
        if run.progress.step >= step:
            run.save()
            sys.exit()
        return False

    Run.should_stop = should_stop


if __name__ == "__main__":
    stop_after(int(sys.argv.pop(1)))
    runpy.run_path(str(PROJECT / "train.py"), run_name="__main__")
