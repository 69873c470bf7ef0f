"""The words that all rooms share: rows of a fixed or any length, blocks, pools, and the order in which rows come.

contract.py   Dataset, PoolPlan, Reads: what the rooms hand to each other
order.py      BlockSampler: which row is trained on when
selection.py  a share of the rows, sources at weights, equal classes: as extents of the order
rows.py       the type of a field, and columns of equal length that are moved, sliced and gathered together
"""

from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Rows

__all__ = ["BlockSampler", "Dataset", "Rows", "Shard"]
