"""Several machines: two torchruns on this one, which share the folder of the run. Any of their processes may die."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from harness import (
    ROOT,
    TIMEOUT_S,
    copy_project,
    free_port,
    metrics_of,
    run_train,
    same_weights,
    train,
    train_command,
    wait_for_port,
    wait_until,
    weights_of,
    write_minimal,
)

from workloads import minimal

WORDS = ("run.resume=auto", "run.checkpoint_every_steps=1", "train.epochs=40")


NOTING = """
import json
import os
import time
from pathlib import Path

from fastgpu.process.launch import read_launch
from workloads import minimal


class Workload(minimal.Workload):
    def transform(self, batch, rng):
        launch = read_launch()
        with open(os.environ["ROWS"], "a") as file:
            file.write(json.dumps([launch.world_size, launch.rank, batch["x"][:, 0].tolist()]) + "\\n")
        if Path("slow").exists():
            time.sleep(0.2)
        return batch
"""
"""A workload that writes down the first number of each row of each batch, slowly if there is a file `slow`."""


@pytest.fixture
def start_agent() -> Iterator[Callable[..., subprocess.Popen]]:
    """start_agent(port, *words, ...) starts the agent of the next node, as the launch files do. It ends with the test.

    The first agent of a port hosts the store.
    """
    before = psutil.Process().children()

    def start(
        port: int, *words: str, nodes: str = "2", restarts: int = 3, root: Path = ROOT, cwd: Path | None = None
    ) -> subprocess.Popen:
        launcher = [
            *(f"--nnodes={nodes}", "--nproc-per-node=1", f"--max-restarts={restarts}", "--local-addr=127.0.0.1"),
            *("--rdzv-backend=c10d", "--rdzv-id=a", f"--rdzv-endpoint=127.0.0.1:{port}"),
            "--rdzv-conf=last_call_timeout=2",
        ]
        agent = subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *launcher, *train_command(*words, root=root)[1:]],
            cwd=cwd,
            env=os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wait_for_port(port, agent)  # the next agent must not be the first one
        return agent

    yield start
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


@pytest.mark.nightly
@pytest.mark.slow
def test_a_job_outlives_a_rank_and_each_of_its_nodes(folder, start_agent):
    run = folder / "runs/a"
    port = free_port()
    first, second = start_agent(port, *WORDS), start_agent(port, *WORDS)
    wait_for_progress(run, first, n_starts=1)
    rank_of(second).kill()
    wait_for_progress(run, first, n_starts=2)
    kill_node(second)
    second = start_agent(port, *WORDS)  # another machine takes its place
    wait_for_progress(run, first, n_starts=3)
    kill_node(first)  # with it goes the store: the other agent gives up
    assert second.wait(TIMEOUT_S) != 0
    port = free_port()
    for agent in (start_agent(port, *WORDS), start_agent(port, *WORDS)):
        output, _ = agent.communicate(timeout=TIMEOUT_S)
        assert agent.returncode == 0, output
    assert metrics_of(run)[-1]["step"] == 40 * 21
    alone = run_train(*WORDS, "run.name=alone", ranks=2, cwd=folder)
    assert alone.returncode == 0, alone.stderr
    assert same_weights(run, folder / "runs/alone")


def last_time(run: Path, pattern: str) -> float:
    """When the newest of these files or folders was written; 0 if there is none. A run removes old checkpoints."""
    times = [0.0]
    for path in run.glob(pattern):
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times)


def wait_for_progress(run: Path, agent: subprocess.Popen, n_starts: int) -> None:
    """Wait until a run has been started so many times, and has saved a checkpoint since the last start."""

    def holds() -> bool:
        is_saved = last_time(run, "checkpoints/last-*") >= last_time(run, "run*.json")
        return len([*run.glob("run*.json")]) >= n_starts and is_saved

    wait_until(holds, agent)


@pytest.mark.nightly
@pytest.mark.slow
def test_one_machine_without_the_data_is_one_line(folder, start_agent):
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "config.yaml").write_text((folder / "config.yaml").read_text())
    port = free_port()
    for agent in [start_agent(port, restarts=0), start_agent(port, restarts=0, cwd=elsewhere)]:
        output, _ = agent.communicate(timeout=TIMEOUT_S)
        (line,) = {line for line in output.splitlines() if line.startswith("error:")}
        assert "rows.h5 does not exist (looked in" in line
        assert "UserError" not in output  # what follows is the report of torchrun


def global_batches(path: Path) -> list[tuple[int, list[float]]]:
    """(number of ranks, rows of all ranks in their order) of each step that was made."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    batches = []
    while lines and len(lines) >= lines[0][0]:
        world_size = lines[0][0]
        ranks = sorted(lines[:world_size])  # no rank begins a step before all have begun the one before
        assert [line[:2] for line in ranks] == [[world_size, rank] for rank in range(world_size)]
        batches.append((world_size, [row for *_, rows in ranks for row in rows]))
        del lines[:world_size]
    return batches


@pytest.mark.nightly
@pytest.mark.slow
def test_machines_join_and_leave_inside_an_epoch_and_no_batch_changes(folder, start_agent, monkeypatch):
    root = copy_project(folder)
    (root / "workloads/noting.py").write_text(NOTING)
    write_minimal(folder, n_rows=5000)
    words = ("workload=noting", "run.resume=auto", "train.epochs=1", "data.batch_size=8")
    rows = folder / "rows.txt"
    monkeypatch.setenv("ROWS", str(rows))
    slow = folder / "slow"
    slow.touch()
    port = free_port()
    stays = start_agent(port, *words, nodes="1:2", root=root)
    wait_for_steps(rows, stays, world_size=1)
    leaves = start_agent(port, *words, nodes="1:2", root=root)
    wait_for_steps(rows, stays, world_size=2)
    leaves.send_signal(signal.SIGTERM)
    leaves.communicate(timeout=TIMEOUT_S)
    assert (folder / "runs/a/stopped.json").exists()
    slow.unlink()
    output, _ = stays.communicate(timeout=TIMEOUT_S)
    assert stays.returncode == 0, output
    assert not (folder / "runs/a/stopped.json").exists()
    batches = global_batches(rows)
    sizes = [size for size, _ in batches]
    assert [size for size, before in zip(sizes, [0, *sizes], strict=False) if size != before] == [1, 2, 1]

    alone: list[list[float]] = []
    monkeypatch.setattr(
        minimal.Workload, "transform", lambda _, batch, rng: alone.append(batch["x"][:, 0].tolist()) or batch
    )
    train(*words[1:], "run.name=alone")
    assert [row_ids for _, row_ids in batches] == alone  # none is lost, none is made twice
    ours, theirs = weights_of(folder / "runs/a"), weights_of(folder / "runs/alone")
    for name, values in ours.items():  # two ranks add the gradients in another order
        torch.testing.assert_close(values, theirs[name], rtol=1e-4, atol=1e-5)


def wait_for_steps(rows: Path, agent: subprocess.Popen, world_size: int) -> None:
    """Wait until the last five steps were made by so many ranks."""
    wait_until(lambda: [size for size, _ in global_batches(rows)[-5:]] == [world_size] * 5, agent)
