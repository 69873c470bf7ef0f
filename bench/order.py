"""How random is the order of the rows, and what does it cost? No file is read: the order depends on block sizes only.

python bench/order.py

Shuffle quality is judged by labels, because a biased batch has wrong shares of the classes. The measure is chi2/df of
the label counts of a batch against the shares of the file; its mean is 1 for a random sample. The worst possible file,
sorted by class, is compared with a file in random order, and pools of blocks with a full shuffle of all rows.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

import numpy as np
import project  # noqa: F401
import publish
from torch.utils.data import DistributedSampler

from fastgpu.feed.sizes import choose_canonical_ranks, choose_pool_batches
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Field
from fastgpu.storage.layout import BLOCK_BYTES

POOL_BLOCKS = (1, 8, 32, 128, 512)
MIN_BATCHES = 2000
"""chi2/df is the mean over at least this many batches. Its standard error for 40 classes is then 0.005."""
SCALE_ROWS = 10**9
TORCH_ROWS = 10**7
SCALE_RANKS = 1024
SCALE_BATCH = 64
"""Rows of a batch on one rank."""
SCALE_POOL = 32
"""Batches of a pool."""
SCALE_RUNS = 3


class Data(Dataset):
    """A data set without bytes: all that the order needs to know."""

    def __init__(self, name: str, n_rows: int, row_bytes: int, n_classes: int):
        self.name = name
        self.n_rows = n_rows
        self.n_classes = n_classes
        self.fields = {"row": Field(np.dtype(np.uint8), (row_bytes,))}
        self.attributes = {}
        starts = np.arange(0, n_rows, max(1, BLOCK_BYTES // row_bytes))  # as the writer of the project makes blocks
        self.block_rows = np.diff(starts, append=n_rows).astype(np.int32)

    def __len__(self) -> int:
        return self.n_rows


CELEBA = Data("CelebA-like", 200_000, 3 * 218 * 178 + 8, 40)
IMAGENET = Data("ImageNet-like", 1_280_000, 3 * 224 * 224 + 8, 1000)


class Quality(NamedTuple):
    """The quality of one way to shuffle. The chances are relative to those of a full shuffle."""

    data: str
    batch_size: int
    pool_batches: int
    """0: all rows are shuffled."""
    pool_blocks: float
    canonical_ranks: int
    is_default: bool
    """Whether `auto` chooses this pool and this number of canonical ranks."""
    chi2_sorted: float
    """chi2/df of a file that is sorted by class."""
    chi2_random: float
    """chi2/df of a file in random order."""
    batch_again: float
    """Chance that two rows of a batch share a batch in the next epoch, too."""
    pool_again: float
    """Chance that two rows of a pool share a pool in the next epoch, too."""


# ---------------------------------------------------------------------------------------------- shuffle quality


def epoch_rows(order: BlockSampler, epoch: int) -> np.ndarray:
    """(rows,) int64: the row numbers of an epoch in training order."""
    return np.concatenate([plan.row_ids for plan in order.pools(epoch)])


def chi2_per_df(labels: np.ndarray, batch_size: int, n_classes: int) -> float:
    """How far the label counts of a batch are from the shares of the file: the mean over the batches.

    sum over k of (n_k - e)^2 / e / (n_classes - 1), where n_k rows of the batch are of class k and e = batch_size /
    n_classes are expected: all classes are equally frequent. labels: (rows,) in training order. An incomplete last
    batch is left out.
    """
    n_batches = len(labels) // batch_size
    expected = batch_size / n_classes
    n_rows = n_batches * batch_size
    cells = np.arange(n_rows) // batch_size * n_classes + labels[:n_rows]
    counts = np.bincount(cells, minlength=n_batches * n_classes)
    return float(np.square(counts - expected).sum() / expected / n_batches / (n_classes - 1))


def meet_again(first: np.ndarray, second: np.ndarray, group_rows: int, n_rows: int) -> float:
    """Chance that two rows of a group share a group in the next epoch, relative to a full shuffle.

    first, second: row numbers of two epochs in training order, which are cut into groups of `group_rows`. n_rows: rows
    of the file.
    """
    groups = np.full((2, n_rows), -1)
    groups[0, first] = np.arange(len(first)) // group_rows
    groups[1, second] = np.arange(len(second)) // group_rows
    in_both = groups[:, (groups >= 0).all(0)]  # an epoch may leave out the end of a canonical rank
    _, shared_counts = np.unique(in_both[0] * n_rows + in_both[1], return_counts=True)
    first_pairs = _count_pairs(np.bincount(in_both[0]))
    second_pairs = _count_pairs(np.bincount(in_both[1]))
    all_pairs = _count_pairs(np.array([in_both.shape[1]]))
    return _count_pairs(shared_counts) / first_pairs / (second_pairs / all_pairs)


def _count_pairs(counts: np.ndarray) -> float:
    """Number of pairs of rows in groups of these sizes."""
    return float((counts.astype(np.float64) * (counts - 1)).sum() / 2)


def qualities(data: Data, batch_size: int, pool_blocks: tuple[int, ...] = POOL_BLOCKS) -> Iterator[Quality]:
    """Pools of each size with one canonical rank and with as many as `auto` chooses, then a full shuffle."""
    rng = np.random.default_rng(0)
    by_class = np.arange(data.n_rows) * data.n_classes // data.n_rows
    in_random_order = rng.permutation(by_class)
    rows_per_block = int(data.block_rows[0])
    default_ranks = choose_canonical_ranks(batch_size, 1, data)
    default_batches = choose_pool_batches("auto", batch_size, data)
    n_epochs = max(2, -(-MIN_BATCHES * batch_size // data.n_rows))

    def chi2(labels: np.ndarray, epochs: list[np.ndarray]) -> float:
        return fmean(chi2_per_df(labels[row_ids], batch_size, data.n_classes) for row_ids in epochs)

    def judge(epochs: list[np.ndarray], pool_batches: int, canonical_ranks: int) -> Quality:
        """pool_batches: 0 for a full shuffle."""
        pool_rows = (pool_batches or default_batches) * batch_size
        return Quality(
            data=data.name,
            batch_size=batch_size,
            pool_batches=pool_batches,
            pool_blocks=pool_rows / rows_per_block if pool_batches else len(data.block_rows),
            canonical_ranks=canonical_ranks,
            is_default=(pool_batches, canonical_ranks) == (default_batches, default_ranks),
            chi2_sorted=chi2(by_class, epochs),
            chi2_random=chi2(in_random_order, epochs),
            batch_again=meet_again(epochs[0], epochs[1], batch_size, data.n_rows),
            pool_again=meet_again(epochs[0], epochs[1], pool_rows, data.n_rows),
        )

    sizes = {max(1, round(n_blocks * rows_per_block / batch_size)) for n_blocks in pool_blocks} | {default_batches}
    for pool_batches in sorted(sizes):
        for canonical_ranks in sorted({1, default_ranks}):
            shard = Shard(canonical_ranks=canonical_ranks)
            order = BlockSampler(data.block_rows, batch_size, shard=shard, pool_batches=pool_batches)
            yield judge([epoch_rows(order, epoch) for epoch in range(n_epochs)], pool_batches, canonical_ranks)
    yield judge([rng.permutation(data.n_rows) for _ in range(n_epochs)], 0, 1)


# ---------------------------------------------------------------------------------------------- scale


class Start(NamedTuple):
    """The cost of beginning an epoch on one rank."""

    seconds: float
    peak_bytes: int
    """Highest resident memory beyond that after the imports."""


def start_blocks(n_rows: int) -> Start:
    """Our sampler with 100 rows in a block: its construction, the first plan of a pool, and its row numbers."""
    bytes_before = _status_bytes("VmRSS")
    block_rows = np.full(n_rows // 100, 100, np.int32)  # as a source has it
    t0 = time.perf_counter()
    shard = Shard(world_size=SCALE_RANKS)
    order = BlockSampler(block_rows, SCALE_BATCH, shard=shard, pool_batches=SCALE_POOL)
    _ = next(order.pools(0)).row_ids
    return Start(time.perf_counter() - t0, _status_bytes("VmHWM") - bytes_before)


def start_torch(n_rows: int) -> Start:
    """torch's DistributedSampler: its construction and the first row number."""
    bytes_before = _status_bytes("VmRSS")
    t0 = time.perf_counter()
    next(iter(DistributedSampler(range(n_rows), SCALE_RANKS, 0)))  # type: ignore[arg-type]
    return Start(time.perf_counter() - t0, _status_bytes("VmHWM") - bytes_before)


