"""Sparse rows of users: what feeding and training cost, dense as it is usually done and sparse as this project does it.

python bench/recsys.py            (--quick: small data, to try the benchmark itself)

Data of the size of MovieLens-20M, made up: 116,677 training users, 20,108 items. A batch is 500 users. The usual ways:

    toarray          scipy's csr[rows].toarray() a batch, float32; and float64 with a cast, as published code has it
    dataset          a torch Dataset of dense rows, collated by DataLoader's workers
    big batches      a thread makes 10 dense batches at a time, which the loop slices

Feeding is measured without a step, training with the same optimizer and network (600-200-600) for both forms.
"""

import argparse
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import numpy as np
import project  # noqa: F401
import report
import torch
import torch.nn.functional as F
from fastgpu.feed import sizes as auto
from fastgpu.feed.tiers import make_feed
from fastgpu.process import machine
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from scipy import sparse
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from workloads.recsys import AutoEncoder, Workload

ROUNDS = 3
BATCH, BIG = 500, 10  # rows; batches that the thread makes at a time
FOLDER = Path(__file__).parent / "data"
SCRIPT = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}" / "convert.py"
CPU = torch.device("cpu")


class Size(NamedTuple):
    name: str
    users: int
    items: int
    mean_items: float
    batches: int
    """To feed in a round."""
    steps: int
    """To train in a round."""
    dense_users: int
    """As many rows as fit a host's memory many times over when they are dense: 1.6 GB."""


ML20M = Size("ml-20m-like", 136_677, 20_108, 73.1, 60, 6, 20_000)
QUICK = Size("small", 6_000, 1_000, 30, 10, 2, 5_000)


def make(size: Size) -> Path:
    """The file of training rows."""
    target = FOLDER / f"{size.name}.h5"
    train = FOLDER / f"{size.name}-train.h5"
    if not train.exists():
        FOLDER.mkdir(exist_ok=True)
        sizes = {"--rows": size.users, "--items": size.items, "--mean-items": size.mean_items, "--split": 0.85367}
        options = [str(word) for pair in sizes.items() for word in pair]
        command = [sys.executable, str(SCRIPT), "synthetic", str(target), "--kind", "interactions", *options, "--force"]
        subprocess.run(command, check=True)
    return train


# ---------------------------------------------------------------------------------------------- what is usually done


def batches_of(rows: int, seed: int) -> Iterator[np.ndarray]:
    """(500,) row numbers, shuffled, without end."""
    rng = np.random.default_rng(seed)
    while True:
        order = rng.permutation(rows)
        for start in range(0, rows - BATCH + 1, BATCH):
            yield order[start : start + BATCH]


def toarray(matrix: sparse.csr_matrix) -> Iterator[Tensor]:
    """Dense float32 batches (500, items)."""
    for rows in batches_of(matrix.shape[0], 0):
        yield torch.from_numpy(matrix[rows].toarray())


def toarray_f64(matrix: sparse.csr_matrix) -> Iterator[Tensor]:
    """The same of a float64 matrix, as scipy makes it unless told otherwise."""
    wide = matrix.astype(np.float64)
    for rows in batches_of(matrix.shape[0], 0):
        yield torch.FloatTensor(wide[rows].toarray())


class DenseRows(Dataset):
    """Rows of a dense matrix, one at a time."""

    def __init__(self, dense: Tensor):
        self.dense = dense

    def __len__(self) -> int:
        return len(self.dense)

    def __getitem__(self, row: int) -> Tensor:
        return self.dense[row]


def dataset(matrix: sparse.csr_matrix, users: int) -> Iterator[Tensor]:
    """A DataLoader over the first `users` rows, dense in memory."""
    dense = torch.from_numpy(matrix[:users].toarray())
    while True:
        yield from DataLoader(
            DenseRows(dense), BATCH, shuffle=True, drop_last=True, num_workers=machine.available_cpus()
        )


