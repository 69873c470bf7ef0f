"""launch/kubernetes.yaml fits the published schema, and its command line trains: here two nodes are two processes."""

import copy
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
from harness import TIMEOUT_S, copy_project, free_port, metrics_of, wait_for_port, wait_until, write_minimal
from template import PROJECT

LAUNCH = PROJECT / "launch"
KUBERNETES = "1.31"
"""The oldest version in which podFailurePolicy is stable."""


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((LAUNCH / name).read_text()))


JOB = documents("kubernetes.yaml")[1]
CONTAINER = JOB["spec"]["template"]["spec"]["containers"][0]


# ---------------------------------------------------------------------------------------------- schemas


@pytest.mark.parametrize("document", documents("kubernetes.yaml"), ids=lambda document: document["kind"])
def test_kubernetes_takes_the_job(document):
    kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_the_schema_of_kubernetes_finds_a_wrong_key():
    wrong = copy.deepcopy(JOB)
    wrong["spec"]["podFailurePolicy"]["rules"][1]["onExitCode"] = {}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


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
    assert documents("kubernetes.yaml")[0]["metadata"]["name"] == spec["template"]["spec"]["subdomain"]


def test_the_image_is_pinned_and_runs_without_root():
    words = [line.split() for line in (LAUNCH / "Dockerfile").read_text().splitlines() if line and line[0] != "#"]
    commands = [(first, rest) for first, *rest in words]
    assert [rest for first, rest in commands if first == "FROM"] == [["python:3.11.14-slim-bookworm"]]
    assert ("USER", ["1000"]) in commands
    copied = next(rest for first, rest in commands if first == "COPY")
    assert all((PROJECT / name).is_file() for name in copied[:-1])
    assert {rest[0] for first, rest in commands if first == "RUN"} == {"useradd", "pip"}  # nothing else is downloaded


# ---------------------------------------------------------------------------------------------- command lines


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
        here = {
            "train-0.train": "127.0.0.1",
            "29500": str(port),
            "/data/train-*.h5": "rows.h5::/train",
            "/data/val-*.h5": "rows.h5::/val",
            "/runs": str(project / "runs"),
        }

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
