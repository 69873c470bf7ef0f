"""Several machines: two torchruns on this one, which share the folder of the run. Any of their processes may die."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from harness import TIMEOUT_S, free_port, metrics_of, run_train, same_weights, train_command

WORDS = ("run.resume=auto", "run.checkpoint_every_steps=1", "log.to=[]", "train.epochs=40")


class Job:
    """Two agents, each of which starts one rank."""

    def __init__(self, *words: str, restarts: int = 3):
        self.words = words
        self.restarts = restarts
        self.port = free_port()
        self.agents: list[subprocess.Popen] = []

    def start_agent(self, cwd: Path | None = None) -> subprocess.Popen:
        """Start an agent of the next node, as the launch files do."""
        launcher = ["--nnodes=2", "--nproc-per-node=1", f"--max-restarts={self.restarts}", "--local-addr=127.0.0.1"]
        rendezvous = ["--rdzv-backend=c10d", "--rdzv-id=a", f"--rdzv-endpoint=127.0.0.1:{self.port}"]
        command = [sys.executable, "-m", "torch.distributed.run", *launcher, *rendezvous]
        agent = subprocess.Popen(
            [*command, *train_command(*self.words)[1:]],
            cwd=cwd,
            env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.agents.append(agent)
        return agent

    def start(self) -> None:
        """Start both agents. The first one hosts the store."""
        self.start_agent()
        time.sleep(2)
        self.start_agent()


@pytest.fixture
def jobs() -> Iterator[type[Job]]:
    """The class Job; whatever it starts ends with the test."""
    before = psutil.Process().children()
    yield Job
    for process in psutil.Process().children(recursive=True):
        if process not in before:
            process.kill()


def rank_of(agent: subprocess.Popen) -> psutil.Process:
    """The training process of an agent."""
    children = psutil.Process(agent.pid).children()
    return next(child for child in children if any(word.endswith("train.py") for word in child.cmdline()))


def kill_node(agent: subprocess.Popen) -> None:
    """What the loss of a machine is: agent and rank are gone at once."""
    processes = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
    for process in processes:
        process.kill()
    agent.wait(TIMEOUT_S)


@pytest.mark.slow
def test_a_job_outlives_a_rank_and_each_of_its_nodes(folder, jobs):
    run = folder / "runs/a"
    job = jobs(*WORDS)
    job.start()
    first, second = job.agents
    wait_for_progress(run, first, n_starts=1)
    rank_of(second).kill()
    wait_for_progress(run, first, n_starts=2)
    kill_node(second)
    second = job.start_agent()  # another machine takes its place
    wait_for_progress(run, first, n_starts=3)
    kill_node(first)  # with it goes the store: the other agent gives up
    assert second.wait(TIMEOUT_S) != 0
    job = jobs(*WORDS)
    job.start()
    for agent in job.agents:
        output, _ = agent.communicate(timeout=TIMEOUT_S)
        assert agent.returncode == 0, output
    points = metrics_of(run)
    assert points[-1]["step"] == 40 * 21
    assert any(name.startswith("machine1/") for point in points for name in point)
    alone = run_train(*WORDS, "run.name=alone", ranks=2, cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert same_weights(run, folder / "runs/alone")


def wait_for_progress(run: Path, agent: subprocess.Popen, n_starts: int) -> None:
    """Wait until a run has been started so many times and no start is left without a checkpoint."""
    deadline = time.monotonic() + TIMEOUT_S
    while len([*run.glob("run*.json")]) < n_starts or (run / "starts.txt").exists():
        assert agent.poll() is None, agent.communicate()[0]
        assert time.monotonic() < deadline, "the run did not come so far"
        time.sleep(0.01)


@pytest.mark.slow
def test_one_machine_without_the_data_is_one_line(folder, jobs):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.yaml").write_text((folder / "config.yaml").read_text())
    job = jobs(restarts=0)
    job.start_agent()
    time.sleep(2)
    job.start_agent(cwd=elsewhere)
    outputs = [agent.communicate(timeout=TIMEOUT_S)[0] for agent in job.agents]
    for output in outputs:
        lines = {line for line in output.splitlines() if line.startswith("error:")}
        assert len(lines) == 1, output
        assert "rows.h5 does not exist (looked in" in lines.pop()
        assert "UserError" not in output  # what follows is the report of torchrun
