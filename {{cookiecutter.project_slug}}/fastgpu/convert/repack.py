"""HDF5 files, and Datasets of the user's own, as a reader: their rows come by the feed that training has.

It reads HDF5 files in whole blocks, and Datasets in worker processes, since their code may be unsafe in threads.
"""

from collections.abc import Generator, Sequence
from contextlib import closing

import torch

from fastgpu.convert.reader import Columns, Reader
from fastgpu.convert.summary import fields_of, inspect
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.config import Loader
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.storage.store import expand, open_store


class FeedReader(Reader):
    """The rows of a source that can be trained on."""

    def __init__(self, rows: Dataset, name: str = ""):
        """name: for messages, if not that of `rows`."""
        self.name = name or rows.name
        self.attributes = rows.attributes
        self.fields = rows.fields
        self.block_rows = rows.block_rows
        labels = rows.column("labels")
        if labels is not None:
            self.labels = labels
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def batches(self, order: BlockSampler, broken: dict[int, str]) -> Generator[Columns]:
        """All rows of an order. Raises RankError if one cannot be read."""
        placement = Placement("disk", torch.device("cpu"), available_cpus())
        with closing(make_feed(self._rows, order, placement, Loader(prefetch_pools=1))) as feed:
            for pool in feed.pools(0):
                for rows in pool.rows.batches(order.batch_size):
                    yield rows.numpy()


def open_files(paths: Sequence[str], fields: dict[str, str]) -> FeedReader:
    """The rows of HDF5 files, whose checksums are verified if all fields have them.

    fields: {field: dataset}; empty for all datasets of the group. Raises UserError if the group has no rows.
    """
    file, group = expand("SOURCE", paths[0])[0]
    stored = inspect(f"{file}::{group}")
    groups = fields_of(stored)
    group = f"/{group.strip('/')}"
    if not fields and group not in groups:
        raise UserError(f"{paths[0]} has no rows in {group}, but {', '.join(sorted(groups)) or 'no numbers'}")
    fields = fields or groups[group]
    is_checked = all(each.has_digests for each in stored if group in (each.group, each.parent))
    return FeedReader(open_store("SOURCE", paths, fields, verify=is_checked))
