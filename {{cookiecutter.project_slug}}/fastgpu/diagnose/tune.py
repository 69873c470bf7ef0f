"""Finds the smallest settings that feed the device, by trying them one after the other, and writes them to a file."""

import gc
import platform
import time
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml

from fastgpu.diagnose.bench import Bench
from fastgpu.diagnose.result import save
from fastgpu.diagnose.settings import (
    BATCH_SIZE,
    CHUNK_CACHE_BYTES,
    ECHO,
    NUM_READERS,
    NUM_WORKERS,
    POOL_BATCHES,
    PREFETCH_FACTOR,
    PREFETCH_POOLS,
    Overrides,
    Setting,
    as_sections,
    format_overrides,
    override,
)
from fastgpu.diagnose.verdict import Facts, Measured, Timing, Verdict
from fastgpu.process.launch import RankError, UserError
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World

MARGIN = 1.15
"""The supply is enough if it is this many times as fast as the demand."""
EQUAL_SHARE = 0.05
"""A smaller setting that is slower than the best one by at most this share is preferred."""
MAX_SPREAD = 0.15
"""Timings with a larger spread show nothing."""
MAX_POOL_S = 2.0
"""Pools that take longer to supply are not tried."""
BATCH_FACTORS = (2, 4, 8, 16, 32, 64)
MIN_BATCH_GAIN = 0.1
"""A larger batch that saves less of the time per row is not worth it."""
CHUNK_CACHES = (8 << 20, 64 << 20, 512 << 20)

Ladder = tuple[str, Sequence[Any]]
"""A key of the config and the values to try, the cheapest first."""
Supply = Callable[[Overrides], Timing | None]
"""Settings -> seconds to supply the rows of one step. None: the settings are not possible here."""


class Trial(NamedTuple):
    """Settings that were tried, and the time to supply the rows of one step with them."""

    overrides: dict[str, Any]
    timing: Timing


class Choice(NamedTuple):
    """The settings to use, and every trial on the way to them."""

    overrides: dict[str, Any]
    trials: list[Trial]
    outcome: Literal["enough", "not enough", "inconclusive"]


# ---------------------------------------------------------------------------------------------- the search


def search(supply: Supply, current_s: float, demand_s: float, ladders: Sequence[Ladder]) -> Choice:
    """Climb one ladder after the other until the supply is `MARGIN` times as fast as the demand.

    current_s: seconds to supply the rows of one step with the current settings. demand_s: seconds to train on them. Of
    each ladder the smallest value is kept that is enough or, if none is, that is as good as the best one. A ladder on
    which nothing is better than before changes nothing.
    """
    overrides: dict[str, Any] = {}
    trials: list[Trial] = []
    if current_s * MARGIN <= demand_s:
        return Choice(overrides, trials, "enough")
    for key, values in ladders:
        rungs: list[Trial] = []
        for value in values:
            candidate = overrides | {key: value}
            timing = supply(candidate)
            if timing is None:
                continue
            rungs.append(Trial(candidate, timing))
            if timing.spread > MAX_SPREAD:
                return Choice({}, trials + rungs, "inconclusive")
            if timing.step_s * MARGIN <= demand_s:
                return Choice(candidate, trials + rungs, "enough")
        trials += rungs
        best_s = min((rung.timing.step_s for rung in rungs), default=inf)
        if current_s > (1 + EQUAL_SHARE) * best_s:
            smallest = next(rung for rung in rungs if rung.timing.step_s <= (1 + EQUAL_SHARE) * best_s)
            overrides = smallest.overrides
            current_s = smallest.timing.step_s
    return Choice(overrides, trials, "not enough")


def doublings(minimum: int, maximum: int) -> list[int]:
    """minimum, 2 x minimum, 4 x minimum and so on; the last value is the maximum."""
    values = [minimum]
    while values[-1] * 2 < maximum:
        values.append(values[-1] * 2)
    if maximum > minimum:
        values.append(maximum)
    return values


def make_ladders(n_cpus: int, pool_batches: Sequence[int], *, uses_workers: bool, by_h5py: bool) -> list[Ladder]:
    """The settings to try, in this order.

    n_cpus: CPUs of one rank. pool_batches: sizes of a pool. uses_workers: the rows come from a Dataset. by_h5py: only
    the HDF5 library can read the file.
    """
    ladders: list[Ladder]
    if uses_workers:
        ladders = [(NUM_WORKERS, doublings(1, 2 * n_cpus)), (PREFETCH_FACTOR, [1, 2, 4])]
    else:
        ladders = [(NUM_READERS, doublings(1, 4 * n_cpus)), (PREFETCH_POOLS, [1, 2, 4])]
    ladders.append((POOL_BATCHES, pool_batches))
    if by_h5py:
        ladders.append((CHUNK_CACHE_BYTES, CHUNK_CACHES))
    return ladders


