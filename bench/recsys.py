"""Sparse rows of users: the cost of feeding and training, dense as it is usually done, and sparse as in this project.

python bench/recsys.py            (--quick: small data, to try the benchmark itself)

The data are synthetic and as large as MovieLens-20M: 116,677 training users, 20,108 items. The batch size is 500 users.
The usual ways are:

    toarray          csr[rows].toarray() of scipy for each batch, float32; and float64 with a cast, as in published code
    dataset          a torch Dataset of dense rows, collated by the workers of a DataLoader
    big batches      a thread makes 10 dense batches at a time, which the loop slices

Feeding is measured without a step. Training is measured with the same optimizer and network (600-200-600) for both.
"""

import argparse
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from itertools import count, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import numpy as np
import project  # noqa: F401  makes fastgpu importable
import publish
import torch
import torch.nn.functional as F
from files import open_rows
from publish import ratios, spread
from scipy import sparse
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fastgpu.feed.sizes import choose_pool_batches
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Tier
from fastgpu.process.machine import available_cpus
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows
from workloads.recsys import AutoEncoder, Workload

ROUNDS = 3
BATCH_SIZE = 500
BIG_BATCHES = 10
"""Number of batches that the thread makes at a time."""
FOLDER = Path(__file__).parent / "data"
SCRIPT = Path(__file__).parents[1] / "tools/make_interactions.py"
CPU = torch.device("cpu")
MODEL = Workload.Options(hidden_dim=600, latent_dim=200, dropout=0.5, variational=True, kl_weight=0.2)

DenseBatches = Generator[Tensor, None, None]
"""Batches (500, items) without end."""


class Size(NamedTuple):
    """How much data is made and measured."""

    name: str
    n_users: int
    n_items: int
    mean_items: float
    """Mean number of items of a user."""
    n_batches: int
    """Batches that are fed in a round."""
    n_steps: int
    """Steps that are trained in a round."""
    n_dense_users: int
    """Users of the Dataset of dense rows, which has to fit in memory: 1.6 GB."""


ML20M = Size("ml-20m-like", 136_677, 20_108, 73.1, 60, 6, 20_000)
QUICK = Size("small", 6_000, 1_000, 30, 10, 2, 5_000)


def make(size: Size, folder: Path = FOLDER) -> Path:
    """The file of training rows; that of validation rows lies beside it."""
    target = folder / f"{size.name}.h5"
    train = folder / f"{size.name}-train.h5"
    if not train.exists():
        folder.mkdir(parents=True, exist_ok=True)
        options = {
            "--users": size.n_users,
            "--items": size.n_items,
            "--mean-items": size.mean_items,
            "--train-share": 0.85367,
        }
        words = [str(word) for option in options.items() for word in option]
        command = [sys.executable, str(SCRIPT), str(target), *words]
        subprocess.run(command, check=True)
    return train


# ---------------------------------------------------------------------------------------------- the usual ways


def shuffled_batches(n_rows: int, seed: int) -> Iterator[np.ndarray]:
    """(500,) row numbers, shuffled, without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(n_rows)
        for start in range(0, n_rows - BATCH_SIZE + 1, BATCH_SIZE):
            yield order[start : start + BATCH_SIZE]


def toarray(matrix: sparse.csr_matrix, dtype: type = np.float32) -> DenseBatches:
    """Dense float32 batches of a matrix of this type. scipy's default is float64."""
    matrix = matrix.astype(dtype)
    for row_ids in shuffled_batches(matrix.shape[0], 0):
        yield torch.from_numpy(matrix[row_ids].toarray()).float()


class DenseRows(Dataset):
    """Rows of a dense matrix, one at a time."""

    def __init__(self, dense: Tensor):
        self.dense = dense

    def __len__(self) -> int:
        return len(self.dense)

    def __getitem__(self, row: int) -> Tensor:
        return self.dense[row]


def dataset(matrix: sparse.csr_matrix, n_users: int) -> DenseBatches:
    """A DataLoader over the first `n_users` rows, which are dense in memory."""
    dense = torch.from_numpy(matrix[:n_users].toarray())
    while True:
        yield from DataLoader(DenseRows(dense), BATCH_SIZE, shuffle=True, drop_last=True, num_workers=available_cpus())