def big_batches(matrix: sparse.csr_matrix) -> Iterator[Tensor]:
    """A thread that makes dense rows for ten batches at a time, two such ahead; the loop slices."""
    made: queue.Queue[Tensor] = queue.Queue(2)
    closing = threading.Event()

    def work() -> None:
        batches = batches_of(matrix.shape[0], 0)
        while not closing.is_set():
            dense = torch.from_numpy(matrix[np.concatenate(list(islice(batches, BIG)))].toarray())
            while not closing.is_set():
                try:
                    made.put(dense, timeout=0.1)
                    break
                except queue.Full:
                    pass

    thread = threading.Thread(target=work)
    thread.start()
    try:
        while True:
            yield from made.get().split(BATCH)
    finally:
        closing.set()
        thread.join()


# ---------------------------------------------------------------------------------------------- ours


def ours(path: Path, tier: Any) -> Iterator[Rows]:
    """Batches of this project, epoch after epoch."""
    store = open_store("bench", str(path), {"items": "items"})
    pool_batches = auto.choose_pool_batches("auto", BATCH, store.row_bytes, len(store))
    order = BlockSampler(store.block_rows, BATCH, pool_batches=pool_batches, canonical_ranks=4)
    feed = make_feed(store, order, tier, CPU, machine.available_cpus())
    try:
        for epoch in cycle(range(1 << 20)):
            for pool in feed.pools(epoch):
                yield from pool.rows.batches(BATCH)
    finally:
        feed.close()


# ---------------------------------------------------------------------------------------------- measures


def feed_ms(batches: Iterator[Any], count: int) -> tuple[float, int]:
    """(milliseconds of a batch, its bytes in the mean); what was made before the first one is not counted."""
    next(batches)
    t0, nbytes = time.perf_counter(), 0
    for batch in islice(batches, count):
        nbytes += batch.nbytes
    return 1000 * (time.perf_counter() - t0) / count, nbytes // count


def dense_loss(model: AutoEncoder, x_BI: Tensor) -> Tensor:
    """The loss of the same network on dense rows, as it is usually written."""
    hidden = F.linear(F.dropout(F.normalize(x_BI), model.dropout), model.weight_IH.T, model.bias_H)
    mean_BL, log_var_BL = model.encode(hidden).chunk(2, 1)
    drawn_BL = mean_BL + torch.exp(0.5 * log_var_BL) * torch.randn_like(mean_BL)
    logits_BI = model.output(model.decode(drawn_BL))
    divergence = -0.5 * (1 + log_var_BL - mean_BL.square() - log_var_BL.exp()).sum(1).mean()
    return -(F.log_softmax(logits_BI, 1) * x_BI).sum(1).mean() + model.kl_weight * divergence


def sparse_loss(model: AutoEncoder, batch: Rows) -> Tensor:
    return Workload.loss(None, model, batch)  # type: ignore[arg-type]


