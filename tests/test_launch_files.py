"""The launch files, with stand-ins for torchrun and Slurm: what becomes of a run that stopped, ended or failed."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}" / "launch"
TORCHRUN = """#!/usr/bin/env bash
trap 'touch "$STOPPED"; exit 0' TERM
echo started
for i in $(seq "$TENTHS"); do sleep 0.1; done
exit "$CODE"
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with programs that come first on PATH, and runs/slurm-7."""
    programs = {
        "torchrun": TORCHRUN,
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
    for name, value in {"SLURM_NNODES": 1, "SLURM_JOB_ID": 7, "SLURM_JOB_NODELIST": "node-a", "TENTHS": 0}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("STOPPED", str(tmp_path / "runs/slurm-7/stopped.json"))
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


@pytest.mark.parametrize(("code", "is_evicted", "expected"), [(0, False, 0), (3, False, 3), (0, True, 1)])
@pytest.mark.usefixtures("stand_ins")
def test_a_pod_that_is_evicted_has_failed(monkeypatch, code, is_evicted, expected):
    monkeypatch.setenv("CODE", str(code))
    monkeypatch.setenv("TENTHS", "600" if is_evicted else "0")
    _, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    (container,) = job["spec"]["template"]["spec"]["containers"]
    script = container["args"][0].replace("/runs/train/stopped.json", os.environ["STOPPED"])
    with subprocess.Popen([*container["command"], script], stdout=subprocess.PIPE, text=True) as pod:
        assert pod.stdout.readline() == "started\n"
        if is_evicted:
            pod.send_signal(signal.SIGTERM)
        assert pod.wait(60) == expected
