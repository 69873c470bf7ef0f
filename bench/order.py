"""How random is the order, and what does it cost? No file is read: the order is a function of the blocks' sizes.

python bench/order.py

Shuffle quality is judged on labels, since their shares are what a biased batch gets wrong: chi2/df of a batch's label
counts against the file's shares, 1 in the mean for a random sample. The worst file there is, sorted by class, is
compared with one written in random order, and pools of blocks with a full shuffle of all rows.
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
import report
from fastgpu.feed import sizes as auto
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.layout import BLOCK_BYTES
from torch.utils.data import DistributedSampler

POOL_BLOCKS = (1, 8, 32, 128, 512)
MIN_BATCHES = 2000  # that chi2/df is the mean of: its standard error for 40 classes is then 0.005
SCALE_ROWS, TORCH_ROWS = 10**9, 10**7
SCALE_RANKS = 1024
SCALE_BATCH = 64  # rows a rank
SCALE_POOL = 32  # batches
SCALE_RUNS = 3


class Data(NamedTuple):
    """A data set as far as the order goes."""

    name: str
    rows: int
    row_bytes: int
    classes: int

    @property
    def block_rows(self) -> np.ndarray:
        """(blocks,) rows of each, as the project's writer makes them."""
        starts = np.arange(0, self.rows, max(1, BLOCK_BYTES // self.row_bytes))
        return np.diff(starts, append=self.rows)


CELEBA = Data("CelebA-like", 200_000, 3 * 218 * 178 + 8, 40)
IMAGENET = Data("ImageNet-like", 1_280_000, 3 * 224 * 224 + 8, 1000)


class Quality(NamedTuple):
    """Of one way to shuffle. The chances are relative to those of a full shuffle."""

    data: str
    batch_size: int
    pool_batches: int
    """0: all rows are shuffled."""
    pool_blocks: float
    canonical_ranks: int
    is_default: bool
    chi2_sorted: float
    chi2_random: float
    batch_again: float
    """That two rows of a batch share one in the next epoch too."""
    pool_again: float
    """That two rows of a pool share one in the next epoch too."""


# ---------------------------------------------------------------------------------------------- shuffle quality


def epoch_rows(order: BlockSampler, epoch: int) -> np.ndarray:
    """(rows,) int64: the row numbers of an epoch in training order."""
    return np.concatenate([order.row_ids(plan) for plan in order.pools(epoch)])


def chi2_per_df(labels: np.ndarray, batch_size: int, classes: int) -> float:
    """How far the label counts of a batch are from the file's shares; the mean over the batches.

    sum over k of (n_k - e)^2 / e / (classes - 1), where n_k rows of the batch are of class k and e = batch_rows /
    classes are expected: all classes are equally frequent. labels: (rows,) in training order; an incomplete last batch
    is left out.
    """
    batches, expected = len(labels) // batch_size, batch_size / classes
    cells = np.arange(batches * batch_size) // batch_size * classes + labels[: batches * batch_size]
    counts = np.bincount(cells, minlength=batches * classes)
    return float(np.square(counts - expected).sum() / expected / batches / (classes - 1))


def meet_again(first: np.ndarray, second: np.ndarray, group_rows: int, rows: int) -> float:
    """Chance that two rows of one group share a group of the next epoch, over that of a full shuffle.

    first, second: row numbers of the two epochs in training order, cut into groups of `group_rows`; rows: of the file.
    """
    groups = np.full((2, rows), -1)
    for group, order in zip(groups, (first, second), strict=True):
        group[order] = np.arange(len(order)) // group_rows
    both = groups[:, (groups >= 0).all(0)]  # the end of a lane may be left out of an epoch
    _, raise_on_every_rank = np.unique(both[0] * rows + both[1], return_counts=True)
    before, after = _pairs(np.bincount(both[0])), _pairs(np.bincount(both[1]))
    return _pairs(raise_on_every_rank) / before / (after / _pairs(np.array([both.shape[1]])))


def _pairs(counts: np.ndarray) -> float:
    return float((counts.astype(np.float64) * (counts - 1)).sum() / 2)


def qualities(data: Data, batch_size: int, pool_blocks: tuple[int, ...] = POOL_BLOCKS) -> Iterator[Quality]:
    """Pools of each size with one lane and with as many as `auto` chooses, then a full shuffle."""
    random = np.random.default_rng(0)
    by_class = np.arange(data.rows) * data.classes // data.rows
    in_random_order = random.permutation(by_class)
    block_rows, rows_a_block = data.block_rows, int(data.block_rows[0])
    default_lanes = auto.choose_lanes("auto", batch_size, 1, len(block_rows), data.name)
    default = auto.choose_pool_batches("auto", batch_size, data.row_bytes, data.rows)
    needed = max(2, -(-MIN_BATCHES * batch_size // data.rows))

    def chi2(labels: np.ndarray, epochs: list[np.ndarray]) -> float:
        return fmean(chi2_per_df(labels[rows], batch_size, data.classes) for rows in epochs)

    sizes = {max(1, round(blocks * rows_a_block / batch_size)) for blocks in pool_blocks} | {default}
    for pool_batches in sorted(sizes):
        for canonical_ranks in sorted({1, default_lanes}):
            order = BlockSampler(block_rows, batch_size, canonical_ranks=canonical_ranks, pool_batches=pool_batches)
            epochs = [epoch_rows(order, epoch) for epoch in range(needed)]
            yield Quality(
                data.name,
                batch_size,
                pool_batches,
                pool_batches * batch_size / rows_a_block,
                canonical_ranks,
                (pool_batches, canonical_ranks) == (default, default_lanes),
                chi2(by_class, epochs),
                chi2(in_random_order, epochs),
                meet_again(epochs[0], epochs[1], batch_size, data.rows),
                meet_again(epochs[0], epochs[1], pool_batches * batch_size, data.rows),
            )
    epochs = [random.permutation(data.rows) for _ in range(needed)]
    shuffled = (chi2(labels, epochs) for labels in (by_class, in_random_order))
    again = (meet_again(epochs[0], epochs[1], rows, data.rows) for rows in (batch_size, default * batch_size))
    yield Quality(data.name, batch_size, 0, len(block_rows), 1, False, *shuffled, *again)


# ---------------------------------------------------------------------------------------------- scale


class Start(NamedTuple):
    """What the beginning of an epoch took on one rank."""

    seconds: float
    peak_bytes: int
    """Resident, beyond what the imports had taken."""


def start_blocks(rows: int) -> Start:
    """Ours, 100 rows a block: the sampler, an epoch, its first pool plan and that pool's row numbers."""
    before = _status_bytes("VmRSS")
    block_rows = np.full(rows // 100, 100, np.int32)  # as Store has it
    t0 = time.perf_counter()
    order = BlockSampler(block_rows, SCALE_BATCH, world_size=SCALE_RANKS, pool_batches=SCALE_POOL)
    order.row_ids(next(order.pools(0)))
    return Start(time.perf_counter() - t0, _status_bytes("VmHWM") - before)


def start_torch(rows: int) -> Start:
    """torch's DistributedSampler: an epoch and its first row number."""
    before = _status_bytes("VmRSS")
    t0 = time.perf_counter()
    next(iter(DistributedSampler(range(rows), SCALE_RANKS, 0)))  # type: ignore[arg-type]
    return Start(time.perf_counter() - t0, _status_bytes("VmHWM") - before)


def in_fresh_process(what: str, rows: int) -> Start:
    """Medians of `start_<what>` in SCALE_RUNS processes, one after the other."""
    command = [sys.executable, __file__, "--start", what, "--rows", str(rows)]
    runs = [Start(*json.loads(subprocess.check_output(command, text=True))) for _ in range(SCALE_RUNS)]
    return Start(median(run.seconds for run in runs), round(median(run.peak_bytes for run in runs)))


def _status_bytes(name: str) -> int:
    """VmRSS or VmHWM of this process. ru_maxrss would not do: a child inherits what its parent had reached."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


# ---------------------------------------------------------------------------------------------- the page


def quality_table(found: list[Quality]) -> report.Table:
    columns = [
        "rows",
        "batch",
        "lanes",
        "batches a pool",
        "blocks a pool",
        "sorted file: chi2/df",
        "random file: chi2/df",
        "batch mates again",
        "pool mates again",
    ]
    rows = []
    for each in found:
        pool = [f"{each.pool_batches}{' (auto)' if each.is_default else ''}", f"{each.pool_blocks:.0f}"]
        how = [str(each.canonical_ranks), *pool] if each.pool_batches else ["-", "full shuffle", "all"]
        numbers = [each.chi2_sorted, each.chi2_random, each.batch_again, each.pool_again]
        rows.append([each.data, str(each.batch_size), *how, *(f"{number:.2f}" for number in numbers)])
    return report.Table("shuffle quality", columns, rows, what_follows(found))


def what_follows(found: list[Quality]) -> str:
    default = next(each for each in found if each.is_default)
    like = [
        each
        for each in found
        if each[:2] == default[:2] and each.pool_batches and each.canonical_ranks == default.canonical_ranks
    ]
    pools = (like[0], default, like[-1])
    blocks = [f"{each.pool_blocks:.0f} blocks" for each in pools]
    biased = ", ".join(f"{each.chi2_sorted:.1f} with {size}" for each, size in zip(pools, blocks, strict=True))
    again = ", ".join(f"{each.batch_again:.2f} times with {size}" for each, size in zip(pools, blocks, strict=True))
    random = [each.chi2_random for each in found if each.pool_batches]
    return f"""\
chi2/df: mean over the batches of an epoch or more, 1 for a random sample. "again": how often two rows that shared a
batch (a pool) share one in the next epoch too, as a multiple of a full shuffle's, whose pools are as large as `auto`'s.
Blocks have {BLOCK_BYTES >> 20} MiB. A pool is at least one batch, so the smallest pools have more than one block.

What follows, with numbers for {default.data} rows in batches of {default.batch_size} and {default.canonical_ranks} lanes:

- A file in random order gives batches like a full shuffle's with pools of any size: chi2/df is {min(random):.2f} to
  {max(random):.2f} in the whole table. So a file should be written in random order, once.
- If it is sorted by class, chi2/df is about 1 + batch / blocks of a pool: {biased}.
  It is the number of blocks that counts, not their size: hence small blocks, and many of them.
- Rows that are neighbours in the file stay near each other in every epoch. Batch mates meet again {again}
  as often as in a full shuffle: about 1 + blocks of the file / (blocks of a pool)^2.
- Hence a pool of 128 blocks, 256 MiB. Three are held at once, so more blocks would cost memory on the host and on the
  device, and gain little unless the file is sorted; the project warns of that."""


def scale_table(ours: Start, torchs: Start) -> report.Table:
    a_row = torchs.peak_bytes / TORCH_ROWS
    rows = [
        ["BlockSampler, 10^7 blocks", f"{SCALE_ROWS:.0e}", f"{ours.seconds:.2f}", f"{ours.peak_bytes / 1e6:,.0f}"],
        ["DistributedSampler", f"{TORCH_ROWS:.0e}", f"{torchs.seconds:.2f}", f"{torchs.peak_bytes / 1e6:,.0f}"],
        ["DistributedSampler", f"{SCALE_ROWS:.0e}", "not measured", f"computed: {a_row * SCALE_ROWS / 1e6:,.0f}"],
    ]
    note = (
        f"On one of {SCALE_RANKS:,} ranks, {SCALE_BATCH} rows a batch and {SCALE_POOL} batches a pool: until the first "
        f"pool's row numbers, or torch's first row number, are known. Medians of {SCALE_RUNS} fresh processes; memory "
        "is the highest resident size less that after the imports, the table of block sizes included. torch's "
        f"sampler took {a_row:.0f} bytes a row; the last line is that times the rows, not a measurement."
    )
    return report.Table("the start of an epoch", ["sampler", "rows", "s", "MB"], rows, note)


def targets_table(found: list[Quality], ours: Start) -> report.Table:
    default = [each.chi2_random for each in found if each.is_default]
    full = [each.chi2_random for each in found if not each.pool_batches]
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
    return report.Table("targets", ["what", "measured", "must / aim"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="shuffle quality and cost of the order")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of the result")
    parser.add_argument("--start", choices=["blocks", "torch"], help="only begin an epoch, and print what that took")
    parser.add_argument("--rows", type=int, default=SCALE_ROWS, help="for --start")
    arguments = parser.parse_args()
    if arguments.start:
        print(json.dumps({"blocks": start_blocks, "torch": start_torch}[arguments.start](arguments.rows)))
        return
    ours, torchs = in_fresh_process("blocks", SCALE_ROWS), in_fresh_process("torch", TORCH_ROWS)
    found: list[Quality] = []
    for data in (CELEBA, IMAGENET):
        for batch_size in (256, 1024):
            found += qualities(data, batch_size)
            print(f"{data.name}, batch {batch_size}: done", file=sys.stderr, flush=True)
    raw = {"qualities": [each._asdict() for each in found], "blocks": ours._asdict(), "torch": torchs._asdict()}
    tables = [targets_table(found, ours), quality_table(found), scale_table(ours, torchs)]
    report.write("order", tables, raw, "python bench/order.py", arguments.out)


if __name__ == "__main__":
    main()
