from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fastgpu.dataset.source import ItemDataset
from fastgpu.feed import Splits, describe, resolve_auto, tiers
from fastgpu.feed.sizes import choose_canonical_ranks
from fastgpu.feed.tiers import Memory, choose_tier
from fastgpu.process import machine
from fastgpu.process.config import Config, Data, Dist, LoaderConfig, Optim, RunConfig, Section
from fastgpu.process.launch import UserError
from fastgpu.process.machine import GIB
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.rows.rows import Field
from fastgpu.rows.selection import Groups, Mixture
from fastgpu.storage.arrays import ArrayDataset
from support.ranks import ALONE, CPU


class Shape(Dataset):
    """A source of which only the sizes are asked."""

    def __init__(self, n_rows: int, row_bytes: int = 1, n_blocks: int = 50, decoding: str = ""):
        self.name = "x.h5"
        self.fields = {"images": Field(np.dtype(np.uint8), (row_bytes,))}
        self.block_rows = np.diff(np.linspace(0, n_rows, n_blocks + 1).astype(np.int32)).astype(np.int32)
        self.decoding = decoding


@pytest.fixture(autouse=True)
def large_machine(monkeypatch) -> None:
    """32 CPUs, 64 GiB of free memory, and two GPUs with 10 GiB of free memory."""
    monkeypatch.setattr(machine, "available_cpus", lambda: 32)
    monkeypatch.setattr(tiers, "free_host_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * GIB, 80 * GIB))


def data(**values: Any) -> Data:
    return Data(train="a.h5", val="b.h5", fields={"images": "images"}, **values)


def choose(
    source: Dataset,
    world: World = ALONE,
    val_source: Dataset | None = None,
    *,
    sections: Mapping[str, Section] = MappingProxyType({}),
    **values: Any,
) -> Config:
    """values: of section `data`. sections: other ones."""
    config = Config(workload="images", data=data(**values), **sections)
    return resolve_auto(config, Splits(source, {"val": val_source or Shape(0)}), world)


@pytest.mark.parametrize(
    ("key", "chosen", "source", "n_ranks", "settings"),
    [
        # 256 MiB, all rows, one batch, or 8 million rows, which are planned quickly
        ("data.pool_batches", 7, Shape(50_000), 1, {"batch_size": 64, "pool_batches": 7}),
        ("data.pool_batches", 4, Shape(50_000, row_bytes=1 << 20), 1, {"batch_size": 64}),
        ("data.pool_batches", 22, Shape(1442, row_bytes=64), 1, {"batch_size": 64}),
        ("data.pool_batches", 1, Shape(50_000, row_bytes=1 << 20), 1, {"batch_size": 512}),
        ("data.pool_batches", 1024, Shape(10**9, row_bytes=20), 1, {"batch_size": 8192}),
        # the CPUs of a rank, and at most 8 unless they decode
        ("loader.num_readers", 8, Shape(1000), 1, {}),
        ("loader.num_readers", 4, Shape(1000), 8, {}),
        ("loader.num_readers", 1, Shape(1000), 64, {}),
        ("loader.num_readers", 3, Shape(1000), 8, {"sections": {"loader": LoaderConfig(num_readers=3)}}),
        ("loader.num_readers", 32, Shape(1000, decoding="decoded"), 1, {}),
    ],
)
def test_sizes_auto_becomes_a_number(key, chosen, source, n_ranks, settings):
    assert choose(source, World(0, n_ranks, n_ranks, CPU), **settings).flat()[key] == chosen


@pytest.mark.parametrize(
    ("n_ranks", "batch_size", "n_blocks", "chosen"),
    [(1, 64, 50, 8), (3, 48, 50, 24), (3, 51, 50, 3), (2, 64, 5, 2)],
)
def test_sizes_canonical_ranks_are_a_multiple_of_8_if_possible(n_ranks, batch_size, n_blocks, chosen):
    rows = Shape(1000, n_blocks=n_blocks)
    assert choose_canonical_ranks(data(batch_size=batch_size), rows, n_ranks) == chosen


@pytest.mark.parametrize(
    ("n_ranks", "saved", "settings", "chosen"),
    [
        (16, 64, {}, 64),
        (4, 64, {}, 64),
        (3, 64, {"batch_size": 192}, 24),
        (16, 8, {}, 16),
        (2, 64, {"batch_size": 48}, 8),
        (2, 64, {"canonical_ranks": 4}, 4),
    ],
)
def test_sizes_canonical_ranks_of_a_resumed_run_are_kept_if_possible(n_ranks, saved, settings, chosen):
    assert choose_canonical_ranks(data(**{"batch_size": 128} | settings), Shape(1000), n_ranks, saved) == chosen


def test_sizes_fewer_ranks_see_the_same_global_batches():
    rows, saved, seen = Shape(1000), None, []
    for n_ranks in (16, 8, 2):
        config = resolve_auto(
            Config(workload="images", data=data()), Splits(rows, {"val": rows}), World(0, n_ranks, 2, CPU), saved
        )
        saved = config.data.canonical_ranks
        shards = [Shard(rank, n_ranks, saved) for rank in range(n_ranks)]
        samplers = [BlockSampler(rows, 64 // n_ranks, shard, config.data.pool_batches) for shard in shards]
        seen.append(np.concatenate([np.reshape([*each], (-1, each.batch_size)) for each in samplers], axis=1))
    assert saved == 16
    np.testing.assert_array_equal(seen[0], seen[1])
    np.testing.assert_array_equal(seen[0], seen[2])


@pytest.mark.parametrize(
    ("tier", "need_gib", "chosen"),
    [("auto", 4, "device"), ("auto", 6, "host"), ("auto", 17, "disk"), ("disk", 1, "disk"), ("host", 17, "host")],
)
def test_sizes_tier_is_the_nearest_with_room(tier, need_gib, chosen):
    memory = Memory(need_gib * GIB, 10 * GIB, 32 * GIB)
    assert choose_tier(data(tier=tier), (Shape(9), Shape(9)), memory) == chosen


ACCUMULATION = {"optim": Optim(accumulation_steps=2)}


@pytest.mark.parametrize(
    ("options", "n_rows", "message"),
    [
        ({"batch_size": 66}, 1000, r"data.batch_size is 66; .* multiple of 8 \(4 ranks x optim.acc"),
        ({"batch_size": 64}, 63, "data.batch_size is 64; use at most 63, the rows of x.h5"),
        (
            {"canonical_ranks": 6},
            1000,
            r"data.canonical_ranks is 6; .* multiple of 4 \(ranks\) that divides 64 \(data.b",
        ),
        ({"canonical_ranks": 128}, 1000, r"data.canonical_ranks is 128; .*, or auto$"),
        ({"tier": "device"}, 11 * 1024, "data.tier is device, .* 10.0 GiB are free; use data.tier"),
        ({"tier": "host"}, 33 * 1024, "data.tier is host, .* 33.0 GiB .* 32.0 GiB are free"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(options, n_rows, message):
    world = World(0, 4, 2, torch.device("cuda", 0))
    with pytest.raises(UserError, match=message):
        choose(Shape(n_rows, row_bytes=1 << 20), world, sections=ACCUMULATION, **options)


@pytest.mark.parametrize(
    ("machines", "own", "sections", "message"),
    [
        ("1", "2", {}, r"data.batch_size is 63; it should be a multiple of 2 \(2 ranks x "),
        ("1:2", "1", {}, r"data.batch_size is 63; it should be a multiple of 2 \(2 ranks x "),
        ("1", "3", {"dist": Dist(strategy="dp")}, "dist.strategy is dp, which is for one process"),
        ("3", "3", {}, r"3 processes \(PET_NPROC_PER_NODE\) for 2 visible GPUs"),
        ("1", "gpu", {}, ""),
        ("", "", {}, ""),
    ],
)
def test_sizes_of_the_ranks_to_come_are_checked(monkeypatch, machines, own, sections, message):
    monkeypatch.setenv("PET_NNODES", machines)
    monkeypatch.setenv("PET_NPROC_PER_NODE", own)
    world = World(0, 1, 1, torch.device("cuda", 0))
    chosen = choose(Shape(1000), world, sections=sections, batch_size=63)  # a run that is no check is alone
    check = {"run": RunConfig(check=True), **sections}
    if message:
        with pytest.raises(UserError, match=message):
            choose(Shape(1000), world, sections=check, batch_size=63)
    else:
        assert choose(Shape(1000), world, sections=check, batch_size=63).data == chosen.data


def test_sizes_of_ragged_rows_are_not_for_dp():
    rows = Shape(1000)
    rows.fields = {"items": Field(np.dtype(np.int32), (), mean_values=1.0)}
    with pytest.raises(UserError, match="dist.strategy is dp, which is for one process and takes no ragged rows"):
        choose(rows, sections={"dist": Dist(strategy="dp")})


def test_sizes_of_a_check_count_the_memory_of_each_rank(monkeypatch):
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    rows = Shape(33 * 1024, row_bytes=1 << 20)
    assert choose(rows, tier="host").data.tier == "host"
    with pytest.raises(UserError, match="data.tier is host, .* 33.0 GiB a rank and 32.0 GiB are free"):
        choose(rows, tier="host", sections={"run": RunConfig(check=True)})


def test_sizes_all_together():
    world = World(1, 4, 2, torch.device("cuda", 0))
    source, val_source = Shape(2000, row_bytes=1 << 20), Shape(48, row_bytes=1 << 20)
    config = choose(source, world, val_source, sections=ACCUMULATION)
    assert (config.data.tier, config.data.pool_batches, config.loader.num_readers) == ("device", 4, 8)
    sampler = BlockSampler(source, 16, Shard(1, 4, 8), 4)
    assert describe(config, Splits(source, {"val": val_source}), sampler, world).splitlines()[1:] == [
        "memory: 2.0 GiB for all rows, kept on the device; free for each rank: 10.0 GiB on its device, 32.0 GiB in RAM",
        "batches: 64 rows over all ranks, 16 on each; 4 are shuffled together",
        "each epoch: 1,984 of 2,000 rows; the rest does not fill a batch",
    ]


def test_sizes_rows_of_an_epoch():
    plain, weighted = (ArrayDataset("x.h5", {"x": np.arange(n_rows)}) for n_rows in (1011, 10))
    groups = Groups(("a.h5", "b.h5"), (1, 3), np.repeat([0, 1], [8, 2]))
    weighted.selection = Mixture(groups, weighted.block_rows, 4, 0)
    config = Config(workload="images", data=data(tier="disk"))
    told = [
        describe(config, Splits(rows, {"val": rows}), BlockSampler(rows, 4), ALONE).splitlines()
        for rows in (plain, weighted)
    ]
    assert [lines[-1] for lines in told] == [
        "each epoch: 1,008 of 1,011 rows; the rest does not fill a batch",
        "each epoch: 2 rows of a.h5 (0.25 passes), 6 rows of b.h5 (3 passes)",
    ]


def test_sizes_of_a_dataset_with_workers():
    source = ItemDataset("mine", TensorDataset(torch.zeros(400)), {"images": "images"})
    chosen = choose(source, sections={"loader": LoaderConfig(num_workers=2)})
    assert (chosen.data.tier, chosen.loader.num_workers, chosen.loader.num_readers) == ("disk", 2, "auto")


def test_sizes_of_too_many_values_need_the_disk_tier(monkeypatch):
    source = Shape(2000)
    source.fields = {"items": Field(np.dtype(np.int32), (), mean_values=3)}
    source.stored_lengths = {"items": np.full(2000, 3, np.int32)}
    for max_values, tier in ((6000, "device"), (5999, "disk")):
        monkeypatch.setattr(tiers, "MAX_VALUES", max_values)
        assert choose(source).data.tier == tier
    with pytest.raises(UserError, match="data.tier is host, but x.h5 has more than 5,999 values of items; use data.ti"):
        choose(source, tier="host")
