"""The files of launch/. slurm.sh and node.sh run with stand-ins for all that they call; see test_slurm.py, too.

kubernetes.yaml fits the published schema, and its command line trains: two nodes are two processes here.
"""

import json
import os
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

from support import PROJECT
from support.ranks import TIMEOUT_S, copy_project, free_port, run_to_end, wait_for_port, wait_until
from support.runs import metrics_of

LAUNCH = PROJECT / "launch"


def write_programs(folder: Path, **lines: str) -> None:
    """Shell scripts in a folder."""
    for name, text in lines.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}")
        (folder / name).chmod(0o755)


SRUN = 'echo "$LAUNCH_STEP" >> steps\n[ "$LAUNCH_STEP" = train ] && exit "$CODE"\nexit "${CHECK_CODE:-0}"\n'
"""It writes down what it was asked for, and ends with $CHECK_CODE for the check and with $CODE for the training."""
SCONTROL = 'if [ "$1" = requeue ]; then echo "requeue $2"; else echo node-a; fi\n'
JOB = {"SLURM_NNODES": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-a", "SLURM_GPUS_ON_NODE": "8"}


@pytest.mark.parametrize(
    ("given", "is_stopped", "code", "is_requeued", "said"),
    [
        ("CODE=0", False, 0, False, ""),
        ("CODE=0", True, 0, True, ""),
        ("CODE=1", True, 1, False, ""),
        ("CODE=137", False, 137, True, ""),
        ("CODE=137 SLURM_RESTART_COUNT=50", False, 1, False, "queued again 50 times"),
        ("CHECK_CODE=2", False, 2, False, ""),
        ("SLURM_GPUS_ON_NODE=", False, 1, False, "PROCS=4 sbatch"),
    ],
)
def test_slurm_script_queues_what_can_be_cured(tmp_path, given, is_stopped, code, is_requeued, said):
    write_programs(tmp_path, srun=SRUN, scontrol=SCONTROL)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={tmp_path}:$PATH\n")
    (tmp_path / "runs/slurm-7").mkdir(parents=True)
    if is_stopped:
        (tmp_path / "runs/slurm-7/stopped.json").touch()
    variables = JOB | dict(word.split("=") for word in given.split())
    done = run_to_end([str(LAUNCH / "slurm.sh")], tmp_path, **variables)
    assert (done.returncode, "requeue 7" in done.stdout) == (code, is_requeued), done.stderr
    assert said in done.stderr
    steps = tmp_path / "steps"
    assert not steps.exists() or steps.read_text().split() == ["check", "train"][: 1 + ("CODE" in variables)]


@pytest.mark.parametrize(
    ("given", "command", "name", "port"),
    [
        ({}, "bash launch/node.sh a.b=1", "slurm-7", 29500),
        (
            {"CONTAINER": "apptainer exec --nv x.sif"},
            "apptainer exec --nv x.sif bash launch/node.sh a.b=1",
            "slurm-7",
            29500,
        ),
        ({"CONTAINER": "--container-image=x.sqsh"}, "bash launch/node.sh a.b=1", "slurm-7", 29500),
        ({"SLURM_ARRAY_TASK_ID": "2"}, "bash launch/node.sh a.b=1 optim.lr=3e-3 run.seed=1", "slurm-5-2", 29502),
        (
            {"SLURM_ARRAY_TASK_ID": "2", "RUN_NAME": "a"},
            "bash launch/node.sh a.b=1 optim.lr=3e-3 run.seed=1",
            "a-2",
            29502,
        ),
    ],
)
def test_slurm_script_starts_sweeps_and_containers(tmp_path, given, command, name, port):
    srun = 'while [[ ${1:-} == --* ]]; do shift; done; echo "$*: $RUN_NAME $PET_RDZV_ENDPOINT"\n'
    write_programs(tmp_path, srun=srun, scontrol=SCONTROL)
    if "CONTAINER" not in given:
        (tmp_path / ".venv/bin").mkdir(parents=True)
        (tmp_path / ".venv/bin/activate").touch()
    (tmp_path / "sweep.txt").write_text("optim.lr=1e-3 run.seed=1\noptim.lr=3e-3 run.seed=1\n")
    variables = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SWEEP": "sweep.txt", "SLURM_ARRAY_JOB_ID": "5"}
    variables |= JOB | given
    done = run_to_end([str(LAUNCH / "slurm.sh"), "a.b=1"], tmp_path, **variables)
    assert done.stdout.splitlines() == [f"{command}: {name} node-a:{port}"] * 2, done.stderr
    for wrong, said in (
        ({"SLURM_ARRAY_TASK_ID": "3"}, "sweep.txt has no line 3"),
        ({"SWEEP": ""}, "the words of one run"),
    ):
        if "SLURM_ARRAY_TASK_ID" in given:
            assert said in run_to_end([str(LAUNCH / "slurm.sh")], tmp_path, **variables | wrong).stderr


NODE = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": "localhost:0", "RUN_NAME": "a"}
TORCHRUN = "if [ $1 = --help ]; then echo '{help}'; else echo \"$PET_LOCAL_ADDR: $*\"; fi\n"
NUMA = "nvidia-smi numactl"


@pytest.mark.parametrize(
    ("machine", "given", "expected", "warning"),
    [
        (NUMA, {}, ": --numa-binding=node train.py", ""),
        (NUMA, {"NUMA_BINDING": ""}, ": train.py", ""),
        ("nvidia-smi", {}, ": train.py", "numactl is not installed"),
        ("numactl", {}, ": train.py", ""),
        (f"{NUMA} old-torchrun", {}, ": train.py", "torchrun of this version"),
        ("no-address", {}, "127.0.0.1: train.py", ""),
        ("no-address", {"PET_LOCAL_ADDR": "10.0.0.1"}, "10.0.0.1: train.py", ""),
        ("no-address", {"PET_NNODES": "2"}, ": train.py", "set PET_LOCAL_ADDR"),
    ],
)
def test_node_script_binds_ranks_and_finds_an_address(tmp_path, machine, given, expected, warning):
    shown = "--standalone" if "old-torchrun" in machine else "--numa-binding {node}"
    write_programs(tmp_path, **dict.fromkeys(machine.split(), ""), torchrun=TORCHRUN.format(help=shown))
    write_programs(tmp_path, python=f"exit {int('no-address' in machine)}")
    for name in ("bash", "env"):
        (tmp_path / name).symlink_to(shutil.which(name))
    variables = NODE | {"LAUNCH_STEP": "train", "PATH": str(tmp_path)} | given
    done = run_to_end([str(tmp_path / "bash"), str(LAUNCH / "node.sh")], tmp_path, **variables)
    assert done.stdout.startswith(f"{expected} run.folder=runs run.name=a run.resume=auto"), done.stderr
    assert warning in done.stderr
    assert ("warning" in done.stderr) == bool(warning)


KUBERNETES = "1.31"
"""The oldest version in which podFailurePolicy is stable."""
DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text()))
SERVICE, KUBERNETES_JOB = DOCUMENTS[:2]
POD = KUBERNETES_JOB["spec"]["template"]["spec"]
CONTAINER = POD["containers"][0]


