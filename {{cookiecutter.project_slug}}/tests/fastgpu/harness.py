"""Files whose rows carry their own numbers, and worlds of several gloo processes."""

import os
import queue
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

from fastgpu.rows.contract import BlockRead
from fastgpu.rows.rows import Ragged, RaggedArray

ROOT = Path(__file__).parents[2]


def numbered(rows: int, shape: tuple[int, ...] = (1, 4, 2), start: int = 0) -> np.ndarray:
    """uint8 rows (rows, *shape), each beginning with its number as four bytes, the rest a function of it."""
    number = np.arange(start, start + rows, dtype="<u4")
    rest = (number[:, None] * 7 + np.arange(int(np.prod(shape)))).astype(np.uint8)
    rest[:, :4] = number.view(np.uint8).reshape(-1, 4)
    return rest.reshape(rows, *shape)


def numbers_of(images: torch.Tensor | np.ndarray) -> list[int]:
    """The numbers that rows carry; fails if any byte of a row is not that of its number."""
    array = np.ascontiguousarray(np.asarray(images))
    number = array.reshape(len(array), -1)[:, :4].copy().view("<u4").reshape(-1)
    expected = numbered(int(number.max()) + 1 if len(number) else 0, array.shape[1:])
    np.testing.assert_array_equal(array, expected[number])
    return number.tolist()


ITEMS = 1000


def ragged(numbers: Iterable[int]) -> RaggedArray:
    """Row n has n * 7 % 5 items, each a function of n and its place."""
    rows = [np.arange(n * 7 % 5) * 31 + n for n in numbers]
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return RaggedArray((np.concatenate([*rows, []]) % ITEMS).astype(np.int32), offsets)


def is_ragged(rows: Ragged | RaggedArray, numbers: Iterable[int]) -> bool:
    """Whether these are the rows of those numbers, with offsets that agree on both sides."""
    expected, offsets = ragged(numbers), np.asarray(rows.offsets)
    hosts = [rows.host] if isinstance(rows, Ragged) else []
    same = [np.array_equal(found, expected.offsets) for found in [offsets, *hosts]]
    return all(same) and np.array_equal(np.asarray(rows.values)[: offsets[-1]], expected.values)


def read_rows(source: Any) -> dict[str, Any]:
    """All rows of a store, or of what reads like one, in its order."""
    out: dict[str, Any] = {}
    for name, field in source.fields.items():
        if field.is_ragged:
            offsets = np.concatenate([[0], np.cumsum(source.lengths[name])])
            out[name] = RaggedArray(np.zeros(offsets[-1], field.dtype), offsets)
        else:
            out[name] = np.zeros((len(source), *field.shape), field.dtype)
    starts = np.cumsum(source.block_rows) - source.block_rows
    for block, (start, rows) in enumerate(zip(starts.tolist(), source.block_rows.tolist(), strict=True)):
        source.read([BlockRead(block, 0, np.arange(start, start + rows))], out)
    return out


@contextmanager
def no_host_sync() -> Iterator[None]:
    """On a GPU: whatever makes the host wait for it raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def convert(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python convert.py`, to its end."""
    command = [sys.executable, str(ROOT / "convert.py"), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def run_train(
    *arguments: str, ranks: int = 1, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`python train.py` or torchrun with so many ranks, to its end."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "train.py"), *arguments],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_ranks(*arguments: str, ranks: int) -> list[subprocess.CompletedProcess[str]]:
    """train.py as `ranks` processes without torchrun, so that each one's exit code can be seen."""
    port = _free_port()
    processes = []
    for rank in range(ranks):
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        values = (rank, rank, ranks, ranks, "127.0.0.1", port)
        environment = os.environ | {name: str(value) for name, value in zip(names, values, strict=True)}
        processes.append(
            subprocess.Popen(
                [sys.executable, "train.py", *arguments],
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    return [subprocess.CompletedProcess(p.args, p.returncode, *out) for p, out in zip(processes, outputs, strict=True)]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def in_world(size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """function(world, *arguments) in `size` gloo processes; its results by rank. Raises what a rank raised."""
    port = _free_port()
    context = mp.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_rank, args=(rank, size, port, function, arguments, results)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    found: dict[int, Any] = {}
    try:
        while len(found) < size:
            rank, value, error = results.get(timeout=120)
            assert not error, f"rank {rank}:\n{error}"
            found[rank] = value
    except queue.Empty:
        pytest.fail(f"only ranks {sorted(found)} answered")
    finally:
        for process in processes:
            process.join(10)
            process.kill()
    return [found[rank] for rank in range(size)]


def _rank(rank: int, size: int, port: int, function: Any, arguments: Any, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    from fastgpu.process.config import Dist
    from fastgpu.process.launch import Launch
    from fastgpu.process.world import join

    torch.set_num_threads(1)
    try:
        with join(Launch(rank, size, rank, size), Dist(device="cpu", timeout_s=60)) as world:
            value = function(world, *arguments)
        results.put((rank, value, None))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
