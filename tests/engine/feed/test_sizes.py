import re
from typing import Any

import numpy as np
import pytest
import torch
from harness import ALONE, numbered
from torch.utils.data import Dataset as TorchDataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import sizes
from fastgpu.feed.sizes import (
    Sizes,
    choose_canonical_ranks,
    choose_pool_batches,
    choose_rank_batch,
    choose_readers,
    choose_sizes,
    choose_tier,
    class_order_warning,
)
from fastgpu.process.config import Config, Data, Loader, Optim
from fastgpu.process.launch import UserError
from fastgpu.process.machine import GIB
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field


class Shape(Dataset):
    """A source of which only the sizes are asked."""

    def __init__(self, n_rows: int, row_bytes: int = 1, n_blocks: int = 50):
        self.name = "x.h5"
        self.fields = {"images": Field(np.dtype(np.uint8), (row_bytes,))}
        self.attributes: dict[str, Any] = {}
        self.block_rows = np.diff(np.linspace(0, n_rows, n_blocks + 1).astype(np.int32)).astype(np.int32)

    def __len__(self) -> int:
        return int(self.block_rows.sum())


def with_labels(labels: np.ndarray) -> Shape:
    """A source with labels that are in memory."""
    source = Shape(len(labels))
    source.fields["labels"] = Field(np.dtype(np.int64), ())
    source.column = lambda name: labels
    return source


class Images(TorchDataset):
    def __len__(self) -> int:
        return 400

    def __getitem__(self, row: int):
        return numbered(1, start=row)[0], row % 4


@pytest.fixture
def memory(monkeypatch) -> dict[str, int]:
    """Free memory of the machine; the GPU has 10 GiB."""
    free = {"host": 64 * GIB}
    monkeypatch.setattr(sizes, "free_host_bytes", lambda: free["host"])
    monkeypatch.setattr(sizes, "available_cpus", lambda: 32)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))
    return free


def data(**values: Any) -> Data:
    return Data(train="a.h5", val="b.h5", fields={"images": "images"}, **values)


def sizes_of(
    data: Data, loader: Loader, sources: tuple[Dataset, Dataset], world: World, *, accumulation: int = 1
) -> Sizes:
    config = Config(workload="images", data=data, loader=loader, optim=Optim(accumulation_steps=accumulation))
    return choose_sizes(config, *sources, world)


# ---------------------------------------------------------------------------------------------- one number each


@pytest.mark.parametrize(
    ("batch_size", "world_size", "n_blocks", "canonical_ranks"),
    [(64, 1, 50, 8), (64, 8, 50, 8), (48, 3, 50, 24), (51, 3, 50, 3), (64, 2, 5, 2), (64, 16, 50, 16)],
)
def test_canonical_ranks_are_a_multiple_of_8_where_that_is_possible(batch_size, world_size, n_blocks, canonical_ranks):
    source = Shape(1000, n_blocks=n_blocks)
    assert choose_canonical_ranks(batch_size, world_size, source) == canonical_ranks


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
    assert choose_pool_batches(pool_batches, batch_size, source) == chosen


@pytest.mark.parametrize(
    ("asked", "local_world_size", "max_readers", "chosen"),
    [("auto", 1, 8, 8), ("auto", 8, 8, 4), ("auto", 64, 8, 1), (3, 8, 8, 3), ("auto", 1, 32, 32), (0, 1, 32, 0)],
)
def test_readers_are_the_cpus_of_a_rank_and_at_most_8_and_workers_are_all_of_them(
    memory, asked, local_world_size, max_readers, chosen
):
    assert choose_readers(asked, local_world_size, max_readers) == chosen


FREE = {"device": 10 * GIB, "host": 32 * GIB}


@pytest.mark.parametrize(
    ("tier", "need_gib", "can_stay", "chosen"),
    [
        ("auto", 4, True, "device"),
        ("auto", 6, True, "host"),
        ("auto", 17, True, "disk"),
        ("disk", 1, True, "disk"),
        ("host", 17, True, "host"),
        ("auto", 1, False, "disk"),  # rows that may change stay on the disk tier ...
        ("host", 1, False, "host"),  # ... unless another one is chosen
    ],
)
def test_the_tier_is_the_nearest_of_which_the_rows_fill_half(tier, need_gib, can_stay, chosen):
    assert choose_tier(tier, need_gib * GIB, FREE, "x.h5", can_stay=can_stay) == chosen


