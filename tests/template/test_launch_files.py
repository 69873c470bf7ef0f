"""launch/slurm.sh with stand-ins for Slurm: which ends of a job put it into the queue again. See test_slurm.py, too."""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "{{cookiecutter.project_slug}}" / "launch"


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs that come first on PATH, and runs/slurm-7.

    srun writes down what it was asked for, and ends with $CHECK_CODE for the check and with $CODE for the training.
    """
    programs = {
        "srun": 'echo "$LAUNCH_STEP" >> steps\n[ "$LAUNCH_STEP" = train ] && exit "$CODE"\nexit "${CHECK_CODE:-0}"\n',
        "scontrol": 'if [ "$1" = requeue ]; then echo "requeue $2"; else echo node-a; fi\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "runs/slurm-7").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    variables = {"SLURM_NNODES": 1, "SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node-a", "SLURM_GPUS_ON_NODE": 8}
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


def run_slurm(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAUNCH / "slurm.sh"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "end",
    [(0, False, False), (0, True, True), (1, False, False), (1, True, False), (137, False, True), (143, True, True)],
)
def test_slurm_queues_what_a_new_start_can_cure_and_nothing_else(stand_ins, monkeypatch, end):
    code, is_stopped, is_requeued = end
    monkeypatch.setenv("CODE", str(code))
    if is_stopped:
        (stand_ins / "runs/slurm-7/stopped.json").touch()
    done = run_slurm(stand_ins)
    assert done.returncode == code, done.stderr
    assert ("requeue 7" in done.stdout) == is_requeued


def test_a_mistake_ends_the_job_before_the_training(stand_ins, monkeypatch):
    monkeypatch.setenv("CHECK_CODE", "2")
    done = run_slurm(stand_ins)
    assert done.returncode == 2
    assert "requeue" not in done.stdout
    assert [line.split()[0] for line in (stand_ins / "steps").read_text().splitlines()] == ["check"]


def test_a_job_without_gpus_says_how_to_set_the_number_of_processes(stand_ins, monkeypatch):
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    done = run_slurm(stand_ins)
    assert done.returncode != 0
    assert "PROCS=4 sbatch" in done.stderr


def test_a_job_that_ends_again_and_again_is_not_queued_for_ever(stand_ins, monkeypatch):
    monkeypatch.setenv("CODE", "137")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "50")
    done = run_slurm(stand_ins)
    assert done.returncode == 1
    assert "requeue 7" not in done.stdout
    assert "queued again 50 times" in done.stderr
