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
from fastgpu.diagnose.verdict import MAX_ECHO, Facts, Overrides, Rounds, Verdict, as_words
from fastgpu.process.config import nested
from fastgpu.process.launch import RankError, UserError
from fastgpu.process.machine import available_cpus

MARGIN = 1.15  # the supply is enough if it is this many times as fast as the demand
EQUAL_SHARE = 0.05  # a smaller setting that is slower than the best one by at most this share is preferred
MAX_NOISE = 0.15  # timings with more noise show nothing
MAX_POOL_S = 2.0  # pools that take longer to supply are not tried
MIN_BATCH_GAIN = 0.1  # a larger batch that saves less of the time per row is not worth it
BATCH_FACTORS = (2, 4, 8, 16, 32, 64)

Ladder = tuple[str, Sequence[Any]]
"""A key of the config and the values to try, the cheapest first."""
Trial = tuple[dict[str, Any], Rounds]
"""Settings that were tried, and seconds to supply the rows of one step with them."""


class Choice(NamedTuple):
    """The settings to use, and every trial on the way to them."""

    overrides: dict[str, Any]
    trials: list[Trial]
    outcome: Literal["enough", "not enough", "inconclusive"]


def tune(bench: Bench, verdict: Verdict, facts: Facts, *, tries_batch: bool) -> str:
    """Try settings, write the good ones to tuned.<host>.yaml, and return a report.

    tries_batch: try larger batches, too, which changes what is learned.
    """
    is_input = verdict.cause in ("READ", "DECODE")
    if not is_input and not tries_batch:
        if verdict.cause == "INCONCLUSIVE":
            return "--tune tried nothing, because it has to know the bottleneck first"
        return "--tune tried nothing, because the supply of rows is not the bottleneck"
    overrides: dict[str, Any] = {}
    notes: list[str] = []
    if tries_batch:
        overrides = _find_batch_size(bench, notes)
        bench = _with_settings(bench, overrides) if overrides else bench
    demand_s = bench.compute.median
    batch_size = bench.config.data.batch_size
    notes.append(f"demand: {batch_size / demand_s:,.0f} rows/s")
    if is_input or overrides:
        current = bench.time_supply({})
        current_s = current.median if current else inf
        choice = search(bench.time_supply, current_s, demand_s, _make_ladders(bench, current_s))
        for settings, timing in choice.trials:
            rate = f"{batch_size / timing.median:,.0f} rows/s supplied, +-{100 * timing.noise:.0f} %"
            notes.append(f"{as_words(settings)}: {rate}")
        if choice.outcome == "inconclusive":
            return "\n".join([*notes, "--tune wrote nothing: the last timings differ too much (inconclusive)"])
        overrides |= choice.overrides
        supply_s = min((timing.median for _, timing in choice.trials), default=0.0)
        echo = round(min(MAX_ECHO, facts.echo * supply_s / demand_s), 2)
        if choice.outcome == "not enough" and echo > (1 + EQUAL_SHARE) * facts.echo:
            overrides["data.echo"] = echo
            notes.append("that is not enough: data.echo trains on each row more than once")
    if not overrides:
        return "\n".join([*notes, "--tune wrote nothing: no setting is faster than the current ones"])

    host = platform.node()
    path = Path(f"tuned.{host}.yaml")
    date = time.strftime("%Y-%m-%d")
    notes = [
        f"by diagnose.py --tune on {date}, {host}: {bench.world}, {available_cpus()} CPUs, torch {torch.__version__}",
        *notes,
        f"to use it, add it after the other config files: --config config.yaml --config {path}",
    ]
    with bench.world.raise_on_every_rank():
        if bench.world.is_main:
            save(path, lambda path: path.write_text(as_config_file(overrides, notes)))
    return "\n".join([*notes, f"{path}: {as_words(overrides)}"])


def as_config_file(overrides: Overrides, notes: Sequence[str]) -> str:
    """The text of a config file of only these settings. The notes are its comments."""
    comments = "".join(f"# {line}\n" for note in notes for line in note.splitlines())
    return comments + yaml.safe_dump(nested(overrides), sort_keys=False)


def _find_batch_size(bench: Bench, notes: list[str]) -> dict[str, Any]:
    """Double the batch size as long as that surely trains rows faster and memory lasts. Returns the setting."""
    n_rows = bench.config.data.batch_size
    row_s = bench.compute.low / n_rows
    best: dict[str, Any] = {}
    for factor in BATCH_FACTORS:
        setting = {"data.batch_size": factor * n_rows}
        try:
            larger = _with_settings(bench, setting).compute
        except RankError:
            raise
        except UserError as error:  # raised on every rank: too little memory, or too few rows
            notes.append(f"{as_words(setting)}: {error}")
            break
        notes.append(f"{as_words(setting)}: {factor * n_rows / larger.median:,.0f} rows/s trained")
        if larger.high / (factor * n_rows) > (1 - MIN_BATCH_GAIN) * row_s:
            break
        best = setting
        row_s = larger.low / (factor * n_rows)
    if best:
        notes.append("a larger batch changes what is learned: look for its learning rate")
    return best


def _with_settings(bench: Bench, overrides: Overrides) -> Bench:
    bench.show(f"trying {as_words(overrides)}")
    gc.collect()  # frees the bench before this one
    torch.cuda.empty_cache()
    config = bench.config.resolved(**nested(overrides))
    return Bench(config, bench.world, bench.meter.seconds)


# ---------------------------------------------------------------------------------------------- the search


def _make_ladders(bench: Bench, supply_s: float) -> list[Ladder]:
    """The settings to try, in this order. They are the same on all ranks, also if machines have unlike CPUs."""
    own_cpus = max(1, available_cpus() // bench.world.local_world_size)
    n_cpus = int(-bench.world.all_reduce_max(-own_cpus))
    pools = [factor * bench.sizes.pool_batches for factor in (1, 2, 4)]
    ladders: list[Ladder] = [("loader.num_readers", doublings(4 * n_cpus)), ("loader.prefetch_pools", [1, 2, 4])]
    if bench.sizes.uses_workers:
        ladders = [("loader.num_workers", doublings(2 * n_cpus)), ("loader.prefetch_factor", [1, 2, 4])]
    ladders.append(("data.pool_batches", [size for size in pools if size * supply_s < MAX_POOL_S]))
    return ladders


def doublings(maximum: int) -> list[int]:
    """1, 2, 4 and so on; the last value is the maximum."""
    powers = [1 << exponent for exponent in range(maximum.bit_length())]
    return [power for power in powers if power < maximum] + [maximum]


def search(
    supply: Callable[[Overrides], Rounds | None], current_s: float, demand_s: float, ladders: Sequence[Ladder]
) -> Choice:
    """Climb one ladder after the other until the supply is `MARGIN` times as fast as the demand.

    supply: settings -> seconds to supply the rows of one step; None if the settings are not possible here. current_s:
    the same with the current settings. demand_s: seconds to train on the rows. Of each ladder the smallest value is
    kept that is enough or, if none is, that is as good as the best one. A ladder on which nothing is better than before
    changes nothing.
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
            if timing.noise > MAX_NOISE:
                return Choice({}, trials, "inconclusive")
            if timing.median * MARGIN <= demand_s:
                return Choice(candidate, trials, "enough")
        best_s = min((timing.median for _, timing in rungs), default=inf)
        if current_s > (1 + EQUAL_SHARE) * best_s:
            overrides, timing = next(rung for rung in rungs if rung[1].median <= (1 + EQUAL_SHARE) * best_s)
            current_s = timing.median
    return Choice(overrides, trials, "not enough")
