import itertools
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import yaml
from harness import in_world
from simulated import ALONE

from fastgpu.diagnose import tune
from fastgpu.diagnose.verdict import Facts, Overrides, Rounds, Setting, Verdict, as_words
from fastgpu.process.config_loader import load_config
from fastgpu.process.world import World

LADDERS: list[tune.Ladder] = [
    ("loader.num_readers", [1, 2, 4, 8, 16]),
    ("loader.prefetch_pools", [1, 2, 4]),
    ("data.pool_batches", [8, 16, 32]),
]
DEFAULTS = {"loader.num_readers": 1, "loader.prefetch_pools": 1, "data.pool_batches": 8}


def machine(n_cpus: int, disk: float, per_reader: float, *, one_ahead: float = 1.0) -> Callable[[Overrides], float]:
    """A law of rows per second: readers help up to the number of CPUs and cost afterwards, and the disk is a limit.

    one_ahead: factor of the speed with one prefetched pool.
    """

    def rows_per_s(overrides: Overrides) -> float:
        values = DEFAULTS | dict(overrides)
        n_readers = values["loader.num_readers"]
        rate = per_reader * min(n_readers, n_cpus) * (1 - 0.02 * max(0, n_readers - n_cpus))
        if values["loader.prefetch_pools"] == 1:
            rate *= one_ahead
        if values["data.pool_batches"] == 32:
            rate *= 1.02
        return min(disk, rate)

    return rows_per_s


MACHINES = {
    "disk": machine(8, 4_000, 1_500),
    "few CPUs": machine(2, 1e9, 1_000, one_ahead=0.7),
    "many CPUs": machine(64, 1e9, 900),
    "all of it": machine(8, 9_000, 1_200, one_ahead=0.8),
}


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("demand", [500, 3_000, 6_000, 50_000])
def test_as_good_as_an_exhaustive_grid(name, demand):
    rows_per_s = MACHINES[name]
    rng = np.random.default_rng(0)

    def supply(overrides: Overrides) -> Rounds:
        return Rounds(tuple(1 / rows_per_s(overrides) / rng.normal(1, 0.01, 3)))

    choice = tune.search(supply, 1 / rows_per_s({}), 1 / demand, LADDERS)
    grid = itertools.product(*(values for _, values in LADDERS))
    best = max(rows_per_s(dict(zip(DEFAULTS, values, strict=True))) for values in grid)
    trained = min(demand, rows_per_s(choice.overrides))
    assert trained >= 0.95 * min(demand, best)
    assert choice.outcome == ("enough" if rows_per_s(choice.overrides) >= 1.1 * demand else "not enough")
    assert len(choice.trials) < 14  # the grid has 90


def test_a_setting_that_does_not_help_is_left_as_it_is():
    choice = tune.search(
        lambda overrides: Rounds((1 / min(2, overrides["loader.num_readers"]),) * 3), 1.0, 0.1, LADDERS
    )
    assert (choice.overrides, choice.outcome) == ({"loader.num_readers": 2}, "not enough")


def test_the_smallest_setting_that_is_enough():
    choice = tune.search(
        lambda overrides: Rounds((1 / (1_000 * overrides["loader.num_readers"]),) * 3), 1e-3, 1 / 3_000, LADDERS
    )
    assert (choice.overrides, choice.outcome) == (
        {"loader.num_readers": 4},
        "enough",
    )  # 1.15 x 3,000 is more than 3 give


def test_a_supply_that_is_enough_is_left_as_it_is():
    assert tune.search(lambda _: pytest.fail("nothing is to be tried"), 0.8, 1.0, LADDERS) == ({}, [], "enough")


def test_a_noisy_machine_is_reported_and_not_tuned():
    choice = tune.search(lambda _: Rounds((1.0, 1.5, 1.0, 0.7, 1.3)), 1.0, 0.1, LADDERS)
    assert (choice.overrides, choice.outcome) == ({}, "inconclusive")