def fewest_cpus(world: World) -> int:
    """CPUs per rank, on the machine that has the fewest: all ranks must try the same settings."""
    own = max(1, available_cpus() // world.local_world_size)
    return int(-world.all_reduce_max(-own))


def search_supply(bench: Bench, overrides: Overrides, demand_s: float) -> Choice:
    """The settings that feed a demand, on top of `overrides`."""
    current = bench.time_supply(overrides)
    current_s = current.step_s if current else inf
    sizes = [bench.sizes.pool_batches * factor for factor in (1, 2, 4)]
    pool_batches = [size for size in sizes if size * current_s < MAX_POOL_S]
    ladders = make_ladders(
        fewest_cpus(bench.world),
        pool_batches,
        uses_workers=bench.sizes.uses_workers,
        by_h5py=bench.parts.source.by_h5py,
    )
    return search(lambda more: bench.time_supply({**overrides, **more}), current_s, demand_s, ladders)


# ---------------------------------------------------------------------------------------------- --tune


class Tuned(NamedTuple):
    """The settings that were chosen, and what was seen on the way, one line each."""

    overrides: dict[str, Any]
    notes: list[str]


def tune(bench: Bench, measured: Measured, verdict: Verdict, facts: Facts, *, tries_batch: bool) -> str:
    """Try settings, write the good ones to tuned.<host>.yaml, and return a report.

    tries_batch: try larger batches, too, which changes what is learned.
    """
    if not verdict.is_input and not tries_batch:
        return f"{verdict.cause}: the supply of rows is not the bottleneck; there is nothing to tune"
    demand_s = measured.compute.step_s
    tuned = Tuned({}, [])
    choice = None
    if verdict.is_input:
        choice = _tune_supply(bench, measured, tuned, demand_s)
    if tries_batch and not _is_noisy(choice):
        demand_s = _tune_batch(bench, tuned, demand_s)
        if BATCH_SIZE in tuned.overrides:
            choice = _tune_supply(bench, measured, tuned, demand_s)
    if _is_noisy(choice):
        return "\n".join([*tuned.notes, "inconclusive: this machine is too noisy; nothing is written"])
    if choice and choice.outcome == "not enough":
        _tune_echo(choice, tuned, facts, demand_s)
    if not tuned.overrides:
        return "\n".join([*tuned.notes, "no setting supplies rows faster than the current ones: see the change above"])
    return _write(bench.world, tuned, f"demand: {measured.batch_size / demand_s:,.0f} rows/s")


def _is_noisy(choice: Choice | None) -> bool:
    return choice is not None and choice.outcome == "inconclusive"


def _tune_supply(bench: Bench, measured: Measured, tuned: Tuned, demand_s: float) -> Choice:
    choice = search_supply(bench, dict(tuned.overrides), demand_s)
    for trial in choice.trials:
        rows_per_s = measured.batch_size / trial.timing.step_s
        spread_pct = 100 * trial.timing.spread
        settings = format_overrides(trial.overrides)
        tuned.notes.append(f"{settings}: {rows_per_s:,.0f} rows/s supplied, +-{spread_pct:.0f} %")
    tuned.overrides.update(choice.overrides)
    return choice


def _tune_echo(choice: Choice, tuned: Tuned, facts: Facts, demand_s: float) -> None:
    supply_s = min((trial.timing.step_s for trial in choice.trials), default=0.0)
    factor = round(min(facts.max_echo, facts.echo * supply_s / demand_s), 2)
    if factor > (1 + EQUAL_SHARE) * facts.echo:
        tuned.overrides[ECHO] = factor
        tuned.notes.append(f"that is not enough: {ECHO} trains on each row more than once")


def _tune_batch(bench: Bench, tuned: Tuned, step_s: float) -> float:
    """Double the batch size as long as that trains rows faster and memory lasts.

    step_s: seconds to train on the rows of a step. Returns the seconds for as many rows in the larger batch.
    """
    n_rows = bench.config.data.batch_size
    for factor in BATCH_FACTORS:
        setting = Setting(BATCH_SIZE, n_rows * factor)
        gc.collect()  # frees the bench before this one
        torch.cuda.empty_cache()
        config = override(bench.config, {BATCH_SIZE: n_rows * factor})
        try:
            larger = Bench(config, bench.world, bench.program, bench.meter.seconds)
        except RankError:
            raise
        except UserError as error:  # raised on every rank: too little memory, or too few rows
            tuned.notes.append(f"{setting}: {error}")
            break
        larger_s = larger.compute_s / factor
        del larger
        tuned.notes.append(f"{setting}: {n_rows / larger_s:,.0f} rows/s trained")
        if larger_s > (1 - MIN_BATCH_GAIN) * step_s:
            break
        tuned.overrides[BATCH_SIZE] = n_rows * factor
        step_s = larger_s
    if BATCH_SIZE in tuned.overrides:
        tuned.notes.append("a larger batch changes what is learned: look for its learning rate")
    return step_s


def _write(world: World, tuned: Tuned, demand: str) -> str:
    """Write the settings to a file, with the notes as comments. Returns the notes. Raises UserError."""
    host = platform.node()
    path = Path(f"tuned.{host}.yaml")
    date = time.strftime("%Y-%m-%d")
    notes = [
        f"by diagnose.py --tune on {date}, {host}: {world}, {available_cpus()} CPUs, torch {torch.__version__}",
        demand,
        *tuned.notes,
        f"to use it, add it after the other config files: --config config.yaml --config {path}",
    ]
    with world.raise_on_every_rank():
        if world.is_main:
            save(path, lambda path: path.write_text(as_config_file(tuned.overrides, notes)))
    return "\n".join([*notes, f"{path}: {format_overrides(tuned.overrides)}"])


def as_config_file(overrides: Overrides, notes: Sequence[str]) -> str:
    """The text of a config file of only these settings. The notes are its comments."""
    comments = "".join(f"# {line}\n" for note in notes for line in note.splitlines())
    return comments + yaml.safe_dump(as_sections(overrides), sort_keys=False)
