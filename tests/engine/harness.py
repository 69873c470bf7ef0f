"""Rows that carry their own numbers, whole runs, and runs of several processes."""

import atexit
import gc
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from itertools import count
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import psutil
import pytest
import torch
import torch.multiprocessing as mp
import train as script
from PIL import Image

from fastgpu.feed import Passes, PoolLoader, Sizes, open_loaders, open_splits
from fastgpu.process.config import Dist, Loader, Tier
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import Launch, UserError, attempt
from fastgpu.process.signals import STOP
from fastgpu.process.world import World, init_distributed
from fastgpu.rows.contract import Dataset, Reads
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged, RaggedArray
from fastgpu.rows.runs import Runs
from fastgpu.run.checkpoint import digest_of
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.columns import RaggedColumn
from fastgpu.storage.layout import Layout
from fastgpu.storage.store import HDF5Dataset

ROOT = Path(__file__).parents[2] / "{{cookiecutter.project_slug}}"
"""The project in place."""
CPU = torch.device("cpu")
ALONE = World(0, 1, 1, CPU)
"""A job of one process on a CPU."""
TIMEOUT_S = 600
"""How long a process may take before a test gives up. It is long because other work may occupy the machine."""


def reads_of(*ranges: tuple[int, np.ndarray]) -> Reads:
    """Reads of neighbouring rows: (first row, their places)."""
    places = [places for _, places in ranges]
    runs = Runs(np.array([start for start, _ in ranges]), np.array([*map(len, places)]))
    return Reads(runs, np.concatenate(places))


ORDER = BlockSampler(np.ones(1, np.int32), 1, seed=None)
ONE_PASS = Passes()
PLAN = next(ORDER.pools(0))
"""A plan that draws nothing at random, for rows that are read without a pool."""

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


# ---------------------------------------------------------------------------------------------- numbered rows


def numbered(rows: int, shape: tuple[int, ...] = (1, 4, 2), start: int = 0) -> np.ndarray:
    """uint8 rows (rows, *shape). Each begins with its number as four bytes; the rest is a function of the number."""
    return _rows_of(np.arange(start, start + rows, dtype="<u4"), shape)