STARTS = {"blocks": start_blocks, "torch": start_torch}


def in_new_process(sampler: str, n_rows: int) -> Start:
    """Medians over SCALE_RUNS processes, one after the other. sampler: a key of STARTS."""
    command = [sys.executable, __file__, "--start", sampler, "--rows", str(n_rows)]
    runs = [Start(*json.loads(subprocess.check_output(command, text=True))) for _ in range(SCALE_RUNS)]
    return Start(median(run.seconds for run in runs), round(median(run.peak_bytes for run in runs)))


def _status_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process. ru_maxrss is no alternative: a child inherits the maximum of its parent."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# ---------------------------------------------------------------------------------------------- the page


def quality_table(results: list[Quality]) -> publish.Table:
    columns = [
        "rows",
        "batch size",
        "canonical ranks",
        "batches in a pool",
        "blocks in a pool",
        "sorted file: chi2/df",
        "random file: chi2/df",
        "batch mates again",
        "pool mates again",
    ]
    rows = []
    for quality in results:
        if quality.pool_batches:
            pool_batches = f"{quality.pool_batches}{' (auto)' if quality.is_default else ''}"
            settings = [str(quality.canonical_ranks), pool_batches, f"{quality.pool_blocks:.0f}"]
        else:
            settings = ["-", "full shuffle", "all"]
        numbers = [quality.chi2_sorted, quality.chi2_random, quality.batch_again, quality.pool_again]
        rows.append([quality.data, str(quality.batch_size), *settings, *(f"{number:.2f}" for number in numbers)])
    return publish.Table("shuffle quality", columns, rows, conclusions(results))