def big_batches(matrix: sparse.csr_matrix) -> DenseBatches:
    """A thread makes the dense rows of ten batches at a time, two of these ahead; the loop slices them."""
    ready: queue.Queue[Tensor] = queue.Queue(2)
    closing = threading.Event()

    def work() -> None:
        batches = shuffled_batches(matrix.shape[0], 0)
        while not closing.is_set():
            row_ids = np.concatenate(list(islice(batches, BIG_BATCHES)))
            dense = torch.from_numpy(matrix[row_ids].toarray())
            while not closing.is_set():
                try:
                    ready.put(dense, timeout=0.1)
                    break
                except queue.Full:
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while True:
            yield from ready.get().split(BATCH_SIZE)
    finally:
        closing.set()
        thread.join()


# ---------------------------------------------------------------------------------------------- this project


def ours(path: Path, tier: Tier) -> Generator[Rows, None, None]:
    """Batches of this project, epoch after epoch."""
    source = open_rows(path, {"items": "items"})
    pool_batches = choose_pool_batches("auto", BATCH_SIZE, source)
    order = BlockSampler(source.block_rows, BATCH_SIZE, shard=Shard(canonical_ranks=4), pool_batches=pool_batches)
    feed = make_feed(source, order, Placement(tier, CPU, available_cpus()))
    try:
        for epoch in count():
            for pool in feed.pools(epoch):
                yield from pool.rows.batches(BATCH_SIZE)
    finally:
        feed.close()


# ---------------------------------------------------------------------------------------------- measurements


def feed_ms(batches: Iterator[Any], n_batches: int) -> tuple[float, int]:
    """(milliseconds, mean bytes) of a batch. Work before the first batch arrives is not counted."""
    next(batches)
    n_bytes = 0
    t0 = time.perf_counter()
    for batch in islice(batches, n_batches):
        n_bytes += batch.nbytes
    return 1000 * (time.perf_counter() - t0) / n_batches, n_bytes // n_batches


def dense_loss(model: AutoEncoder, x_BI: Tensor) -> Tensor:
    """The loss of the same network on dense rows, as it is usually written."""
    hidden = F.linear(F.dropout(F.normalize(x_BI), model.options.dropout), model.weight_IH.T, model.bias_H)
    mean_BL, log_var_BL = model.encode(hidden).chunk(2, 1)
    drawn_BL = mean_BL + torch.exp(0.5 * log_var_BL) * torch.randn_like(mean_BL)
    logits_BI = model.output(model.decode(drawn_BL))
    divergence = -0.5 * (1 + log_var_BL - mean_BL.square() - log_var_BL.exp()).sum(1).mean()
    return -(F.log_softmax(logits_BI, 1) * x_BI).sum(1).mean() + model.options.kl_weight * divergence


def sparse_loss(model: AutoEncoder, batch: Rows) -> Tensor:
    """The loss of the workload, which needs no instance of it."""
    return Workload.loss(None, model, batch)  # type: ignore[arg-type]


def step_ms(n_items: int, batches: Iterator[Any], loss: Callable[[AutoEncoder, Any], Tensor], n_steps: int) -> float:
    """Milliseconds of a whole step, its feed included. The first step is not counted."""
    torch.manual_seed(0)
    model = AutoEncoder(n_items, MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, fused=True)
    t0 = 0.0
    for number, batch in enumerate(islice(batches, n_steps + 1)):
        if number == 1:
            t0 = time.perf_counter()
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()
    return 1000 * (time.perf_counter() - t0) / n_steps


def read_matrix(path: Path) -> sparse.csr_matrix:
    """(users, items) of ones."""
    with h5py.File(path) as file:
        group = file["items"]
        indptr = group["indptr"][:]
        indices = group["indices"][:]
        shape = tuple(group.attrs["shape"])
    return sparse.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=shape)


class Measured(NamedTuple):
    """One value for each round."""

    feed_ms: dict[str, list[float]]
    step_ms: dict[str, list[float]]
    batch_bytes: dict[str, int]