def test_kubernetes_job_is_valid():
    for document in DOCUMENTS:
        kubernetes_validate.validate(document, KUBERNETES, strict=True)
    spec = KUBERNETES_JOB["spec"]
    rules = {rule["action"]: rule for rule in spec["podFailurePolicy"]["rules"]}
    assert rules["FailJob"]["onExitCodes"]["values"] == [2]
    assert rules["FailJob"]["onExitCodes"]["containerName"] == CONTAINER["name"]
    assert rules["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert POD["restartPolicy"] == "Never"  # a podFailurePolicy allows no other
    env = {each["name"]: each["value"] for each in CONTAINER["env"]}
    assert spec["completions"] == spec["parallelism"] == int(env["PET_NNODES"])
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == int(env["PET_NPROC_PER_NODE"])
    first_pod = f"{KUBERNETES_JOB['metadata']['name']}-0.{POD['subdomain']}"
    assert env["PET_RDZV_ENDPOINT"].startswith(f"{first_pod}:")
    assert SERVICE["metadata"]["name"] == POD["subdomain"]


@pytest.fixture
def start_node(folder: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """start_node(port, *words) is a node of the job as a process of this machine: one rank, another port and folder.

    It trains the workload `minimal` in a project in the current folder.
    """
    copy_project(folder)
    shutil.copytree(LAUNCH, folder / "launch")
    here = {"train-0.train": "127.0.0.1", "/runs": str(folder / "runs")}
    here |= {f"/data/{split}-*.h5": f"rows.h5::/{split}" for split in ("train", "val")}
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PET_NPROC_PER_NODE": "1", "PATH": path, "PET_LOCAL_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    processes = []

    def start(port: int, *words: str) -> subprocess.Popen:
        text = json.dumps([CONTAINER["command"] + CONTAINER["args"], CONTAINER["env"]])
        for old, new in (here | {"29500": str(port)}).items():
            text = text.replace(old, new)
        command, variables = json.loads(text)
        environment = os.environ | {each["name"]: each["value"] for each in variables} | own
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        processes.append(subprocess.Popen([*command, *words], env=environment, **pipes))
        return processes[-1]

    yield start
    for process in processes:
        process.kill()


def output_of(process: subprocess.Popen) -> str:
    """What it has printed, once it has ended."""
    return process.communicate(timeout=TIMEOUT_S)[0]


@pytest.mark.nightly
@pytest.mark.slow
def test_node_evicted_saves_and_the_job_continues(folder, start_node):
    run = folder / "runs/train"
    port = free_port()
    words = ("run.checkpoint_every_steps=1", "train.epochs=30")
    stays = start_node(port, *words)
    wait_for_port(port, stays)  # it hosts the rendezvous
    evicted = start_node(port, *words)
    wait_until(lambda: any(run.glob("checkpoints/last-*")), stays)
    evicted.send_signal(signal.SIGTERM)
    printed = output_of(evicted)
    assert evicted.returncode == 143, printed
    assert (run / "stopped.json").exists()
    joins = start_node(port, *words)
    printed = output_of(stays) + output_of(joins)
    assert [stays.returncode, joins.returncode] == [0, 0], printed
    assert metrics_of(run)[-1]["step"] == 30 * 21
    assert not (run / "stopped.json").exists()
    assert "2 x CPU over gloo" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("data.dataset=missing:Rows", "missing"),
        ("data.batch_size=63", "it should be a multiple of 2 (2 ranks x "),  # one process could train on it
    ],
)
def test_node_with_a_mistake_ends_before_torchrun(folder, start_node, word, message):
    node = start_node(free_port(), word)
    printed = output_of(node)
    assert node.returncode == 2
    assert printed.count("error: ") == 1
    assert printed.splitlines()[-1].startswith("error: ")
    assert message in printed.splitlines()[-1]
    assert not (folder / "runs/train").exists()
