"""launch/slurm.sh with stand-ins for torchrun and Slurm: what becomes of a run that stopped, ended or failed."""

import os
import subprocess
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}" / "launch"


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs that come first on PATH, and runs/slurm-7."""
    programs = {
        "torchrun": '#!/usr/bin/env bash\nexit "$CODE"\n',
        "srun": '#!/usr/bin/env bash\nexec "$@"\n',
        "scontrol": '#!/usr/bin/env bash\nif [ "$1" = requeue ]; then echo "requeue $2"; else echo node-a; fi\n',
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "runs/slurm-7").mkdir(parents=True)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for name, value in {"SLURM_NNODES": 1, "SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node-a"}.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


def run_slurm(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAUNCH / "slurm.sh"], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("code", "is_stopped"), [(0, False), (1, False), (1, True)])
def test_slurm_queues_a_stopped_run_again_and_no_other(stand_ins, monkeypatch, code, is_stopped):
    monkeypatch.setenv("CODE", str(code))
    if is_stopped:
        (stand_ins / "runs/slurm-7/stopped.json").touch()
    done = run_slurm(stand_ins)
    assert done.returncode == code, done.stderr
    assert ("requeue 7" in done.stdout) == is_stopped