def test_a_setting_that_is_not_possible_is_passed_over():
    def supply(overrides: Overrides) -> Rounds | None:
        n_readers = overrides["loader.num_readers"]
        return Rounds((1 / n_readers,) * 3) if n_readers < 8 else None

    choice = tune.search(supply, 1.0, 0.01, LADDERS)
    assert (choice.overrides, choice.outcome) == ({"loader.num_readers": 4}, "not enough")


def make_ladders(world: World, *, uses_workers: bool = False) -> list[tune.Ladder]:
    sizes = SimpleNamespace(pool_batches=16, uses_workers=uses_workers)
    bench = SimpleNamespace(world=world, sizes=sizes)
    return tune._make_ladders(bench, supply_s=0.05)


def test_ladders(monkeypatch):
    assert tune.doublings(8) == [1, 2, 4, 8]
    assert tune.doublings(6) == [1, 2, 4, 6]
    assert tune.doublings(1) == [1]
    monkeypatch.setattr(tune, "available_cpus", lambda: 2)
    of_dataset = make_ladders(ALONE, uses_workers=True)
    assert [key for key, _ in of_dataset] == ["loader.num_workers", "loader.prefetch_factor", "data.pool_batches"]
    assert of_dataset[0][1] == [1, 2, 4]
    of_file = make_ladders(ALONE)
    assert of_file[0] == ("loader.num_readers", [1, 2, 4, 8])
    assert of_file[-1] == ("data.pool_batches", [16, 32])  # a pool of 64 batches would take 3.2 s


@pytest.mark.parametrize("cause", ["INCONCLUSIVE", "COMPUTE", "COPY"])
def test_without_a_slow_supply_nothing_is_tried_and_nothing_denies_the_verdict(cause):
    text = tune.tune(None, Verdict(cause, "", ""), Facts(), tries_batch=False)
    assert text.startswith("--tune tried nothing, because ")
    assert ("know the bottleneck first" in text) == (cause == "INCONCLUSIVE")
    assert "is not the bottleneck" not in text or cause != "INCONCLUSIVE"


def values_to_try(world: World) -> list[int]:
    tune.available_cpus = lambda: 2 + 6 * world.rank
    return make_ladders(world)[0][1]


@pytest.mark.slow
def test_ranks_of_unlike_machines_agree_on_what_to_try():
    assert in_world(2, values_to_try) == [[1, 2, 4]] * 2  # two ranks share the two CPUs of the smaller machine


def test_the_file_is_a_config_whose_comments_say_where_it_is_from(tmp_path):
    overrides = {"loader.num_readers": 4, "data.echo": 1.5}
    text = tune.as_config_file(overrides, ["by me", "demand:\n3 rows/s"])
    assert text.startswith("# by me\n# demand:\n# 3 rows/s\nloader:\n")
    assert yaml.safe_load(text) == {
        "loader": {"num_readers": 4},
        "data": {"echo": 1.5},
    }
    base = tmp_path / "config.yaml"
    base.write_text("workload: mine\ndata: {train: a.h5, val: b.h5, fields: {}}\n")
    (tmp_path / "tuned.yaml").write_text(text)
    config = load_config(["--config", str(base), "--config", str(tmp_path / "tuned.yaml")])
    assert (config.loader.num_readers, config.data.echo, config.data.batch_size) == (4, 1.5, 64)


def test_settings_are_words_of_the_command_line(tmp_path):
    overrides = {"data.echo": 2.5, "loader.pin_memory": False, "data.tier": "host", "loader.num_readers": 3}
    assert as_words(overrides) == "data.echo=2.5 loader.pin_memory=false data.tier=host loader.num_readers=3"
    (tmp_path / "config.yaml").write_text("workload: mine\ndata: {train: a.h5, val: b.h5, fields: {}}\n")
    words = [str(Setting(key, value)) for key, value in overrides.items()]
    given = load_config(["--config", str(tmp_path / "config.yaml"), *words])
    assert {key: given.flat()[key] for key in overrides} == overrides