def measure(path: Path, matrix: sparse.csr_matrix, size: Size, n_rounds: int) -> Measured:
    feeds: dict[str, Callable[[], Generator[Any, None, None]]] = {
        "toarray, float64 and a cast": lambda: toarray(matrix, np.float64),
        "toarray, float32": lambda: toarray(matrix),
        f"dataset of dense rows, {available_cpus()} workers": lambda: dataset(matrix, size.n_dense_users),
        "big batches of a thread": lambda: big_batches(matrix),
        "ours, disk tier": lambda: ours(path, "disk"),
        "ours, host tier": lambda: ours(path, "host"),
        "ours, device tier": lambda: ours(path, "device"),
    }
    steps: dict[str, tuple[str, Callable[[AutoEncoder, Any], Tensor]]] = {
        "dense rows by toarray, float32": ("toarray, float32", dense_loss),
        "dense rows by big batches": ("big batches of a thread", dense_loss),
        "ours, disk tier": ("ours, disk tier", sparse_loss),
        "ours, device tier": ("ours, device tier", sparse_loss),
    }
    measured = Measured({name: [] for name in feeds}, {name: [] for name in steps}, {})
    for number in range(n_rounds):
        for name, make_batches in feeds.items():
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            n_batches = size.n_batches * (10 if name.startswith("ours") else 1)
            batches = make_batches()
            batch_ms, measured.batch_bytes[name] = feed_ms(batches, n_batches)
            measured.feed_ms[name].append(batch_ms)
            batches.close()
        for name, (feed_name, loss) in steps.items():
            print(f"round {number + 1}: steps, {name}", file=sys.stderr, flush=True)
            batches = feeds[feed_name]()
            measured.step_ms[name].append(step_ms(matrix.shape[1], batches, loss, size.n_steps))
            batches.close()
    return measured


# ---------------------------------------------------------------------------------------------- the page


def tables(measured: Measured, matrix: sparse.csr_matrix, size: Size) -> list[publish.Table]:
    n_users, n_items = matrix.shape
    disk = measured.feed_ms["ours, disk tier"]
    toarray_f32 = measured.feed_ms["toarray, float32"]
    dense_step = measured.step_ms["dense rows by toarray, float32"]
    disk_step = measured.step_ms["ours, disk tier"]
    targets = [
        ["500 users, feed: toarray float32 / disk tier, warm", spread(ratios(toarray_f32, disk), ".0f", "x"), "20x"],
        ["500 users, feed: disk tier, warm", spread(disk, ".2f", " ms"), "<= 1 ms"],
        ["Mult-VAE, whole step on a CPU: dense / disk tier", spread(ratios(dense_step, disk_step), ".2f", "x"), "1.8x"],
    ]
    feed_rows = [
        [name, spread(times_ms, ".2f"), f"{measured.batch_bytes[name]:,}"]
        for name, times_ms in measured.feed_ms.items()
    ]
    feed_note = (
        f"{n_users:,} users, {n_items:,} items, {matrix.nnz:,} interactions. Median of {len(disk)} rounds, minimum and "
        f"maximum in brackets. The dataset of dense rows has {size.n_dense_users:,} users."
    )
    epoch_steps = n_users // BATCH_SIZE
    step_rows = [
        [name, spread(times_ms, ".0f"), f"{median(times_ms) * epoch_steps / 1000:.0f}"]
        for name, times_ms in measured.step_ms.items()
    ]
    step_columns = ["way", "ms a step", f"s an epoch of {epoch_steps} steps"]
    step_note = "Mult-VAE 600-200-600, AdamW (fused), the feed included. An epoch is computed from the time of a step."
    return [
        publish.Table("targets", publish.TARGET_COLUMNS, targets),
        publish.Table("Feeding 500 users", ["way", "ms", "bytes of a batch"], feed_rows, feed_note),
        publish.Table("Training on them", step_columns, step_rows, step_note),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small data; prints the tables and writes no page")
    is_quick = parser.parse_args().quick
    size = QUICK if is_quick else ML20M
    path = make(size)
    matrix = read_matrix(path)
    measured = measure(path, matrix, size, 1 if is_quick else ROUNDS)
    page = tables(measured, matrix, size)
    if is_quick:
        print(*(table.markdown() for table in page), sep="\n")
    else:
        publish.write("recsys", page, measured._asdict(), "python bench/recsys.py")


if __name__ == "__main__":
    main()
