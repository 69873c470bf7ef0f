"""Several machines: two torchruns on this one, which share the folder of the run. Any of their processes may die."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.ranks import TIMEOUT_S, free_port, kill_tree, run_train, train_command, wait_for_port
from support.runs import metrics_of, same_weights, saved_steps, wait_for_step

WORDS = ("run.resume=auto", "run.checkpoint_every_steps=1", "train.epochs=40")


@pytest.fixture
def start_agent(folder: Path) -> Iterator[Callable[[int], subprocess.Popen]]:
    """start_agent(port) starts the agent of the next node, as the launch files do. It ends with the test.

    The first agent of a port hosts the store.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--max-restarts=3"]
    launcher += ["--local-addr=127.0.0.1", "--rdzv-backend=c10d", "--rdzv-id=a"]
    env = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = []

    def start(port: int) -> subprocess.Popen:
        command = [*launcher, f"--rdzv-endpoint=127.0.0.1:{port}", *train_command(*WORDS)[1:]]
        agents.append(subprocess.Popen(command, env=env, **pipes))
        wait_for_port(port, agents[-1])  # the next agent must not be the first one
        return agents[-1]

    yield start
    for agent in agents:
        if agent.poll() is None:
            kill_tree(agent)


def rank_of(agent: subprocess.Popen) -> psutil.Process:
    """The training process of an agent."""
    children = psutil.Process(agent.pid).children()
    return next(child for child in children if any(word.endswith("train.py") for word in child.cmdline()))


def wait_for_progress(run: Path, agent: subprocess.Popen) -> None:
    """Wait until a run has saved three pools of four steps more: no rank makes them without the other one."""
    wait_for_step(run, max(saved_steps(run), default=0) + 12, agent)


@pytest.mark.nightly
@pytest.mark.slow
def test_agents_outlive_a_rank_and_each_node(folder, start_agent):
    run = folder / "runs/a"
    port = free_port()
    first, second = start_agent(port), start_agent(port)
    wait_for_progress(run, first)
    rank_of(second).kill()
    wait_for_progress(run, first)
    kill_tree(second)  # what the loss of a machine is: agent and rank are gone at once
    second.wait(TIMEOUT_S)
    second = start_agent(port)  # another machine takes its place
    wait_for_progress(run, first)
    kill_tree(first)  # with it goes the store: the other agent gives up
    assert second.wait(TIMEOUT_S) != 0
    port = free_port()
    for agent in (start_agent(port), start_agent(port)):
        output, _ = agent.communicate(timeout=TIMEOUT_S)
        assert agent.returncode == 0, output
    assert metrics_of(run)[-1]["step"] == 40 * 21
    alone = run_train(*WORDS, "run.name=alone", ranks=2, cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert same_weights(run, folder / "runs/alone")