def step_ms(items: int, batches: Iterator[Any], loss_of: Callable[[AutoEncoder, Any], Tensor], count: int) -> float:
    """Milliseconds of a whole step, its feed included; the first one is not counted."""
    torch.manual_seed(0)
    model = AutoEncoder(items, hidden=600, latent=200, dropout=0.5, variational=True, kl_weight=0.2, kl_anneal_steps=0)
    optimizer, t0 = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0, fused=True), 0.0
    for number, batch in enumerate(islice(batches, count + 1)):
        if number == 1:
            t0 = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    return 1000 * (time.perf_counter() - t0) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small data; prints, and writes no page")
    quick = parser.parse_args().quick
    size = QUICK if quick else ML20M
    path = make(size)
    with h5py.File(path) as file:
        group = file["items"]
        shape, indptr, indices = tuple(group.attrs["shape"]), group["indptr"][:], group["indices"][:]
    matrix = sparse.csr_matrix((np.ones(len(indices), np.float32), indices, indptr), shape=shape)
    feeds: dict[str, Callable[[], Iterator[Any]]] = {
        "toarray, float64 and a cast": lambda: toarray_f64(matrix),
        "toarray, float32": lambda: toarray(matrix),
        f"dataset of dense rows, {machine.available_cpus()} workers": lambda: dataset(matrix, size.dense_users),
        "big batches of a thread": lambda: big_batches(matrix),
        "ours, disk tier": lambda: ours(path, "disk"),
        "ours, host tier": lambda: ours(path, "host"),
        "ours, device tier": lambda: ours(path, "device"),
    }
    steps = {
        "dense rows by toarray, float32": ("toarray, float32", dense_loss),
        "dense rows by big batches": ("big batches of a thread", dense_loss),
        "ours, disk tier": ("ours, disk tier", sparse_loss),
        "ours, device tier": ("ours, device tier", sparse_loss),
    }
    fed: dict[str, list[float]] = {name: [] for name in feeds}
    stepped: dict[str, list[float]] = {name: [] for name in steps}
    nbytes: dict[str, int] = {}
    for number in range(1 if quick else ROUNDS):
        for name, make_batches in feeds.items():
            print(f"round {number + 1}: {name}", file=sys.stderr, flush=True)
            count = size.batches * (10 if name.startswith("ours") else 1)
            batches = make_batches()
            found, nbytes[name] = feed_ms(batches, count)
            batches.close()  # type: ignore[attr-defined]
            fed[name].append(found)
        for name, (source, loss_of) in steps.items():
            print(f"round {number + 1}: steps, {name}", file=sys.stderr, flush=True)
            batches = feeds[source]()
            stepped[name].append(step_ms(shape[1], batches, loss_of, size.steps))
            batches.close()  # type: ignore[attr-defined]
    disk, f32 = fed["ours, disk tier"], fed["toarray, float32"]
    dense, whole = stepped["dense rows by toarray, float32"], stepped["ours, disk tier"]
    epoch_batches = shape[0] // BATCH
    targets = [
        ["500 users, feed: toarray float32 / disk tier, warm", _spread(_ratios(f32, disk), ".0f", "x"), "20x"],
        ["500 users, feed: disk tier, warm", _spread(disk, ".2f", " ms"), "<= 1 ms"],
        ["Mult-VAE, whole step on a CPU: dense / disk tier", _spread(_ratios(dense, whole), ".2f", "x"), "1.8x"],
    ]
    tables = [
        report.Table("targets", ["what", "measured", "must / aim"], targets),
        report.Table(
            "Feeding 500 users",
            ["way", "ms", "bytes of a batch"],
            [[name, _spread(fed[name], ".2f"), f"{nbytes[name]:,}"] for name in feeds],
            f"{shape[0]:,} users, {shape[1]:,} items, {len(indices):,} interactions. Median of {ROUNDS} "
            f"rounds, least and most. The dataset of dense rows holds {size.dense_users:,} users.",
        ),
        report.Table(
            "Training on them",
            ["way", "ms a step", f"s an epoch of {epoch_batches} steps"],
            [
                [name, _spread(times, ".0f"), f"{median(times) * epoch_batches / 1000:.0f}"]
                for name, times in stepped.items()
            ],
            "Mult-VAE 600-200-600, AdamW (fused), the feed included; an epoch is the step times its number.",
        ),
    ]
    if quick:
        print(*(table.markdown() for table in tables), sep="\n")
    else:
        data = {"feed_ms": fed, "step_ms": stepped, "batch_bytes": nbytes}
        report.write("recsys", tables, data, "python bench/recsys.py")


def _ratios(above: list[float], n_items: list[float]) -> list[float]:
    """Of each round."""
    return [a / b for a, b in zip(above, n_items, strict=True)]


def _spread(values: list[float], form: str, unit: str = "") -> str:
    return f"{median(values):{form}}{unit} [{min(values):{form}}-{max(values):{form}}]"


if __name__ == "__main__":
    main()
