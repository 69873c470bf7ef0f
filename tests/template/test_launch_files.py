"""launch/slurm.sh and launch/node.sh with stand-ins for all programs that they call. See test_slurm.py, too."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from template import PROJECT

LAUNCH = PROJECT / "launch"


def write_programs(folder: Path, programs: dict[str, str]) -> None:
    """Shell scripts: {name: their lines}."""
    for name, text in programs.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)


# ---------------------------------------------------------------------------------------------- slurm.sh


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs that come first on PATH, and runs/slurm-7.

    srun writes down what it was asked for, and ends with $CHECK_CODE for the check and with $CODE for the training.
    """
    programs = {
        "srun": 'echo "$LAUNCH_STEP" >> steps\n[ "$LAUNCH_STEP" = train ] && exit "$CODE"\nexit "${CHECK_CODE:-0}"\n',
        "scontrol": 'if [ "$1" = requeue ]; then echo "requeue $2"; else echo node-a; fi\n',
    }
    write_programs(tmp_path, programs)
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
    ("code", "is_stopped", "restarts", "is_requeued"),
    [
        (0, False, 0, False),
        (0, True, 0, True),
        (1, False, 0, False),
        (1, True, 0, False),
        (137, False, 0, True),
        (143, True, 0, True),
        (137, False, 50, False),
    ],
)
def test_slurm_queues_what_a_new_start_can_cure_and_not_for_ever(
    slurm, monkeypatch, code, is_stopped, restarts, is_requeued
):
    monkeypatch.setenv("CODE", str(code))
    monkeypatch.setenv("SLURM_RESTART_COUNT", str(restarts))
    if is_stopped:
        (slurm / "runs/slurm-7/stopped.json").touch()
    done = run_slurm(slurm)
    assert done.returncode == (1 if restarts else code), done.stderr
    assert ("requeue 7" in done.stdout) == is_requeued
    assert ("queued again 50 times" in done.stderr) == (restarts == 50)


def test_a_mistake_ends_the_job_before_the_training(slurm, monkeypatch):
    monkeypatch.setenv("CHECK_CODE", "2")
    done = run_slurm(slurm)
    assert done.returncode == 2
    assert "requeue" not in done.stdout
    assert (slurm / "steps").read_text().split()[0] == "check"
    assert "train" not in (slurm / "steps").read_text()


def test_a_job_without_gpus_says_how_to_set_the_number_of_processes(slurm, monkeypatch):
    monkeypatch.delenv("SLURM_GPUS_ON_NODE")
    done = run_slurm(slurm)
    assert done.returncode != 0
    assert "PROCS=4 sbatch" in done.stderr


# ---------------------------------------------------------------------------------------------- node.sh

JOB = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": "localhost:0", "RUN_NAME": "a"}
TORCHRUN = "if [ $1 = --help ]; then echo '{help}'; else echo \"$@\"; fi\n"


@pytest.mark.parametrize(
    ("programs", "chosen", "expected"),
    [
        (("nvidia-smi", "numactl"), {}, "--numa-binding=node train.py"),
        (("nvidia-smi", "numactl"), {"NUMA_BINDING": "socket"}, "--numa-binding=socket train.py"),
        (("nvidia-smi", "numactl"), {"NUMA_BINDING": ""}, "train.py"),
        (("nvidia-smi",), {}, "train.py"),
        (("numactl",), {}, "train.py"),
        (("nvidia-smi", "numactl", "old torchrun"), {}, "train.py"),
    ],
)
def test_ranks_are_bound_to_numa_nodes_where_that_is_possible(tmp_path, programs, chosen, expected):
    shown = "--standalone" if "old torchrun" in programs else "--numa-binding {node}"
    write_programs(tmp_path, dict.fromkeys(("python", *programs), "") | {"torchrun": TORCHRUN.format(help=shown)})
    for name in ("bash", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    environment = {**JOB, **chosen, "PATH": str(tmp_path), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [tmp_path / "bash", LAUNCH / "node.sh"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{expected} run.folder=runs run.name=a run.resume=auto")
