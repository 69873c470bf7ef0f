"""The types that all rooms share: rows, where they come from, and their order in training.

contract.py   Dataset, PoolPlan, Reads, Pool: the interfaces between the data modules
order.py      BlockSampler: which row is trained on when
selection.py  which rows an epoch has: a share of them, sources at weights, equal classes
rows.py       Rows: a batch or a pool in memory, and Field, the type of one of its columns
classes.py    the names and the number of classes, in whatever form a source has them
"""

from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Ragged, Rows

__all__ = ["BlockSampler", "Dataset", "Ragged", "Rows", "Shard"]