def conclusions(results: list[Quality]) -> str:
    """The note of the table: how to read it, and what follows from it."""
    default = next(quality for quality in results if quality.is_default)
    same_settings = [
        quality
        for quality in results
        if quality.pool_batches
        and (quality.data, quality.batch_size) == (default.data, default.batch_size)
        and quality.canonical_ranks == default.canonical_ranks
    ]
    pools = (same_settings[0], default, same_settings[-1])
    biased = ", ".join(f"{pool.chi2_sorted:.1f} with {pool.pool_blocks:.0f} blocks" for pool in pools)
    again = ", ".join(f"{pool.batch_again:.2f} times with {pool.pool_blocks:.0f} blocks" for pool in pools)
    random = [quality.chi2_random for quality in results if quality.pool_batches]
    return f"""\
chi2/df: mean over the batches of at least one epoch; 1 for a random sample. "again": how often two rows that shared a
batch (a pool) share one in the next epoch, too, as a multiple of the same for a full shuffle, with pools as large as
those of `auto`. Blocks have {BLOCK_BYTES >> 20} MiB. A pool has at least one batch, so the smallest pools have
several blocks.

Conclusions, with numbers for {default.data} rows, batch size {default.batch_size} and {default.canonical_ranks} \
canonical ranks:

- A file in random order gives batches like those of a full shuffle, whatever the size of the pools: chi2/df is
  {min(random):.2f} to {max(random):.2f} in the whole table. So write a file in random order, once.
- If the file is sorted by class, chi2/df is about 1 + batch size / blocks of a pool: {biased}.
  The number of blocks counts, not their size. That is why blocks are small and pools have many of them.
- Rows that are neighbours in the file stay near each other in every epoch. Batch mates meet again {again}
  as often as in a full shuffle: about 1 + blocks of the file / (blocks of a pool)^2.
- That is why a pool has 128 blocks, 256 MiB. Three pools are held at once, so more blocks would cost memory on the host
  and on the device, and would gain little unless the file is sorted, which the project warns about."""


