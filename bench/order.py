"""How random is the order of the rows, and what does it cost? No file is read: the order depends on block sizes only.

Shuffle quality is judged by labels, because a biased batch has wrong shares of the classes. The measure is chi2/df of
the label counts of a batch against the shares of the file; its mean is 1 for a random sample. The worst possible file,
sorted by class, is compared with a file in random order, and pools of blocks with a full shuffle of all rows.
"""

import time
import tracemalloc
from functools import partial
from statistics import fmean, median
from typing import Any

import numpy as np
import publish
from data import DataSpec
from publish import take_turns

from fastgpu.feed.sizes import POOL_BYTES
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.storage.layout import BLOCK_BYTES

POOL_BLOCKS = (1, 8, 32, 128, 512)
CANONICAL_RANKS = 8
MIN_BATCHES = 2000
"""chi2/df is the mean over at least this many batches. Its standard error for 40 classes is then 0.005."""
SCALE_RANKS = 1024
SETS = (DataSpec("CelebA-like", 200_000, (3, 218, 178), 256), DataSpec("ImageNet-like", 1_280_000, (3, 224, 224), 256))
QUICK = (DataSpec("small", 20_000, (2, 256, 256), 256),)
N_CLASSES = 40


def block_rows_of(spec: DataSpec) -> np.ndarray:
    """(blocks,) int32: the rows of each block of 2 MiB."""
    starts = np.arange(0, spec.n_rows, BLOCK_BYTES // spec.row_bytes)
    return np.diff(starts, append=spec.n_rows).astype(np.int32)


def chi2_per_df(labels: np.ndarray, batch_size: int, n_classes: int) -> float:
    """The mean over whole batches of sum over k of (n_k - e)^2 / e / (n_classes - 1).

    n_k rows of a batch are of class k, and e = batch_size / n_classes are expected: all classes are equally frequent.
    labels: (rows,) in training order.
    """
    n_batches = len(labels) // batch_size
    expected = batch_size / n_classes
    n_rows = n_batches * batch_size
    cells = np.arange(n_rows) // batch_size * n_classes + labels[:n_rows]
    counts = np.bincount(cells, minlength=n_batches * n_classes)
    return float(np.square(counts - expected).sum() / expected / n_batches / (n_classes - 1))


def qualities(data: DataSpec, batch_size: int) -> list[dict[str, Any]]:
    """Pools of each size and of 256 MiB, which is what `auto` chooses; at last, with 0 blocks, a full shuffle."""
    rng = np.random.default_rng(0)
    sorted_labels = np.arange(data.n_rows) * N_CLASSES // data.n_rows
    labels = {"chi2_sorted": sorted_labels, "chi2_random": rng.permutation(sorted_labels)}
    block_rows = block_rows_of(data)
    n_epochs = -(-MIN_BATCHES * batch_size // data.n_rows)
    auto = max(1, min(data.n_rows, POOL_BYTES // data.row_bytes) // batch_size)
    results = []
    sizes = {max(1, round(n * block_rows[0] / batch_size)) for n in POOL_BLOCKS} | {auto}
    for pool_batches in (*sorted(sizes), 0):
        if pool_batches:
            shard = Shard(canonical_ranks=CANONICAL_RANKS)
            order = BlockSampler(block_rows, batch_size, shard=shard, pool_batches=pool_batches)
            epochs = [np.concatenate([plan.row_ids for plan in order.pools(epoch)]) for epoch in range(n_epochs)]
        else:
            epochs = [rng.permutation(data.n_rows) for _ in range(n_epochs)]
        measured = {
            name: fmean(chi2_per_df(of_rows[rows], batch_size, N_CLASSES) for rows in epochs)
            for name, of_rows in labels.items()
        }
        kind = "auto" if pool_batches == auto else "" if pool_batches else "all"
        pool = {"pool_batches": pool_batches, "pool_blocks": pool_batches * batch_size / int(block_rows[0])}
        results.append({"batch_size": batch_size, "kind": kind, **pool, **measured})
    return results


def begin_epoch(n_rows: int) -> dict[str, float]:
    """Seconds, and peak memory, until the rows of the first pool of an epoch on one of 1,024 ranks are known."""

    def begin() -> float:
        t0 = time.perf_counter()
        order = BlockSampler(block_rows, 64, shard=Shard(world_size=SCALE_RANKS), pool_batches=32)
        _ = next(order.pools(0)).row_ids
        return time.perf_counter() - t0

    block_rows = np.full(n_rows // 100, 100, np.int32)
    seconds = begin()
    tracemalloc.start()  # NumPy tells it what it allocates; it makes the code slower
    begin()
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return {"seconds": seconds, "bytes": peak_bytes + block_rows.nbytes}


def tables(results: dict[str, list[dict[str, Any]]], starts: list[dict[str, float]]) -> list[publish.Table]:
    """starts: results of `begin_epoch`"""
    rows = []
    chi2: dict[str, list[float]] = {"auto": [], "all": [], "": []}
    for name, of_data in results.items():
        for each in of_data:
            chi2[each["kind"]].append(each["chi2_random"])
            sizes = [f"{each[key]:.0f}" for key in ("batch_size", "pool_batches", "pool_blocks")]
            numbers = [f"{each[key]:.2f}" for key in ("chi2_sorted", "chi2_random")]
            rows.append([name, *sizes, each["kind"], *numbers])
    auto, full = (f"{min(chi2[kind]):.3f} to {max(chi2[kind]):.3f}" for kind in ("auto", "all"))
    start_s, start_mb = median(each["seconds"] for each in starts), median(each["bytes"] for each in starts) / 1e6
    begins = f"an epoch of 10^9 rows in 10^7 blocks begins on one of {SCALE_RANKS:,} ranks"
    targets = [
        ["chi2/df of a batch's labels, file in random order, pools by `auto`", auto, f"a full shuffle's: {full}"],
        [begins, f"{start_s:.1f} s, {start_mb:,.0f} MB", "< 2 s, < 300 MB"],
    ]
    columns = ["rows", "batch size", "batches in a pool", "blocks in a pool", "", "sorted file: chi2/df"]
    note = (
        f"All: a full shuffle. Blocks of 2 MiB, {CANONICAL_RANKS} canonical ranks. A file in random order gives "
        "batches like those of a full shuffle, whatever the size of the pools. In a file that is sorted by class, "
        "chi2/df is about 1 + batch size / blocks of a pool: their number counts, not their size."
    )
    quality = publish.Table("shuffle quality", [*columns, "random file: chi2/df"], rows, note)
    return [publish.Table("targets", publish.TARGET_COLUMNS, targets), quality]


def main() -> None:
    args = publish.parser(__doc__).parse_args()
    n_rows = 10**6 if args.quick else 10**9
    starts = take_turns("start of an epoch", {"begin": partial(begin_epoch, n_rows)}, args.rounds)["begin"]
    results = {}
    for data in QUICK if args.quick else SETS:
        results[data.name] = [each for batch_size in (256, 1024) for each in qualities(data, batch_size)]
    publish.write_result("order", tables(results, starts), {"qualities": results, "starts": starts}, args)


if __name__ == "__main__":
    main()