@pytest.mark.parametrize(
    ("choose", "arguments", "message"),
    [
        (choose_rank_batch, (66, 4, 2, Shape(1000)), r"data.batch_size is 66; .* multiple of 8 \(4 ranks x optim.acc"),
        (choose_rank_batch, (64, 1, 1, Shape(63)), "data.batch_size is 64, .* use at most 63"),
        (choose_canonical_ranks, (64, 8, Shape(1000, n_blocks=5)), r"the 5 blocks \(chunks\) .*; use at most 5 ranks"),
        (
            choose_tier,
            ("device", 11 * GIB, FREE, "x.h5"),
            "data.tier is device, .* 10.0 GiB are free; use data.tier",
        ),
        (choose_tier, ("host", 33 * GIB, FREE, "x.h5"), "data.tier is host, .* 33.0 GiB .* 32.0 GiB are free"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(choose, arguments, message):
    with pytest.raises(UserError, match=message):
        choose(*arguments)


# ---------------------------------------------------------------------------------------------- all of them


def test_all_sizes_together(memory):
    world = World(1, 4, 2, torch.device("cuda", 0))
    source = Shape(2000, row_bytes=1 << 20)
    chosen = sizes_of(data(), Loader(), (source, Shape(48, row_bytes=1 << 20)), world, accumulation=2)
    assert chosen == Sizes(
        batch_size=16,
        canonical_ranks=8,
        pool_batches=4,
        tier="device",
        n_readers=8,
        uses_workers=False,
        need=2 * GIB,
        free={"device": 10 * GIB, "host": 32 * GIB},
    )


def test_the_keys_are_named_that_were_chosen_or_given(memory):
    sources = (Shape(2000), Shape(10))
    chosen = sizes_of(data(), Loader(), sources, ALONE)
    assert chosen.chosen == {"data": {"tier": "device", "pool_batches": 31}, "loader": {"num_readers": 8}}
    given = data(tier="disk", pool_batches=3, batch_size=32)
    kept = sizes_of(given, Loader(num_readers=5), sources, ALONE)
    assert kept.chosen == {"data": {"tier": "disk", "pool_batches": 3}, "loader": {"num_readers": 5}}
    assert kept.batch_size == 32


def test_a_dataset_is_read_by_worker_processes_and_stays_on_the_disk_tier(memory):
    fields = {"images": "images", "labels": "labels"}
    source = ItemDataset("Images", Images(), fields)
    chosen = sizes_of(data(), Loader(num_workers=2), (source, source), ALONE)
    assert (chosen.tier, chosen.uses_workers, chosen.n_readers) == ("disk", True, 2)
    assert chosen.chosen["loader"] == {"num_workers": 2}


def test_ragged_rows_with_more_values_than_offsets_can_count_stay_on_the_disk_tier(memory, monkeypatch):
    source = Shape(2000)
    source.lengths = {"images": np.full(2000, 3, np.int32)}
    monkeypatch.setattr(sizes, "MAX_VALUES", 6000)
    assert sizes_of(data(), Loader(), (source, Shape(9)), ALONE).tier == "device"
    monkeypatch.setattr(sizes, "MAX_VALUES", 5999)
    assert sizes_of(data(), Loader(), (source, Shape(9)), ALONE).tier == "disk"


def test_a_setting_without_effect_and_a_file_in_class_order_are_told(memory, capsys):
    source = with_labels(np.arange(2000) // 200)
    sizes_of(data(pool_batches=2), Loader(prefetch_pools=5), (source, Shape(10)), ALONE)
    printed = capsys.readouterr().out
    assert "warning: loader.prefetch_pools has no effect on the device tier" in printed
    assert "warning: x.h5 is sorted by class" in printed
    sizes_of(data(tier="disk"), Loader(prefetch_pools=5), (Shape(2000), Shape(10)), ALONE)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("labels", "pool_rows", "is_told"),
    [
        (np.arange(1000) // 100, 200, True),
        (np.arange(1000) // 100, 1000, False),  # one pool mixes all rows
        (np.random.default_rng(0).permutation(1000) // 100, 200, False),
        (np.zeros(1000, int), 200, False),  # there is only one class
    ],
    ids=["sorted", "one pool", "mixed", "one class"],
)
def test_a_file_sorted_by_class_is_told_if_pools_cannot_mix_it(labels, pool_rows, is_told):
    warning = class_order_warning(with_labels(labels), pool_rows)
    expected = "x.h5 is sorted by class: 99 % of .* share a label, by chance it would be 10 %"
    assert bool(re.search(expected, warning or "")) == bool(warning) == is_told
