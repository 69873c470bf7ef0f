"""Files with and without groups of rows, and the ranks that share them, for properties that hold for all of them."""

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.selection import Groups, Mixture


class Case(NamedTuple):
    """A file and the ranks that share it."""

    block_rows: np.ndarray
    groups: Groups | None
    world_size: int
    canonical_per_rank: int
    share: int
    """Rows that a global batch takes from each canonical rank."""
    pool_batches: int

    @property
    def n_rows(self) -> int:
        return int(self.block_rows.sum())

    def samplers(self, world_size: int | None = None, seed: int | None = 0, **options) -> list[BlockSampler]:
        """A sampler for each rank."""
        world_size = world_size or self.world_size
        canonical_ranks = self.world_size * self.canonical_per_rank
        batch_size = self.share * canonical_ranks // world_size
        rows = self.block_rows
        if self.groups:
            rows = Mixture(self.groups, rows, batch_size * world_size, seed or 0)
        options |= {"pool_batches": self.pool_batches, "seed": seed}
        shards = [Shard(rank, world_size, canonical_ranks) for rank in range(world_size)]
        return [BlockSampler(rows, batch_size, shard=shard, **options) for shard in shards]


small = st.integers(1, 4)
plain = st.builds(
    Case, st.lists(st.integers(1, 9), min_size=1, max_size=20).map(np.array), st.none(), small, small, small, small
)


@st.composite
def mixed(draw) -> Case:
    """Cases with groups and at least one batch."""
    sizes = [draw(st.integers(1, 3)) for _ in range(3)]
    block_rows = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    block_rows = np.array([*block_rows, sizes[0] * sizes[1] * sizes[2]], np.int32)
    by_block = draw(st.booleans())
    units = len(block_rows) if by_block else int(block_rows.sum())
    groups = np.array(draw(st.lists(st.integers(0, 3), min_size=units, max_size=units)))
    _, groups = np.unique(groups, return_inverse=True)
    n_groups = int(groups.max()) + 1
    weights = draw(st.lists(st.sampled_from([1, 2, 0.3, 20]), min_size=n_groups, max_size=n_groups))
    if by_block:
        groups = np.repeat(groups, block_rows)
    names = tuple(f"group {number}" for number in range(n_groups))
    return Case(block_rows, Groups(names, tuple(weights), groups, by_block), *sizes, draw(st.integers(1, 3)))
