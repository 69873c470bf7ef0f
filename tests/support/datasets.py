"""Torch Datasets that carry row numbers, or that fail in a chosen way, and feeds of them."""

import os
import random
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import torch
from torch.utils.data import Dataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import PoolLoader
from fastgpu.rows.order import BlockSampler
from support.rows import DENSE_FIELDS, numbered, open_feed

N_ROWS = 150


class Numbered(Dataset):
    """Rows that carry their numbers. `kind` says what the items are, or how reading row 70 fails."""

    class_names = ("a", "b", "c", "d")

    def __init__(self, kind: str = ""):
        self.kind = kind
        self.images = numbered(N_ROWS, (1, 8, 8))

    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int):
        match self.kind, row:
            case "raise", 70:
                raise OSError("row 70 cannot be opened")
            case "die", 70:
                os.kill(os.getpid(), signal.SIGKILL)
            case "hang", 70:
                threading.Event().wait()
            case "stop", 70:
                os.kill(os.getpid(), signal.SIGSTOP)
            case "random", _:
                return random.random(), np.random.rand(), torch.rand(())
            case "draws once", _:
                return 0.0, np.random.rand() if row == 70 else 0.0, 0.0
            case "slow", _:  # items take a time of their own each, so that workers overtake each other
                time.sleep(row * 7919 % 11 / 5000)
        return self.images[row], row % 4


class Made(Dataset):
    """Items that a function makes of their numbers."""

    def __init__(self, item: Callable[[int], object], n_rows: int = N_ROWS, **attributes: object):
        self.item = item
        self.n_rows = n_rows
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.n_rows

    def __getitem__(self, row: int) -> object:
        return self.item(row)


def numbered_source(kind: str = "", fields: dict[str, str] = DENSE_FIELDS) -> ItemDataset:
    """The rows of `Numbered`, as the feed reads them."""
    return ItemDataset("Numbered", Numbered(kind), fields)


def item_feed(source: ItemDataset, n_workers: int, tier: str = "disk", *, seed: int = 1, **loader: int) -> PoolLoader:
    """The feed of a Dataset, in batches of eight rows. loader: settings of `Loader`."""
    sampler = BlockSampler(source.block_rows, 8, pool_batches=3, seed=seed)
    return open_feed(source, sampler, tier, n_workers, **loader)
