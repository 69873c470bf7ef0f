import itertools
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import yaml
from harness import in_world

from fastgpu.diagnose import tune
from fastgpu.diagnose.verdict import Timing
from fastgpu.feed import sizes as auto
from fastgpu.process.config_loader import load_config
from fastgpu.process.world import World
from fastgpu.storage.store import open_store

LADDERS: list[tune.Ladder] = [
    ("loader.num_readers", [1, 2, 4, 8, 16]),
    ("loader.prefetch_pools", [1, 2, 4]),
    ("data.pool_batches", [8, 16, 32]),
    ("hdf5.rdcc_nbytes", [8 << 20, 64 << 20]),
]
DEFAULTS = {"loader.num_readers": 1, "loader.prefetch_pools": 1, "data.pool_batches": 8, "hdf5.rdcc_nbytes": 8 << 20}


def machine(
    available_cpus: int, disk: float, per_reader: float, ahead: float = 1.0, cache: float = 1.0
) -> Callable[..., float]:
    """A law of how fast rows come: readers scale up to the CPUs, then cost; a disk ends it; the rest are factors."""

    def rows_per_s(lines: Mapping[str, Any]) -> float:
        all_of = DEFAULTS | dict(lines)
        readers = all_of["loader.num_readers"]
        rate = per_reader * min(readers, available_cpus) * (1 - 0.02 * max(0, readers - available_cpus))
        rate *= ahead if all_of["loader.prefetch_pools"] == 1 else 1.0
        rate *= 1 + 0.02 * (all_of["data.pool_batches"] == 32)
        rate *= cache if all_of["hdf5.rdcc_nbytes"] == 8 << 20 else 1.0
        return min(disk, rate)

    return rows_per_s


MACHINES = {
    "disk": machine(8, 4_000, 1_500),
    "few CPUs": machine(2, 1e9, 1_000, ahead=0.7),
    "many CPUs": machine(64, 1e9, 900),
    "cache": machine(4, 1e9, 1_000, cache=0.4),
    "all of it": machine(8, 9_000, 1_200, ahead=0.8, cache=0.6),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("demand", [500, 3_000, 6_000, 50_000])
def test_as_good_as_an_exhaustive_grid(name, demand):
    law, rng = MACHINES[name], np.random.default_rng(0)

    def supply(lines: Mapping[str, Any]) -> Timing:
        return Timing(tuple(1 / law(lines) / rng.normal(1, 0.01, 3)))

    choice = tune.search(supply, 1 / law({}), 1 / demand, LADDERS)
    keys, values = zip(*LADDERS, strict=True)
    best = max(law(dict(zip(keys, each, strict=True))) for each in itertools.product(*values))
    trained = min(demand, law(choice.lines))  # rows/s of the loop
    assert trained >= 0.95 * min(demand, best)
    assert choice.outcome == ("enough" if law(choice.lines) >= 1.1 * demand else "not enough")
    assert len(choice.tried) < 14  # of 90


def test_what_does_not_help_is_left_as_it_is():
    choice = tune.search(lambda lines: Timing((1 / min(2, lines["loader.num_readers"]),) * 3), 1.0, 0.1, LADDERS)
    assert (choice.lines, choice.outcome) == ({"loader.num_readers": 2}, "not enough")


def test_the_smallest_setting_that_is_enough():
    choice = tune.search(
        lambda lines: Timing((1 / (1_000 * lines["loader.num_readers"]),) * 3), 1e-3, 1 / 3_000, LADDERS
    )
    assert (choice.lines, choice.outcome) == ({"loader.num_readers": 4}, "enough")  # 1.15 x 3,000 is more than 3 give


def test_what_is_enough_is_left_as_it_is():
    assert tune.search(lambda _: pytest.fail("nothing is to be tried"), 0.8, 1.0, LADDERS) == ({}, [], "enough")


def test_a_noisy_machine_is_told_and_not_tuned():
    choice = tune.search(lambda _: Timing((1.0, 1.5, 1.0, 0.7, 1.3)), 1.0, 0.1, LADDERS)
    assert (choice.lines, choice.outcome) == ({}, "inconclusive")


def test_ladders():
    assert tune.doubled(1, 8) == [1, 2, 4, 8]
    assert tune.doubled(1, 6) == [1, 2, 4, 6]
    assert tune.doubled(1, 1) == [1]
    assert [key for key, _ in tune.ladders(2, [16], True, False)] == [
        "loader.num_workers",
        "loader.prefetch_factor",
        "data.pool_batches",
    ]
    assert tune.ladders(2, [16], False, True)[-1][0] == "hdf5.rdcc_nbytes"


def test_the_overlay_is_a_config_that_says_where_it_is_from(tmp_path):
    text = tune.overlay(
        {"loader.num_readers": 4, "hdf5.rdcc_nbytes": 1, "data.echo": 1.5}, ["by me", "demand: 3 rows/s"]
    )
    assert text.startswith("# by me\n# demand: 3 rows/s\ndata:\n")
    assert yaml.safe_load(text) == {"data": {"readers": 4, "echo": 1.5}, "hdf5": {"rdcc_nbytes": 1}}
    (tmp_path / "tuned.yaml").write_text(text)
    config = load_config(["--config", "config.yaml", "--config", str(tmp_path / "tuned.yaml")])
    assert (config.data.readers, config.data.echo, config.data.batch_size) == (4, 1.5, 64)


def settled(world: World, path: str, tier: auto.Tier, readers: int | str) -> auto.Sizes:
    rows = open_store("data.train", path, {"images": "images", "labels": "labels"})
    sizes = auto.sizes(
        rows,
        rows,
        world.world_size,
        world.local_world_size,
        world.device,
        1,
        tier,
        16,
        "auto",
        "auto",
        readers,
        "auto",
        2,
        2,
    )  # type: ignore[arg-type]
    return tune.settle_readers(rows, sizes, world, seed=0)


def test_auto_tries_a_few_numbers_of_readers_and_says_so(write, monkeypatch):
    monkeypatch.setattr(auto, "cpus", lambda: 4)
    alone, path = World(0, 1, 1, torch.device("cpu")), write(200)
    monkeypatch.setattr(tune, "_row_s", lambda *args: {2: 1.0, 4: 0.5, 8: 0.48}[args[-1]])
    sizes = settled(alone, path, "disk", "auto")
    assert sizes.readers == 4
    assert "reader threads: 4 (auto; rows/s by their number: 2: 1, 4: 2, 8: 2)" in sizes.text
    assert settled(alone, path, "disk", 3).readers == 3
    assert settled(alone, path, "host", "auto").readers == 4  # its share of the CPUs: nothing was tried
    assert "by their number" not in settled(alone, path, "device", "auto").text


def test_ranks_settle_on_one_number(write):
    first, second = in_world(2, settled, write(400), "disk", "auto")
    assert first.readers == second.readers
    assert first.text == second.text


def test_a_file_that_cannot_be_read_ends_the_trial_with_its_name(write):
    path = write(200)
    with h5py.File(path) as file:
        offset = file["images"].id.get_chunk_info(0).byte_offset
    rows = open_store("data.train", path, {"images": "images", "labels": "labels"})
    sizes = auto.sizes(rows, rows, 1, 1, torch.device("cpu"), 1, "disk", 16, "auto", "auto", "auto", "auto", 2, 2)
    with open(path, "r+b") as file:  # noqa: PTH123
        file.truncate(offset + 10)
    with pytest.raises((ValueError, OSError), match=r"rows.h5"):
        tune.settle_readers(rows, sizes, World(0, 1, 1, torch.device("cpu")), 0)
