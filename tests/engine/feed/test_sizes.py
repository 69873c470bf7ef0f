from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from harness import ALONE, CPU
from torch.utils.data import TensorDataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import sizes
from fastgpu.feed.sizes import Sizes, choose_sizes, choose_tier
from fastgpu.process.config import Config, Data, Loader, Optim, Section
from fastgpu.process.launch import UserError
from fastgpu.process.machine import GIB
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field


class Shape(Dataset):
    """A source of which only the sizes are asked."""

    def __init__(self, n_rows: int, row_bytes: int = 1, n_blocks: int = 50, decoding: str = ""):
        self.name = "x.h5"
        self.fields = {"images": Field(np.dtype(np.uint8), (row_bytes,))}
        self.block_rows = np.diff(np.linspace(0, n_rows, n_blocks + 1).astype(np.int32)).astype(np.int32)
        self.decoding = decoding


@pytest.fixture(autouse=True)
def machine(monkeypatch) -> None:
    """32 CPUs, 64 GiB of free memory, and GPUs with 10 GiB of free memory."""
    monkeypatch.setattr(sizes, "available_cpus", lambda: 32)
    monkeypatch.setattr(sizes, "free_host_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))


def data(**values: Any) -> Data:
    return Data(train="a.h5", val="b.h5", fields={"images": "images"}, **values)


def sizes_of(
    source: Dataset,
    world: World = ALONE,
    val_source: Dataset | None = None,
    *,
    sections: Mapping[str, Section] = MappingProxyType({}),
    **values: Any,
) -> Sizes:
    """values: of section `data`. sections: other ones."""
    config = Config(workload="images", data=data(**values), **sections)
    return choose_sizes(config, source, val_source or Shape(0), world)


# ---------------------------------------------------------------------------------------------- one number each


@pytest.mark.parametrize(
    ("batch_size", "world_size", "n_blocks", "canonical_ranks"),
    [(64, 1, 50, 8), (64, 8, 50, 8), (48, 3, 50, 24), (51, 3, 50, 3), (64, 2, 5, 2), (64, 16, 50, 16), (64, 8, 5, 8)],
)
def test_canonical_ranks_are_a_multiple_of_8_where_that_is_possible(batch_size, world_size, n_blocks, canonical_ranks):
    source = Shape(1000, n_blocks=n_blocks)
    world = World(0, world_size, 1, CPU)
    assert sizes_of(source, world, batch_size=batch_size).canonical_ranks == canonical_ranks


@pytest.mark.parametrize(
    ("pool_batches", "batch_size", "source", "chosen"),
    [
        (7, 64, Shape(50_000, row_bytes=3072), 7),
        ("auto", 64, Shape(50_000, row_bytes=1 << 20), 4),  # 256 MiB
        ("auto", 64, Shape(1442, row_bytes=64), 22),  # all rows
        ("auto", 512, Shape(50_000, row_bytes=1 << 20), 1),  # a batch at least
        ("auto", 8192, Shape(10**9, row_bytes=20), 1024),  # 8 million rows, which are planned quickly
    ],
)
def test_a_pool_has_256_mib_8_million_rows_all_rows_or_one_batch(pool_batches, batch_size, source, chosen):
    assert sizes_of(source, pool_batches=pool_batches, batch_size=batch_size).pool_batches == chosen


@pytest.mark.parametrize(
    ("asked", "local_world_size", "decoding", "chosen"),
    [("auto", 1, "", 8), ("auto", 8, "", 4), ("auto", 64, "", 1), (3, 8, "", 3), ("auto", 1, "decoded", 32)],
)
def test_readers_are_the_cpus_of_a_rank_and_at_most_8_unless_they_decode(asked, local_world_size, decoding, chosen):
    world = World(0, 1, local_world_size, CPU)
    found = sizes_of(Shape(1000, decoding=decoding), world, sections={"loader": Loader(num_readers=asked)})
    assert found.n_readers == chosen


FREE = {"device": 10 * GIB, "host": 32 * GIB}


@pytest.mark.parametrize(
    ("tier", "need_gib", "chosen"),
    [("auto", 4, "device"), ("auto", 6, "host"), ("auto", 17, "disk"), ("disk", 1, "disk"), ("host", 17, "host")],
)
def test_the_tier_is_the_nearest_of_which_the_rows_fill_half(tier, need_gib, chosen):
    assert choose_tier(data(tier=tier), (Shape(9), Shape(9)), need_gib * GIB, FREE) == chosen


ACCUMULATION = {"optim": Optim(accumulation_steps=2)}


@pytest.mark.parametrize(
    ("options", "n_rows", "message"),
    [
        ({"batch_size": 66}, 1000, r"data.batch_size is 66; .* multiple of 8 \(4 ranks x optim.acc"),
        ({"batch_size": 64}, 63, "data.batch_size is 64; use at most 63, the rows of x.h5"),
        ({"tier": "device"}, 11 * 1024, "data.tier is device, .* 10.0 GiB are free; use data.tier"),
        ({"tier": "host"}, 33 * 1024, "data.tier is host, .* 33.0 GiB .* 32.0 GiB are free"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(options, n_rows, message):
    world = World(0, 4, 2, torch.device("cuda", 0))
    with pytest.raises(UserError, match=message):
        sizes_of(Shape(n_rows, row_bytes=1 << 20), world, sections=ACCUMULATION, **options)


# ---------------------------------------------------------------------------------------------- all of them


def test_all_sizes_together():
    world = World(1, 4, 2, torch.device("cuda", 0))
    source, val_source = Shape(2000, row_bytes=1 << 20), Shape(48, row_bytes=1 << 20)
    free = {"device": 10 * GIB, "host": 32 * GIB}
    chosen = Sizes(16, 8, 4, "device", 8, uses_workers=False, need=2 * GIB, free=free)
    assert sizes_of(source, world, val_source, sections=ACCUMULATION) == chosen


def test_a_dataset_is_read_by_worker_processes_and_stays_on_the_disk_tier():
    source = ItemDataset("mine", TensorDataset(torch.zeros(400)), {"images": "images"})
    chosen = sizes_of(source, sections={"loader": Loader(num_workers=2)})
    assert (chosen.tier, chosen.uses_workers, chosen.n_readers) == ("disk", True, 2)
    assert chosen.chosen["loader"] == {"num_workers": 2}


def test_ragged_rows_with_more_values_than_offsets_can_count_stay_on_the_disk_tier(monkeypatch):
    source = Shape(2000)
    source.fields = {"items": Field(np.dtype(np.int32), (), mean_values=3)}
    source.lengths = {"items": np.full(2000, 3, np.int32)}
    for max_values, tier in ((6000, "device"), (5999, "disk")):
        monkeypatch.setattr(sizes, "MAX_VALUES", max_values)
        assert sizes_of(source).tier == tier
    with pytest.raises(UserError, match="data.tier is host, but x.h5 has more than 5,999 values of items; use data.ti"):
        sizes_of(source, tier="host")


@pytest.mark.parametrize(
    ("labels", "pool_batches", "is_told"),
    [
        (np.arange(1000) // 100, 2, True),
        (np.arange(1000) // 100, "auto", False),  # one pool mixes all rows
        (np.random.default_rng(0).permutation(1000) // 100, 2, False),
        (np.zeros(1000, int), 2, False),  # there is only one class
    ],
    ids=["sorted", "one pool", "mixed", "one class"],
)
def test_a_file_in_class_order_is_told(capsys, labels, pool_batches, is_told):
    source = Shape(1000)
    source.column = lambda name: labels
    sizes_of(source, pool_batches=pool_batches)
    told = "warning: x.h5 is sorted by class: 99% of neighbouring rows share a label"
    assert (told in capsys.readouterr().out) == is_told
