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

from fastgpu.diagnose.bench import Bench, as_sections
from fastgpu.diagnose.result import save
from fastgpu.diagnose.verdict import Facts, Measured, Overrides, Rounds, Setting, Verdict
from fastgpu.process.launch import RankError, UserError
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World

MARGIN = 1.15  # the supply is enough if it is this many times as fast as the demand
EQUAL_SHARE = 0.05  # a smaller setting that is slower than the best one by at most this share is preferred
MAX_SPREAD = 0.15  # timings with a larger spread show nothing
MAX_POOL_S = 2.0  # pools that take longer to supply are not tried
MIN_BATCH_GAIN = 0.1  # a larger batch that saves less of the time per row is not worth it
BATCH_FACTORS = (2, 4, 8, 16, 32, 64)
CHUNK_CACHES = (8 << 20, 64 << 20, 512 << 20)

Ladder = tuple[str, Sequence[Any]]
"""A key of the config and the values to try, the cheapest first."""
Supply = Callable[[Overrides], Rounds | None]
"""Settings -> seconds to supply the rows of one step. None: the settings are not possible here."""
Trial = tuple[dict[str, Any], Rounds]
"""Settings that were tried, and seconds to supply the rows of one step with them."""


class Choice(NamedTuple):
    """The settings to use, and every trial on the way to them."""

    overrides: dict[str, Any]
    trials: list[Trial]
    outcome: Literal["enough", "not enough", "inconclusive"]


def tune(bench: Bench, measured: Measured, verdict: Verdict, facts: Facts, *, tries_batch: bool) -> str:
    """Try settings, write the good ones to tuned.<host>.yaml, and return a report.

    tries_batch: try larger batches, too, which changes what is learned.
    """
    is_input = verdict.cause in ("READ", "DECODE")
    if not is_input and not tries_batch:
        return f"{verdict.cause}: the supply of rows is not the bottleneck; there is nothing to tune"
    demand_s = measured.compute_s
    overrides: dict[str, Any] = {}
    notes: list[str] = []
    if tries_batch:
        batch_size, demand_s = _find_batch_size(bench, demand_s, notes)
        if batch_size > bench.config.data.batch_size:
            overrides["data.batch_size"] = batch_size
            notes.append("a larger batch changes what is learned: look for its learning rate")
    if is_input or overrides:
        choice = search_supply(bench, overrides, demand_s)
        for settings, timing in choice.trials:
            rows_per_s = measured.batch_size / timing.median
            words = format_overrides(settings)
            notes.append(f"{words}: {rows_per_s:,.0f} rows/s supplied, +-{100 * timing.spread:.0f} %")
        if choice.outcome == "inconclusive":
            return "\n".join([*notes, "inconclusive: this machine is too noisy; nothing is written"])
        overrides |= choice.overrides
        supply_s = min((timing.median for _, timing in choice.trials), default=0.0)
        echo = round(min(facts.max_echo, facts.echo * supply_s / demand_s), 2)
        if choice.outcome == "not enough" and echo > (1 + EQUAL_SHARE) * facts.echo:
            overrides["data.echo"] = echo
            notes.append("that is not enough: data.echo trains on each row more than once")
    if not overrides:
        return "\n".join([*notes, "no setting supplies rows faster than the current ones: see the change above"])

    path = Path(f"tuned.{platform.node()}.yaml")
    notes = [
        f"by diagnose.py --tune on {time.strftime('%Y-%m-%d')}, {platform.node()}: {bench.world}, "
        f"{available_cpus()} CPUs, torch {torch.__version__}",
        f"demand: {measured.batch_size / demand_s:,.0f} rows/s",
        *notes,
        f"to use it, add it after the other config files: --config config.yaml --config {path}",
    ]
    with bench.world.raise_on_every_rank():
        if bench.world.is_main:
            save(path, lambda path: path.write_text(as_config_file(overrides, notes)))
    return "\n".join([*notes, f"{path}: {format_overrides(overrides)}"])


def format_overrides(overrides: Overrides) -> str:
    """The overrides as words of the command line."""
    return " ".join(str(Setting(key, value)) for key, value in overrides.items())