def scale_table(ours: Start, torchs: Start) -> publish.Table:
    bytes_per_row = torchs.peak_bytes / TORCH_ROWS
    torch_mb = bytes_per_row * SCALE_ROWS / 1e6
    rows = [
        ["BlockSampler, 10^7 blocks", f"{SCALE_ROWS:.0e}", f"{ours.seconds:.2f}", f"{ours.peak_bytes / 1e6:,.0f}"],
        ["DistributedSampler", f"{TORCH_ROWS:.0e}", f"{torchs.seconds:.2f}", f"{torchs.peak_bytes / 1e6:,.0f}"],
        ["DistributedSampler", f"{SCALE_ROWS:.0e}", "not measured", f"computed: {torch_mb:,.0f}"],
    ]
    note = (
        f"On one of {SCALE_RANKS:,} ranks, {SCALE_BATCH} rows in a batch and {SCALE_POOL} batches in a pool: time "
        "until the row numbers of the first pool, or the first row number of torch, are known. Medians of "
        f"{SCALE_RUNS} new processes. Memory is the highest resident size minus that after the imports, and includes "
        f"the table of block sizes. torch's sampler took {bytes_per_row:.0f} bytes for each row; the last line is "
        "that times the number of rows, not a measurement."
    )
    return publish.Table("the start of an epoch", ["sampler", "rows", "s", "MB"], rows, note)


def targets_table(results: list[Quality], ours: Start) -> publish.Table:
    default = [quality.chi2_random for quality in results if quality.is_default]
    full = [quality.chi2_random for quality in results if not quality.pool_batches]
    rows = [
        [
            "chi2/df of a batch's labels, file in random order, pools by `auto`",
            f"{min(default):.3f} to {max(default):.3f}",
            f"a full shuffle's: {min(full):.3f} to {max(full):.3f}",
        ],
        [
            f"an epoch of 10^9 rows in 10^7 blocks begins on one of {SCALE_RANKS:,} ranks",
            f"{ours.seconds:.1f} s, {ours.peak_bytes / 1e6:,.0f} MB",
            "< 2 s, < 200 MB",
        ],
    ]
    return publish.Table("targets", publish.TARGET_COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="shuffle quality and cost of the order")
    parser.add_argument("--out", type=Path, default=publish.RESULTS, help="folder of the result")
    parser.add_argument("--start", choices=STARTS, help="only begin an epoch, and print its cost")
    parser.add_argument("--rows", type=int, default=SCALE_ROWS, help="number of rows for --start")
    args = parser.parse_args()
    if args.start:
        print(json.dumps(STARTS[args.start](args.rows)))
        return
    ours = in_new_process("blocks", SCALE_ROWS)
    torchs = in_new_process("torch", TORCH_ROWS)
    results: list[Quality] = []
    for data in (CELEBA, IMAGENET):
        for batch_size in (256, 1024):
            results += qualities(data, batch_size)
            print(f"{data.name}, batch size {batch_size}: done", file=sys.stderr, flush=True)
    raw = {"qualities": [quality._asdict() for quality in results], "blocks": ours._asdict(), "torch": torchs._asdict()}
    tables = [targets_table(results, ours), quality_table(results), scale_table(ours, torchs)]
    publish.write("order", tables, raw, "python bench/order.py", folder=args.out)


if __name__ == "__main__":
    main()
