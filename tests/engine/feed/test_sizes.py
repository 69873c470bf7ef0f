from typing import Any

import numpy as np
import pytest
import torch
from harness import ALONE, CPU, numbered
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
    choose_workers,
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

    def column(self, name: str) -> np.ndarray:
        raise KeyError(name)


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


def test_the_batch_of_a_rank_is_its_part_of_the_global_batch():
    assert choose_rank_batch(64, 4, 2, Shape(1000)) == 16
    with pytest.raises(UserError, match=r"data.batch_size is 66; it should be a multiple of 8 \(4 ranks x optim.acc"):
        choose_rank_batch(66, 4, 2, Shape(1000))
    with pytest.raises(UserError, match=r"data.batch_size is 64, but x.h5 has 63 rows; use at most 63"):
        choose_rank_batch(64, 1, 1, Shape(63))


@pytest.mark.parametrize(
    ("batch_size", "world_size", "n_blocks", "canonical_ranks"),
    [(64, 1, 50, 8), (64, 8, 50, 8), (48, 3, 50, 24), (51, 3, 50, 3), (64, 2, 5, 2), (64, 16, 50, 16)],
)
def test_canonical_ranks_are_a_multiple_of_8_where_that_is_possible(batch_size, world_size, n_blocks, canonical_ranks):
    source = Shape(1000, n_blocks=n_blocks)
    assert choose_canonical_ranks(batch_size, world_size, source) == canonical_ranks


def test_more_ranks_than_blocks_are_refused():
    message = r"8 ranks are more than the 5 blocks \(chunks\) of x.h5; use at most 5 ranks"
    with pytest.raises(UserError, match=message):
        choose_canonical_ranks(64, 8, Shape(1000, n_blocks=5))


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
    ("num_readers", "local_world_size", "chosen"), [("auto", 1, 8), ("auto", 8, 4), ("auto", 64, 1), (3, 8, 3)]
)
def test_readers_are_the_cpus_of_a_rank_and_at_most_8(memory, num_readers, local_world_size, chosen):
    assert choose_readers(num_readers, local_world_size) == chosen


def test_workers_are_the_cpus_of_a_rank(memory):
    assert choose_workers("auto", 4) == 8
    assert choose_workers("auto", 64) == 1
    assert choose_workers(3, 4) == 3
    assert choose_workers(0, 1) == 0


@pytest.mark.parametrize(
    ("tier", "need_gib", "tier_chosen"),
    [("auto", 4, "device"), ("auto", 6, "host"), ("auto", 17, "disk"), ("disk", 1, "disk"), ("host", 17, "host")],
)
def test_the_tier_is_the_nearest_of_which_the_rows_fill_half(tier, need_gib, tier_chosen):
    free = {"device": 10 * GIB, "host": 32 * GIB}
    assert choose_tier(tier, need_gib * GIB, free, "x.h5") == tier_chosen


def test_rows_that_may_change_stay_on_the_disk_tier_unless_it_is_chosen():
    free = {"device": 10 * GIB, "host": 32 * GIB}
    assert choose_tier("auto", GIB, free, "x.h5", can_stay=False) == "disk"
    assert choose_tier("host", GIB, free, "x.h5", can_stay=False) == "host"


def test_a_tier_without_room_is_refused():
    free = {"device": 10 * GIB, "host": 9 * GIB}
    message = "data.tier is device, but x.h5 needs 11.0 GiB a rank and 10.0 GiB are free; use data.tier=disk"
    with pytest.raises(UserError, match=message):
        choose_tier("device", 11 * GIB, free, "x.h5")
    with pytest.raises(UserError, match="data.tier is host, but .* 9.0 GiB are free"):
        choose_tier("host", 11 * GIB, free, "x.h5")


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


def test_values_name_the_keys_that_were_chosen(memory):
    chosen = sizes_of(data(), Loader(), (Shape(2000), Shape(10)), ALONE)
    assert chosen.chosen == {"data": {"tier": "device", "pool_batches": 31}, "loader": {"num_readers": 8}}
    assert set(chosen.chosen["data"]) <= set(Data.model_fields)
    assert set(chosen.chosen["loader"]) <= set(Loader.model_fields)


def test_numbers_that_a_person_chose_are_kept(memory):
    chosen = sizes_of(
        data(tier="disk", pool_batches=3, batch_size=32), Loader(num_readers=5), (Shape(2000), Shape(10)), ALONE
    )
    assert chosen.chosen["data"] == {"tier": "disk", "pool_batches": 3}
    assert chosen.chosen["loader"] == {"num_readers": 5}
    assert chosen.batch_size == 32


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
    source = Shape(2000)
    source.fields["labels"] = Field(np.dtype(np.int64), ())
    source.column = lambda name: np.arange(2000) // 200
    sizes_of(data(pool_batches=2), Loader(prefetch_pools=5), (source, Shape(10)), ALONE)
    printed = capsys.readouterr().out
    assert "warning: loader.prefetch_pools has no effect on the device tier" in printed
    assert "warning: x.h5 is sorted by class" in printed
    sizes_of(data(tier="disk"), Loader(prefetch_pools=5), (Shape(2000), Shape(10)), ALONE)
    assert capsys.readouterr().out == ""


def test_nothing_is_read_to_choose_the_sizes(memory):
    source = Shape(2000)
    source.read = lambda *_: pytest.fail("read")
    sizes_of(data(tier="disk"), Loader(), (source, source), World(0, 2, 2, CPU))


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
    source = Shape(1000)
    source.fields["labels"] = Field(np.dtype(np.int64), ())
    source.column = lambda name: labels
    warning = class_order_warning(source, pool_rows)
    if is_told:
        assert "x.h5 is sorted by class: 99 % of" in warning
        assert "share a label, by chance it would be 10 %" in warning
    else:
        assert not warning
