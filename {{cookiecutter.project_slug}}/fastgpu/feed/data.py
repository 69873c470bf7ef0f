"""The data of a training: its rows, and the numbers that say how they move."""

from typing import NamedTuple

from fastgpu.feed.sizes import Sizes
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Mixture


class Data(NamedTuple):
    """The rows to train and to validate on. The loop needs only their batches; model.json and diagnose.py need more."""

    train: Dataset
    val: Dataset
    sizes: Sizes
    """With a number for each `auto` of the config."""

    def describe(self, sampler: BlockSampler) -> str:
        """Where the rows are kept, how many move at a time, and how many an epoch has. sampler: of the training."""
        train, sizes = self.train, self.sizes
        kind = "worker processes" if sizes.readers_key == "num_workers" else "reader threads"
        readers = "" if sizes.tier == "device" else f"; {kind} on each rank: {sizes.n_readers}"
        fields = ", ".join(f"{name}: {field}" for name, field in train.fields.items())
        lines = [
            f"rows: {train.name} ({fields}) {train.decoding}".rstrip(),
            f"memory: {sizes.memory}",
            f"batches: {sampler.global_batch_size} rows over all ranks, {sizes.batch_size} on each; shuffled "
            f"{sizes.pool_batches} at a time{readers}",
        ]
        if isinstance(train.selection, Mixture):
            lines.append(f"each epoch: {train.selection.describe()}")
        elif sampler.total_size < len(train):
            n_rows = f"{sampler.total_size:,} of {len(train):,} rows"
            lines.append(f"each epoch: {n_rows}; the rest does not fill a batch")
        return "\n".join(lines)