def as_config_file(overrides: Overrides, notes: Sequence[str]) -> str:
    """The text of a config file of only these settings. The notes are its comments."""
    comments = "".join(f"# {line}\n" for note in notes for line in note.splitlines())
    return comments + yaml.safe_dump(as_sections(overrides), sort_keys=False)


def _find_batch_size(bench: Bench, step_s: float, notes: list[str]) -> tuple[int, float]:
    """Double the batch size as long as that trains rows faster and memory lasts.

    step_s: seconds to train on the rows of a step. Returns the batch size, and the seconds for as many rows with it.
    """
    n_rows = bench.config.data.batch_size
    best = n_rows
    for factor in BATCH_FACTORS:
        setting = Setting("data.batch_size", n_rows * factor)
        gc.collect()  # frees the bench before this one
        torch.cuda.empty_cache()
        config = bench.config.resolved(data={"batch_size": n_rows * factor})
        try:
            larger_s = Bench(config, bench.world, bench.program, bench.meter.seconds).compute_s / factor
        except RankError:
            raise
        except UserError as error:  # raised on every rank: too little memory, or too few rows
            notes.append(f"{setting}: {error}")
            break
        notes.append(f"{setting}: {n_rows / larger_s:,.0f} rows/s trained")
        if larger_s > (1 - MIN_BATCH_GAIN) * step_s:
            break
        best = n_rows * factor
        step_s = larger_s
    return best, step_s


# ---------------------------------------------------------------------------------------------- the search


def search_supply(bench: Bench, overrides: Overrides, demand_s: float) -> Choice:
    """The settings that feed a demand, on top of `overrides`."""
    current = bench.time_supply(overrides)
    current_s = current.median if current else inf
    sizes = [bench.sizes.pool_batches * factor for factor in (1, 2, 4)]
    ladders = make_ladders(
        fewest_cpus(bench.world),
        [size for size in sizes if size * current_s < MAX_POOL_S],
        uses_workers=bench.sizes.uses_workers,
        by_h5py=bench.parts.source.by_h5py,
    )
    return search(lambda more: bench.time_supply({**overrides, **more}), current_s, demand_s, ladders)


def fewest_cpus(world: World) -> int:
    """CPUs per rank, on the machine that has the fewest: all ranks must try the same settings."""
    own = max(1, available_cpus() // world.local_world_size)
    return int(-world.all_reduce_max(-own))


def make_ladders(n_cpus: int, pool_batches: Sequence[int], *, uses_workers: bool, by_h5py: bool) -> list[Ladder]:
    """The settings to try, in this order.

    n_cpus: CPUs of one rank. pool_batches: sizes of a pool. uses_workers: the rows come from a Dataset. by_h5py: only
    the HDF5 library can read the file.
    """
    ladders: list[Ladder]
    if uses_workers:
        ladders = [("loader.num_workers", doublings(2 * n_cpus)), ("loader.prefetch_factor", [1, 2, 4])]
    else:
        ladders = [("loader.num_readers", doublings(4 * n_cpus)), ("loader.prefetch_pools", [1, 2, 4])]
    ladders.append(("data.pool_batches", pool_batches))
    if by_h5py:
        ladders.append(("hdf5.rdcc_nbytes", CHUNK_CACHES))
    return ladders


def doublings(maximum: int) -> list[int]:
    """1, 2, 4 and so on; the last value is the maximum."""
    powers = [1 << exponent for exponent in range(maximum.bit_length())]
    return [power for power in powers if power < maximum] + [maximum]


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
            rungs.append((candidate, timing))
            trials.append((candidate, timing))
            if timing.spread > MAX_SPREAD:
                return Choice({}, trials, "inconclusive")
            if timing.median * MARGIN <= demand_s:
                return Choice(candidate, trials, "enough")
        best_s = min((timing.median for _, timing in rungs), default=inf)
        if current_s > (1 + EQUAL_SHARE) * best_s:
            good = [rung for rung in rungs if rung[1].median <= (1 + EQUAL_SHARE) * best_s]
            overrides, timing = good[0]
            current_s = timing.median
    return Choice(overrides, trials, "not enough")
