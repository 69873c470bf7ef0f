"""The types that all packages of the engine share: rows, their datasets, and their order in training.

contract.py   Dataset, PoolPlan, Reads, Pool: the interfaces between the data modules
order.py      BlockSampler: the order in which rows are trained on
selection.py  the rows of an epoch: a share of the rows, files at weights, equal classes
rows.py       Rows: a batch or a pool in memory; Field: the type of one of its columns
classes.py    the names and the number of classes, in any form that a dataset has them
"""

from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Ragged, Rows

__all__ = ["BlockSampler", "Dataset", "Ragged", "Rows", "Shard"]
