"""Processes: programs that are run to their end, training processes, and the ranks of a job."""

import atexit
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing as mp

from fastgpu.process.config import Dist
from fastgpu.process.launch import Launch
from fastgpu.process.signals import STOP
from fastgpu.process.world import World, init_distributed
from support import PROJECT

CPU = torch.device("cpu")
ALONE = World(0, 1, 1, CPU)
"""A job of one process on a CPU."""
TIMEOUT_S = 600
"""How long a process may take before a test gives up. It is long because other work may occupy the machine."""
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@contextmanager
def no_host_sync() -> Iterator[None]:
    """On a GPU, everything in this block that makes the host wait for the device raises."""
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says once that this mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def copy_project(folder: Path) -> Path:
    """A copy of the Python that trains, for a test that edits it. Returns the folder."""
    shutil.copyfile(PROJECT / "train.py", folder / "train.py")
    for package in ("workloads", "fastgpu"):
        shutil.copytree(PROJECT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def start_python(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start these lines of Python in the folder of the project."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fork(run: Callable[[Connection], None]) -> tuple[ForkProcess, Connection]:
    """A process that calls this function with its end of a pipe, and our end."""
    context = mp.get_context("fork")
    ours, its = context.Pipe()
    process = context.Process(target=run, args=(its,))
    process.start()
    its.close()
    return process, ours


def train_command(*arguments: str, ranks: int = 1, root: Path = PROJECT) -> list[str]:
    """`python train.py`, or torchrun with so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, str(root / "train.py"), *arguments]


def run_train(
    *arguments: str, ranks: int = 1, cwd: Path = PROJECT, root: Path = PROJECT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run train.py to its end. root: the project that it is in."""
    return run_to_end(train_command(*arguments, ranks=ranks, root=root), cwd, **environment)


def run_to_end(command: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def printed_by(command: Sequence[str | Path], cwd: Path, **environment: str) -> str:
    """What a program prints, which must succeed."""
    done = run_to_end([*map(str, command)], cwd, **environment)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_ranks(
    *arguments: str, ranks: int, cwd: Path = PROJECT, more_for_last: tuple[str, ...] = ()
) -> list[subprocess.CompletedProcess[str]]:
    """Run train.py as `ranks` processes without torchrun, so that the exit code of each can be seen.

    more_for_last: arguments of the last rank only.
    """
    port = free_port()
    commands = [train_command(*arguments) for _ in range(ranks)]
    commands[-1] += more_for_last
    with ThreadPoolExecutor(ranks) as pool:
        futures = [
            pool.submit(run_to_end, command, cwd, **launch_variables(Launch(rank, ranks, rank, ranks), port))
            for rank, command in enumerate(commands)
        ]
    return [future.result() for future in futures]


@contextmanager
def started_ranks(*arguments: str, cwd: Path, **environment: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes of train.py, without torchrun, which would end both when one fails. They are killed at the end."""
    port = free_port()
    processes = []
    try:
        for rank in range(2):
            env = os.environ | environment | launch_variables(Launch(rank, 2, rank, 2), port)
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            processes.append(subprocess.Popen(train_command(*arguments), cwd=cwd, env=env, text=True, **pipes))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def launch_variables(launch: Launch, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    values = (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size)
    return dict(zip(names, map(str, values), strict=True)) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_until(holds: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Wait for something that a thread or a process brings about."""
    deadline = time.monotonic() + TIMEOUT_S
    while not holds():
        assert not process or process.poll() is None, process.communicate()[0] or "it ended too early"
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.01)


def kill_tree(process: subprocess.Popen) -> None:
    """Kill a process and all that it has started."""
    parent = psutil.Process(process.pid)
    for each in (*parent.children(recursive=True), parent):
        each.kill()


def wait_for_port(port: int, process: subprocess.Popen) -> None:
    """Wait until a process listens on a port, such as that of the rendezvous."""

    def is_open() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    wait_until(is_open, process)


def in_world(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call function(world, *arguments) in `size` gloo processes, in the current folder. Returns the results by rank.

    The processes stay for the next call, unless one of them fails. Fails with the traceback of the first rank that
    raises, or with an EOFError if one dies. The function must be importable.
    """
    port = free_port()
    pending = {pipe: rank for rank, pipe in enumerate(_start_ranks(size))}
    results: dict[int, Any] = {}
    try:
        for pipe, rank in pending.items():
            pipe.send((Path.cwd(), Launch(rank, size, rank, size), port, function, arguments))
        while pending:
            answered = wait([*pending], TIMEOUT_S)
            assert answered, "the ranks hang"
            for pipe in answered:
                rank = pending.pop(pipe)
                results[rank], error = pipe.recv()
                assert not error, f"rank {rank}:\n{error}"
    except BaseException:
        _end_ranks()
        raise
    return [results[rank] for rank in range(size)]


@cache
def _start_ranks(size: int) -> list[Connection]:
    """Pipes to processes that call functions."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch"])  # is imported once, not by each rank
    pipes = []
    for _ in range(size):
        pipe, its_pipe = context.Pipe()
        process = context.Process(target=_serve, args=(its_pipe,))
        process.start()
        its_pipe.close()
        pipes.append(pipe)
        RANKS.append(process)
    return pipes


RANKS: list[ForkServerProcess] = []
"""The processes that `in_world` has started."""


@atexit.register
def _end_ranks() -> None:
    _start_ranks.cache_clear()
    while RANKS:
        RANKS.pop().kill()


def _serve(pipe: Connection) -> None:
    """What a rank does: call functions, each as if the process were new, until the pipe is closed."""
    torch.set_num_threads(1)
    handlers = {number: signal.getsignal(number) for number in STOP}
    environment, path = dict(os.environ), [*sys.path]
    with suppress(EOFError):
        while True:
            folder, launch, port, function, arguments = pipe.recv()
            os.chdir(folder)
            os.environ.update(launch_variables(launch, port))
            torch.manual_seed(0)
            np.random.seed(0)
            random.seed(0)
            try:
                with init_distributed(Dist(device="cpu", timeout_s=TIMEOUT_S), launch) as world:
                    answer = function(world, *arguments), None
            except BaseException:
                answer = None, traceback.format_exc()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            os.environ.clear()
            os.environ.update(environment)
            sys.path[:] = path
            pipe.send(answer)
