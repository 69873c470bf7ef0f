"""The smallest settings that feed the device: tried one after the other, never guessed.

Whoever measures gives a function; what is here decides what to try next, what is good enough, and when the machine is
too noisy to say.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from math import inf
from typing import Any, NamedTuple

import torch
import yaml

from fastgpu.diagnose.verdict import Timing
from fastgpu.feed.sizes import Sizes
from fastgpu.feed.tiers import make_feed
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler

MARGIN = 1.15  # supply / demand that is enough
AS_GOOD = 0.05  # a setting so close to the best one is as good, if it is smaller
NOISE = 0.15  # half the range of a setting's rounds, from where on nothing can be said
PROBE_S, PROBE_BYTES = 0.2, 16 << 20  # of one number of reader threads, at the start of a run
PROBE_WORKERS_S = 1.0

Ladder = tuple[str, Sequence[Any]]
"""A key of the config, and the values to try, the cheapest first."""


class Tried(NamedTuple):
    """One set of config lines, and how fast rows came with it."""

    lines: Mapping[str, Any]
    timing: Timing
    """Seconds a step of the supply."""


class Choice(NamedTuple):
    """What to set, all that was tried on the way, and what came of it."""

    lines: dict[str, Any]
    tried: list[Tried]
    outcome: str
    """`enough`, `not enough` or `inconclusive`."""


def search(
    supply: Callable[[Mapping[str, Any]], Timing | None], now_s: float, demand_s: float, ladders: Sequence[Ladder]
) -> Choice:
    """Go up one ladder after the other until the supply is MARGIN x as fast as the demand.

    supply: {key: value} -> what it takes to supply a step; None: not to be had here. now_s: of what is set now.
    demand_s: seconds of a step. Of each ladder the smallest value stays that is enough, or else as good as the best
    one; none, if none is better than what there was.
    """
    lines, tried = dict[str, Any](), list[Tried]()
    if now_s * MARGIN <= demand_s:
        return Choice(lines, tried, "enough")
    for key, values in ladders:
        rungs = list[Tried]()
        for value in values:
            if (timing := supply(lines | {key: value})) is None:
                continue
            rungs.append(Tried(lines | {key: value}, timing))
            if timing.spread > NOISE:
                return Choice({}, [*tried, *rungs], "inconclusive")
            if timing.step_s * MARGIN <= demand_s:
                return Choice(dict(rungs[-1].lines), [*tried, *rungs], "enough")
        tried += rungs
        best_s = min((each.timing.step_s for each in rungs), default=inf)
        if now_s > (1 + AS_GOOD) * best_s:
            chosen = next(each for each in rungs if each.timing.step_s <= (1 + AS_GOOD) * best_s)
            lines, now_s = dict(chosen.lines), chosen.timing.step_s
    return Choice(lines, tried, "not enough")


def doubled(least: int, most: int) -> list[int]:
    """least, 2 x least, 4 x least ... up to most, which is the last one."""
    found = [least]
    while found[-1] * 2 < most:
        found.append(found[-1] * 2)
    return found + [most] * (most > least)


def ladders(readers: int, pools: Sequence[int], in_workers: bool, by_h5py: bool) -> list[Ladder]:
    """What to try, in this order. readers: this rank's share of the CPUs. pools: sizes in batches. by_h5py: whether
    the HDF5 library reads."""
    found: list[Ladder] = [
        ("loader.num_workers" if in_workers else "loader.num_readers", doubled(1, readers * (2 if in_workers else 4))),
        ("loader.prefetch_factor" if in_workers else "loader.prefetch_pools", [1, 2, 4]),
        ("data.pool_batches", pools),
    ]
    return found + [("hdf5.rdcc_nbytes", [8 << 20, 64 << 20, 512 << 20])] * by_h5py


def overlay(lines: Mapping[str, Any], notes: Sequence[str]) -> str:
    """A config file of only these lines; comments say what they rest on."""
    tree: dict[str, Any] = {}
    for key, value in lines.items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    return "".join(f"# {note}\n" for note in notes) + yaml.safe_dump(tree, sort_keys=False)


# ---------------------------------------------------------------------------------------------- `auto` in the config


def settle_readers(rows: Any, sizes: Sizes, world: World, seed: int) -> Sizes:
    """The number of readers where the config leaves it open: the smallest that is as good as the best of a few.

    Half, all and twice as many threads as this rank has CPUs (of worker processes, no more than CPUs), each for a
    moment, all ranks together. Threads that wait for a disk may be more than CPUs; threads that copy need not be as
    many. It changes nothing about the batches.
    """
    if world.all_reduce_max(
        float(not sizes.readers_are_open or sizes.tier != "disk")
    ):  # on any rank: free RAM may differ
        return sizes
    share = int(-world.all_reduce_max(-sizes.readers))
    tried = dict[int, float]()
    for number, readers in enumerate(doubled(max(1, share // 2), share if rows.in_workers else 2 * share)):
        with world.raise_on_every_rank():
            mine = _row_s(rows, sizes, world, seed + number, readers)
        tried[readers] = world.all_reduce_max(mine)
    best_s = min(tried.values())
    readers = next(each for each in tried if tried[each] <= (1 + 2 * AS_GOOD) * best_s)
    rates = ", ".join(f"{each}: {world.world_size / seconds:,.0f}" for each, seconds in tried.items())
    return sizes._replace(readers=readers, note=f" (auto; rows/s by their number: {rates}){sizes.note}")


def _row_s(rows: Any, sizes: Sizes, world: World, seed: int, readers: int) -> float:
    """Seconds to supply a row of this rank. Other blocks for each seed, so that none is measured on a warm cache."""
    batches = 1 if rows.in_workers else PROBE_BYTES // (rows.row_bytes * sizes.batch_size)
    pool_batches = max(1, min(sizes.pool_batches, batches))
    order = BlockSampler(
        rows.block_rows,
        sizes.batch_size,
        rank=world.rank,
        world_size=world.world_size,
        canonical_ranks=sizes.canonical_ranks,
        pool_batches=pool_batches,
        seed=seed,
    )
    feed = make_feed(rows, order, "disk", torch.device("cpu"), readers, 1)
    pools = (pool for epoch in count() for pool in feed.pools(epoch))
    if rows.in_workers:
        next(pools)  # by then they have started
    t0, taken, passed_s = time.perf_counter(), 0, 0.0
    while passed_s < (PROBE_WORKERS_S if rows.in_workers else PROBE_S):
        taken += len(next(pools).rows)
        passed_s = time.perf_counter() - t0
    feed.close()
    return passed_s / taken