def _rows_of(number: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    images = (number[:, None] * 7 + np.arange(int(np.prod(shape)))).astype(np.uint8)
    images[:, :4] = number.view(np.uint8).reshape(-1, 4)
    return images.reshape(len(number), *shape)


def numbers_of(images: torch.Tensor | np.ndarray) -> list[int]:
    """The numbers that rows carry. Fails if any byte of a row is not the one that belongs to its number."""
    array = np.ascontiguousarray(np.asarray(images))
    number = array.reshape(len(array), -1)[:, :4].copy().view("<u4").reshape(-1)
    np.testing.assert_array_equal(array, _rows_of(number, array.shape[1:]))
    return number.tolist()


ITEMS = 1000
"""Number of items that the values of ragged rows are drawn from."""


def ragged(numbers: Iterable[int]) -> RaggedArray:
    """Ragged rows: row n has n * 7 % 5 items, each a function of n and its place."""
    rows = [np.arange(n * 7 % 5) * 31 + n for n in numbers]
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return RaggedArray((np.concatenate([*rows, []]) % ITEMS).astype(np.int32), offsets)


def arrays_of(source: ArrayDataset) -> dict[str, np.ndarray | RaggedArray]:
    """The arrays that a source was made of."""
    return {
        name: RaggedArray(column.values.rows, column.indptr) if isinstance(column, RaggedColumn) else column.rows
        for name, column in source.columns.items()
    }


def is_ragged(rows: Ragged | RaggedArray, numbers: Iterable[int]) -> bool:
    """Whether these are the rows of those numbers, with offsets that agree on the host and on the device."""
    expected = ragged(numbers)
    on_host = rows.host_offsets if isinstance(rows, Ragged) else rows.offsets
    has_offsets = all(np.array_equal(offsets, expected.offsets) for offsets in (np.asarray(rows.offsets), on_host))
    return has_offsets and np.array_equal(np.asarray(rows.values)[: expected.offsets[-1]], expected.values)


def read_rows(source: Dataset) -> dict[str, Any]:
    """All rows of a source in its order: {field: array or RaggedArray}."""
    out: dict[str, Any] = {}
    for name, field in source.fields.items():
        if field.is_ragged:
            offsets = np.concatenate([[0], np.cumsum(source.stored_lengths[name])])
            out[name] = RaggedArray(np.zeros(offsets[-1], field.dtype), offsets)
        else:
            out[name] = np.zeros((len(source), *field.shape), field.dtype)
    starts = np.cumsum(source.block_rows) - source.block_rows
    for start, rows in zip(starts.tolist(), source.block_rows.tolist(), strict=True):
        source.read(PLAN, reads_of((start, np.arange(start, start + rows))), out)
    return out


def sizes_of(tier: Tier, n_readers: int, passes: Passes = ONE_PASS) -> Sizes:
    """Sizes that name a tier and a number of readers."""
    return Sizes(1, 1, 1, tier, n_readers, passes=passes)


def open_feed(
    source: Dataset,
    order: BlockSampler,
    tier: Tier = "disk",
    n_readers: int = 2,
    *,
    device: torch.device = CPU,
    passes: Passes = ONE_PASS,
    **loader: int,
) -> PoolLoader:
    """The rows of a source in the given order. loader: settings of `Loader`."""
    return open_loaders([source], [order], sizes_of(tier, n_readers, passes), device, loader=Loader(**loader))[0]


def rows_before(order: BlockSampler, pool: int) -> int:
    """Rows of an epoch that all ranks together take before that pool."""
    return min(pool * order.pool_batches * order.global_batch_size, order.total_size)


@contextmanager
def no_host_sync() -> Iterator[None]:
    """On a GPU, everything in this block that makes the host wait for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def by_h5py(store: HDF5Dataset) -> bool:
    """Whether only the HDF5 library can read the rows, one thread at a time."""
    largest = max(store.parts[0].values(), key=lambda column: column.field.row_bytes)
    return type(largest) is Layout


def write_rows(
    path: Path,
    rows: int = 100,
    shape: tuple[int, ...] = (1, 4, 2),
    chunk: int | None = 8,
    *,
    start: int = 0,
    classes: int = 4,
    **options: Any,
) -> str:
    """Write an HDF5 file with numbered `images`, and `labels`. Returns its path. options: of the images."""
    with h5py.File(path, "w") as file:
        chunks = (min(chunk, rows), *shape) if chunk else None
        file.create_dataset("images", data=numbered(rows, shape, start), chunks=chunks, **options)
        file["labels"] = np.arange(start, start + rows) % classes
    return str(path)


def write_ragged(path: Path, rows: int = 100, start: int = 0, *, items: int = ITEMS, **options: Any) -> str:
    """Write an HDF5 file with the CSR matrix `items` and the `number` of each row. Returns its path."""
    array = ragged(range(start, start + rows))
    with h5py.File(path, "w") as file:
        group = file.create_group("items")
        group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (rows, items)})
        group["indptr"] = array.offsets
        group.create_dataset("indices", data=array.values, **options)
        file["number"] = np.arange(start, start + rows)
    return str(path)


def image_file(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file. options: of Pillow."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def photo(number: int) -> bytes:
    """A PNG or JPEG file of a size of its own. That of number 1, a JPEG file, has 16 x 16 pixels."""
    rng = np.random.default_rng(number)
    height, width = (16, 16) if number == 1 else rng.integers(8, 60, 2)
    corners = Image.fromarray(rng.integers(0, 256, (3, 3, 3), np.uint8))
    return image_file(corners.resize((width, height)), "PNG" if number % 5 == 0 else "JPEG")


def write_encoded(path: Path, files: list[bytes], **columns: np.ndarray) -> str:
    """Write an HDF5 file whose `images` are image files, with other columns. Returns its path."""
    with h5py.File(path, "w") as file:
        file["images/indptr"] = np.cumsum([0, *map(len, files)])
        file["images/values"] = np.frombuffer(b"".join(files), np.uint8)
        file["images"].attrs["codec"] = "jpeg+png+webp"
        for name, column in columns.items():
            file[name] = column
    return str(path)


def write_photos(path: Path, rows: int, start: int = 0) -> str:
    """Write an HDF5 file with photos as encoded `images`, and their numbers as `labels`. Returns its path."""
    numbers = range(start, start + rows)
    return write_encoded(path, [photo(number) for number in numbers], labels=np.array(numbers))


# ---------------------------------------------------------------------------------------------- whole runs


MINIMAL = """
workload: minimal
run: {name: a}
data: {train: "rows.h5::/train", val: "rows.h5::/val", fields: {x: x, y: y}, batch_size: 32, pool_batches: 4}
train: {epochs: 3}
dist: {device: cpu}
log: {every_steps: 5}
"""


def write_minimal(folder: Path, n_rows: int = 700, n_val_rows: int = 100) -> None:
    """Write rows.h5 and config.yaml for the workload `minimal` to a folder.

    An epoch has 21 whole batches of 32 rows. The groups train and val of rows.h5 hold x, float32 (N, 6), and y (N,), a
    smooth function of x.
    """
    rng = np.random.default_rng(0)
    with h5py.File(folder / "rows.h5", "w") as file:
        for name, count in (("train", n_rows), ("val", n_val_rows)):
            x = rng.standard_normal((count, 6), np.float32)
            group = file.create_group(name)
            group.create_dataset("x", data=x, chunks=(20, 6))
            group["y"] = np.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    (folder / "config.yaml").write_text(MINIMAL)


def train(*words: str, world: World = ALONE) -> int:
    """`python train.py` of the current folder, in this process. Returns the exit code."""
    try:
        return script.train(build(*words, world=world), world)
    finally:
        gc.unfreeze()  # the next test must not keep what this run has built


def build(*words: str, world: World = ALONE) -> script.Training:
    """What train.py with these words builds before it trains."""
    config = load_config(list(words))
    return script.build(config, attempt(open_splits, config.data, config.loader, config.run.seed), world)


def train_rank(world: World, *words: str) -> int | str:
    """One rank of train.py, for `in_world`. Returns the exit code, or the message of a UserError."""
    try:
        return train(*words, world=world)
    except UserError as error:
        return str(error)


def at_call(n_calls: int, function: Callable[..., Any], what: Callable[[], object]) -> Callable[..., Any]:
    """The function; something else happens before the call with this number."""
    calls = count(1)

    def call(*arguments: Any) -> Any:
        if next(calls) == n_calls:
            what()
        return function(*arguments)

    return call


def signalled(number: signal.Signals) -> Callable[[], None]:
    """Sends this process a signal."""
    return lambda: os.kill(os.getpid(), number)


def metrics_of(run: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def val_points(run: Path) -> list[dict[str, float]]:
    """Those of the validations of a run with the workload `minimal`."""
    return [point for point in metrics_of(run) if "val/mse" in point]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state.json that was changed, with its new digest."""
    state.pop("digest", None)
    path.write_text(json.dumps(state | {"digest": digest_of(state)}))


def step_of(checkpoint: Path) -> int:
    """The optimizer steps that were done when a checkpoint was saved."""
    step: int = json.loads((checkpoint / "state.json").read_text())["progress"]["step"]
    return step


def saved_steps(run: Path) -> list[int]:
    """The steps of the last checkpoints of a run, which may go on."""
    steps = []
    for path in run.glob("checkpoints/last-*"):
        with suppress(FileNotFoundError):  # it has just been removed
            steps.append(step_of(path))
    return sorted(steps)


def newest(run: Path, kind: str = "last") -> Path:
    """The newest checkpoint of a run."""
    return max(run.glob(f"checkpoints/{kind}-*"), key=lambda path: path.name)


def weights_of(run: Path, name: str = "model") -> dict[str, torch.Tensor]:
    """The model in the newest checkpoint of a run, or another part of it."""
    return torch.load(newest(run) / f"{name}.pt", weights_only=True)


def same_weights(run: Path, other: Path, name: str = "model") -> bool:
    """Whether the newest checkpoints of two runs hold the same model, bit for bit."""
    ours = weights_of(run, name)
    theirs = weights_of(other, name)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


# ---------------------------------------------------------------------------------------------- processes


def copy_project(folder: Path) -> Path:
    """A copy of the Python that trains, for a test that edits it. Returns the folder."""
    shutil.copyfile(ROOT / "train.py", folder / "train.py")
    for package in ("workloads", "fastgpu"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


def convert(*arguments: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `python convert.py` to its end."""
    return run_to_end([sys.executable, str(ROOT / "convert.py"), *map(str, arguments)], cwd)


def start_python(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    """Start these lines of Python in the folder of the project."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train_command(*arguments: str, ranks: int = 1, root: Path = ROOT) -> list[str]:
    """`python train.py`, or torchrun with so many ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, str(root / "train.py"), *arguments]


def run_train(
    *arguments: str, ranks: int = 1, cwd: Path = ROOT, root: Path = ROOT, **environment: str
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
    *arguments: str, ranks: int, cwd: Path = ROOT, more_for_last: tuple[str, ...] = ()
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


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Wait until a run has saved this step or a later one."""
    wait_until(lambda: any(number >= step for number in saved_steps(run)), process)


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
