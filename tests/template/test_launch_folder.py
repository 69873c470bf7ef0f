"""The files of launch/. slurm.sh and node.sh run with stand-ins for all that they call; see test_slurm.py, too.

kubernetes.yaml fits the published schema, and its command line trains: two nodes are two processes here.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from harness import TIMEOUT_S, copy_project, free_port, metrics_of, run_to_end, wait_for_port, wait_until, write_minimal
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
    return tmp_path


def run_slurm(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    job = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-a", "SLURM_GPUS_ON_NODE": "8"}
    return run_to_end([str(LAUNCH / "slurm.sh")], folder, **(job | variables))


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
def test_slurm_queues_what_a_new_start_can_cure_and_not_for_ever(slurm, code, is_stopped, restarts, is_requeued):
    if is_stopped:
        (slurm / "runs/slurm-7/stopped.json").touch()
    done = run_slurm(slurm, CODE=str(code), SLURM_RESTART_COUNT=str(restarts))
    assert done.returncode == (1 if restarts else code), done.stderr
    assert ("requeue 7" in done.stdout) == is_requeued
    assert ("queued again 50 times" in done.stderr) == (restarts == 50)


def test_a_mistake_ends_the_job_before_the_training(slurm):
    done = run_slurm(slurm, CHECK_CODE="2")
    assert done.returncode == 2
    assert "requeue" not in done.stdout
    assert (slurm / "steps").read_text() == "check\n"


def test_a_job_without_gpus_says_how_to_set_the_number_of_processes(slurm):
    done = run_slurm(slurm, SLURM_GPUS_ON_NODE="")
    assert done.returncode != 0
    assert "PROCS=4 sbatch" in done.stderr


# ---------------------------------------------------------------------------------------------- node.sh

NODE = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": "localhost:0", "RUN_NAME": "a"}
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
    environment = {**NODE, **chosen, "PATH": str(tmp_path), "HOME": os.environ.get("HOME", "/")}
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


# ---------------------------------------------------------------------------------------------- kubernetes.yaml

KUBERNETES = "1.31"
"""The oldest version in which podFailurePolicy is stable."""


DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))
JOB = DOCUMENTS[1]
CONTAINER = JOB["spec"]["template"]["spec"]["containers"][0]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document["kind"])
def test_kubernetes_takes_the_job(document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_job_fails_at_once_for_a_mistake_and_ignores_evictions():
    spec = JOB["spec"]
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"]["values"] == [2]
    assert rules["FailJob"]["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert rules["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert spec["template"]["spec"]["restartPolicy"] == "Never"  # a podFailurePolicy allows no other
    env = {each["name"]: each["value"] for each in CONTAINER["env"]}
    assert spec["completions"] == spec["parallelism"] == int(env["PET_NNODES"])
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(env["PET_NPROC_PER_NODE"])
    name = f"{JOB['metadata']['name']}-0.{spec['template']['spec']['subdomain']}"
    assert env["PET_RDZV_ENDPOINT"].startswith(f"{name}:")
    assert DOCUMENTS[0]["metadata"]["name"] == spec["template"]["spec"]["subdomain"]


def test_the_image_is_pinned_and_runs_without_root():
    text = (LAUNCH / "Dockerfile").read_text()
    assert re.findall(r"(?m)^(?:FROM|USER) (.*)$", text) == ["python:3.11.14-slim-bookworm", "1000"]
    copied = re.search(r"(?m)^COPY (.*) \S+$", text)[1].split()
    assert all((PROJECT / name).is_file() for name in copied)
    assert set(re.findall(r"(?m)^RUN (\w+)", text)) == {"useradd", "pip"}  # nothing else is downloaded


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with the workload `minimal`."""
    write_minimal(tmp_path)
    copy_project(tmp_path)
    shutil.copytree(LAUNCH, tmp_path / "launch")
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    config["run"] = {"checkpoint_every_steps": 1}
    config["train"]["epochs"] = 30
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def start_node(project: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """start_node(port, *words) is a node of the job as a process of this machine: one rank, another port and folder."""
    processes = []

    def start(port: int, *words: str) -> subprocess.Popen:
        here = {"train-0.train": "127.0.0.1", "29500": str(port), "/runs": str(project / "runs")}
        here |= {f"/data/{split}-*.h5": f"rows.h5::/{split}" for split in ("train", "val")}

        def moved(text: str) -> str:
            for old, new in here.items():
                text = text.replace(old, new)
            return text

        variables = {each["name"]: moved(each["value"]) for each in CONTAINER["env"]}
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PET_NPROC_PER_NODE": "1", "PATH": path, "PET_LOCAL_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*map(moved, CONTAINER["command"] + CONTAINER["args"]), *words],
            cwd=project,
            env=os.environ | variables | own,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()


def output_of(process: subprocess.Popen) -> str:
    """What it has printed, once it has ended."""
    return process.communicate(timeout=TIMEOUT_S)[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_node_that_is_evicted_saves_and_the_other_one_goes_on_with_the_next(project, start_node):
    run = project / "runs/train"
    port = free_port()
    stays = start_node(port)
    wait_for_port(port, stays)  # it hosts the rendezvous
    evicted = start_node(port)
    wait_until(lambda: any(run.glob("checkpoints/last-*")), stays)
    evicted.send_signal(signal.SIGTERM)
    printed = output_of(evicted)
    assert evicted.returncode == 143, printed
    assert (run / "stopped.json").exists()
    joins = start_node(port)
    printed = output_of(stays) + output_of(joins)
    assert [stays.returncode, joins.returncode] == [0, 0], printed
    assert metrics_of(run)[-1]["step"] == 30 * 21
    assert not (run / "stopped.json").exists()
    assert "2 x CPU over gloo" in printed


@pytest.mark.slow
def test_a_mistake_ends_the_node_before_torchrun_starts(project, start_node):
    node = start_node(free_port(), "data.dataset=missing:Rows")
    last_line = output_of(node).splitlines()[-1]
    assert node.returncode == 2
    assert last_line.startswith("error: ")
    assert "missing" in last_line
    assert not (project / "runs/train").exists()
