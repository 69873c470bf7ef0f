"""How fast a torch Dataset of tiny items is read, beside a bare DataLoader. They take turns.

python bench/items.py [--rounds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import count

import project  # noqa: F401  (puts the project on sys.path)
import torch
from torch.utils.data import DataLoader, Dataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.rows.order import BlockSampler

N_ROWS = 50_000
BATCH_SIZE = 256
CPU = torch.device("cpu")


class Tiny(Dataset):
    """Items in memory, as small as they come: the worst case for the way from a worker."""

    def __init__(self) -> None:
        self.images = torch.randint(0, 255, (N_ROWS, 3, 32, 32), dtype=torch.uint8)

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int) -> tuple[torch.Tensor, int]:
        return self.images[row], row % 10


def bare(items: Tiny, n_workers: int) -> Callable[[], None]:
    """An epoch of a DataLoader."""
    loader = DataLoader(items, BATCH_SIZE, shuffle=True, num_workers=n_workers, persistent_workers=n_workers > 0)

    def epoch() -> None:
        for _ in loader:
            pass

    return epoch


def feed(items: Tiny, n_workers: int) -> Callable[[], None]:
    """An epoch of the feed."""
    source = ItemDataset("tiny", items, {"images": "images", "labels": "labels"})
    order = BlockSampler(source.block_rows, BATCH_SIZE, pool_batches=64, seed=0)
    pools = make_feed(source, order, Placement("disk", CPU, n_workers))
    epochs = count()

    def epoch() -> None:
        for _ in pools.pools(next(epochs)):
            pass

    return epoch


def rate(epoch: Callable[[], None]) -> float:
    """Rows/s of an epoch."""
    t0 = time.perf_counter()
    epoch()
    return N_ROWS / (time.perf_counter() - t0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    items = Tiny()
    for n_workers in (0, 2):
        ours, theirs = feed(items, n_workers), bare(items, n_workers)
        rate(ours), rate(theirs)
        pairs = [(rate(ours), rate(theirs)) for _ in range(args.rounds)]
        ratios = [our_rate / their_rate for our_rate, their_rate in pairs]
        print(
            f"{n_workers} workers: {statistics.median(pair[0] for pair in pairs):,.0f} rows/s, a bare DataLoader "
            f"{statistics.median(pair[1] for pair in pairs):,.0f}: {statistics.median(ratios):.2f} x "
            f"[{min(ratios):.2f}-{max(ratios):.2f}]"
        )


if __name__ == "__main__":
    main()
