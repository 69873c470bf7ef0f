import numpy as np
import pytest
import torch
from harness import ALONE
from torch.utils.data import Dataset

from fastgpu.dataset.source import DatasetSource
from fastgpu.process.config import Loader
from fastgpu.rows.contract import Source
from fastgpu.rows.order import BlockSampler
from fastgpu.run.not_finite import explain_not_finite
from fastgpu.storage.arrays import Arrays
from fastgpu.storage.subset import hold_out

N_ROWS = 96
BATCH_SIZE = 4
ROW = 50


class Numbers(Dataset):
    def __len__(self) -> int:
        return N_ROWS

    def __getitem__(self, row: int):
        return torch.tensor([1.0, torch.inf if row == ROW else row]), row


def make_source(kind: str) -> tuple[Source, int]:
    """Rows of which the row ROW is not finite, and its number in the source."""
    x = np.arange(2.0 * N_ROWS, dtype=np.float32).reshape(N_ROWS, 2)
    numbers = np.arange(N_ROWS)
    if kind == "dataset":
        return DatasetSource("x", Numbers(), {"x": "x", "number": "number"}, Loader(num_workers=0)), ROW
    x[ROW, 1] = np.nan
    source: Source = Arrays("x", {"number": numbers, "x": x}, block_rows=np.full(12, 8, np.int32))
    if kind == "finite":
        return Arrays("x", {"number": numbers}), ROW
    if kind == "part":
        source, _ = hold_out(source, 0.3)
        return source, source.row_ids.tolist().index(ROW)
    return source, ROW


@pytest.mark.parametrize("kind", ["arrays", "dataset", "part", "finite"])
def test_the_row_is_named_if_it_was_trained_on(kind):
    source, row = make_source(kind)
    order = BlockSampler(source.block_rows, BATCH_SIZE, pool_batches=3, seed=1)
    pool_rows = 3 * BATCH_SIZE
    pools = list(order.pools(2))
    (bad,) = [plan.number for plan in pools if row in order.row_ids(plan)]
    for first, last in ((0, len(pools)), (bad, bad), (0, bad), (bad + 1, len(pools)), (0, bad - 1)):
        consumed = range(first * pool_rows, min(last * pool_rows, order.total_size))
        text = explain_not_finite(source, order, 2, consumed, world=ALONE)
        if kind != "finite" and first <= bad <= max(first, last):  # the pool behind the part was in use
            assert text == (
                f"; x of {source.name} has NaN or infinity in 1 of {len(order.row_ids(pools[bad]))} rows around this "
                f"step, such as row {ROW}: leave such rows out, or replace the values"
            )
        else:
            assert not text
