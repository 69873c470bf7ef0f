"""Where does the time go, and what is to be changed? Takes the same words as train.py, and these:

--seconds S      of each measurement, about (0.5); there are five rounds of up to six
--json           the numbers instead of the table
--min-feed R     exit code 1 if the feed ratio is below R, such as 0.95
--plot FILE      the ceilings as bars, in FILE.html or FILE.png
--trace N        a profile of N steps in run.folder, for https://ui.perfetto.dev
--tune           find the smallest settings that feed the device; written to tuned.<host>.yaml
--batch          with --tune: the batch size, too, which changes what is learned

python diagnose.py
torchrun --standalone --nproc-per-node=gpu diagnose.py --config configs/celeba.yaml --min-feed 0.95
"""

import argparse
import sys

from fastgpu.process import machine
from fastgpu.process.config_loader import flat, load_config
from fastgpu.process.launch import RankError, UserError, exit_with_message, read_launch


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our flags, and the words that are train.py's. Raises UserError."""
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False, exit_on_error=False)
    for flag in ("--json", "--tune", "--batch"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--min-feed", type=float, default=0.0)
    parser.add_argument("--plot", default="")
    parser.add_argument("--trace", type=int, default=0)
    try:
        found, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"command line: {error}; see --help") from None
    if found.plot and not found.plot.endswith((".html", ".png")):
        raise UserError(f"--plot is {found.plot}; it should end in .html or .png")
    if not 0 < found.seconds < 3600:
        raise UserError(f"--seconds is {found.seconds:g}; it should be above 0 and below an hour")
    if not 0 <= found.min_feed <= 1:
        raise UserError(f"--min-feed is {found.min_feed:g}; it should be a ratio from 0 to 1, such as 0.95")
    if found.trace < 0:
        raise UserError(f"--trace is {found.trace}; it should be a number of steps")
    if found.batch and not found.tune:
        raise UserError("--batch says what --tune may change; give both")
    return found, words


if __name__ == "__main__":  # before torch, whose import takes seconds
    launch = read_launch()
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        raise SystemExit(0)
    with exit_with_message(launch, "interrupted"):
        options, words = parse(sys.argv[1:])
        config = load_config(words)

import copy
import gc
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any

import torch

import workloads
from fastgpu.diagnose import preflight, tune
from fastgpu.diagnose import result as diagnosis
from fastgpu.diagnose.ceilings import (
    Feeds,
    Parts,
    Pools,
    TorchDevice,
    first_batch,
    make_feeds,
    measure,
    time_of,
    units_for,
)
from fastgpu.diagnose.plot import write_bars
from fastgpu.diagnose.verdict import Facts, Measured, Timing, Verdict, judge, worth_trying
from fastgpu.feed import sizes as auto
from fastgpu.process.world import World, join
from fastgpu.rows.field import MAX_VALUES
from fastgpu.rows.order import BlockSampler
from train import make_step, open_rows

POOL_S = 0.1  # to train on or to supply: larger pools are cut while measuring, or a few of them would take minutes
MAX_POOL_S = 2.0  # to supply a pool whose size is tried
BATCHES = (2, 4, 8, 16, 32, 64)  # x data.batch_size, with --batch
LIGHTER: dict[str, Any] = {"crop_share": 1.0, "jitter": 0.0, "mixup": 0.0, "cutout": 0, "crop_pad": 0, "flip": False}


class Bench:
    """The training of a config, put together by train.py's own functions, to be measured in parts."""

    def __init__(self, words: Sequence[str], world: World, seconds: float):
        """words: the command line. seconds: of a measurement."""
        self.words, self.world, self.seconds, self.device = words, world, seconds, TorchDevice(world.device)
        self.cfg = load_config([*words])
        self.rows, self.val_rows, self.workload, self.sizes = open_rows(self.cfg, world)
        self.model, step, _ = make_step(self.cfg, world, self.workload)
        self.step, alone, rng = step, copy.copy(step), world.reseed(self.cfg.run.seed)
        if world.world_size > 1:
            alone.model = self.model
            if self.cfg.train.compile:  # what was compiled is DDP around it
                self.model.compile()
        workload = self.workload  # a closure over self would keep all of it alive
        self.transform = lambda rows: workload.transform(rows, rng)
        times = 1.0 if self.cfg.data.echo == "auto" else self.cfg.data.echo
        self.parts = Parts(
            self.transform, lambda rows: step(rows, 0.0), lambda rows: alone(rows, 0.0), self.sizes.batch_size, times
        )
        world.check_equal(self.sizes.tier, "set data.tier: free memory differs")
        self.seed, self.pool_batches = self.cfg.run.seed, 1
        with world.raise_on_every_rank():
            self.batch = first_batch(self.rows, self.order(self.rows, self.sizes, 1), self.sizes.readers, world.device)
        world.check_everywhere(self.fits(), f"data.batch_size is {self.cfg.data.batch_size}: out of memory; use fewer")
        self.compute_s = self.compute(self.transform).step_s
        supply = self.supply({}) if self.sizes.tier == "disk" else None
        slowest_s = max(self.compute_s, supply.step_s if supply else 0.0)
        self.pool_batches = min(self.sizes.pool_batches, max(1, round(POOL_S / slowest_s)))

    def order(self, rows: Any, sizes: auto.Sizes, pool_batches: int) -> BlockSampler:
        """Another one each time, or a cold file would be warm for whatever is measured second."""
        self.seed += 1
        return BlockSampler(
            rows.block_rows,
            sizes.batch_size,
            rank=self.world.rank,
            world_size=self.world.world_size,
            canonical_ranks=sizes.canonical_ranks,
            pool_batches=pool_batches,
            seed=self.seed,
        )

    def fits(self) -> bool:
        """Whether the device has room for a step; a shared one: DDP must see its first before the bare model runs."""
        try:
            self.parts.step(self.transform(self.batch))
        except torch.cuda.OutOfMemoryError:
            return False
        return True

    def timing(self, work: Callable[[int], int], least: int) -> Timing:
        """Seconds a step of the slowest rank, in three rounds; the first steps, which choose kernels, do not count."""
        units = units_for(self.world, self.device, work, self.seconds, least)
        return Timing(tuple(max(time_of(self.world, self.device, work, units)) for _ in range(3)))

    def compute(self, transform: Callable[[Any], Any]) -> Timing:
        """Of steps on the one batch."""

        def work(steps: int) -> int:
            for _ in range(steps):
                self.parts.step(transform(self.batch))
            return steps

        return self.timing(work, 3)

    def feeds(self, words: Sequence[str] = (), only_real: bool = False) -> Feeds:
        """As with these words on the command line, too."""
        cfg = load_config([*self.words, *words])
        rows, _, _, sizes = open_rows(cfg, self.world) if words else (self.rows, None, None, self.sizes)
        is_pool_asked = any(word.startswith("data.pool_batches=") for word in words)
        order = self.order(rows, sizes, sizes.pool_batches if is_pool_asked else self.pool_batches)
        with self.world.raise_on_every_rank():
            return make_feeds(
                rows, order, sizes, self.world.device, cfg.data.prefetch_pools, cfg.data.pin_memory, only_real
            )

    def measure(self) -> Measured:
        feeds, is_seen = self.feeds(), self.world.is_main and sys.stderr.isatty()
        show = (lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)) if is_seen else None
        found = measure(self.world, self.device, self.parts, self.batch, feeds, self.seconds, tell=show)
        feeds.close()
        if show:
            show("")
        return found

    def supply(self, lines: Mapping[str, Any]) -> Timing | None:
        """Of the supply with these lines in the config; None if they cannot be here, for want of memory say."""
        try:
            feeds = self.feeds(_words(lines), only_real=True)
        except RankError:
            raise
        except UserError:  # on every rank
            return None
        pools = Pools(feeds.real, self.parts)
        pools.pass_by(2 * feeds.ahead)
        found = self.timing(pools.pass_by, 2 * feeds.burst)
        feeds.close()
        return found

    def search(self, lines: Mapping[str, Any], demand_s: float) -> tune.Choice:
        """What feeds a demand, beside these lines."""
        by_h5py = getattr(self.rows, "by_h5py", False)
        share = int(-self.world.all_reduce_max(-max(1, machine.available_cpus() // self.world.local_world_size)))
        now = self.supply(lines)
        now_s = now.step_s if now else inf
        pools = [self.sizes.pool_batches * times for times in (1, 2, 4)]
        pools = [each for each in pools if each * now_s < MAX_POOL_S]
        ladders = tune.ladders(share, pools, self.rows.in_workers, by_h5py)
        return tune.search(lambda more: self.supply({**lines, **more}), now_s, demand_s, ladders)

    def try_word(self, cause: str, word: str) -> float:
        """Seconds a step of the part of the loop that the word changes; inf if it cannot be here."""
        if cause == "AUGMENT":
            cfg = load_config([*self.words, word])
            other = workloads.make(cfg.workload, self.rows, self.val_rows, cfg.options)
            rng = self.world.reseed(cfg.run.seed)
            return self.compute(lambda rows: other.transform(rows, rng)).step_s
        if cause != "COPY":
            timing = self.supply(dict([word.split("=", 1)]))
            return timing.step_s if timing else inf
        feeds = self.feeds([word])
        assert feeds.staged
        pools = Pools(feeds.staged, self.parts)
        pools.train(2 * feeds.ahead)
        found = self.timing(pools.train, 2)
        feeds.close()
        return found.step_s

    def facts(self) -> Facts:
        cfg, rows, is_gpu = self.cfg, self.rows, self.world.device.type == "cuda"
        need = (len(rows) + len(self.val_rows)) * rows.row_bytes
        free = {
            "device": torch.cuda.mem_get_info()[0] if is_gpu else 0,
            "host": machine.free_host_bytes() // self.world.local_world_size,
        }
        nearer = [] if rows.in_workers else {"disk": ["device", "host"], "host": ["device"]}.get(self.sizes.tier, [])
        values = max((int(each.sum(dtype="int64")) for each in rows.lengths.values()), default=0)
        near = next((tier for tier in nearer if need < 0.8 * free[tier] and values <= MAX_VALUES), None)
        faster = {
            "train.compile=true": not cfg.train.compile,
            "train.precision=bf16": cfg.train.precision == "fp32",
            "train.channels_last=true": not cfg.train.channels_last,
        }
        return Facts(
            readers_key="loader.num_workers" if rows.in_workers else "loader.num_readers",
            readers=self.sizes.readers,
            near_tier=near,
            most_batch_rows=len(rows),
            echo=self.parts.echo,
            most_echo=4.0 if self.workload.is_random else 2.0,
            float_fields={name: field.dtype.itemsize for name, field in rows.fields.items() if field.dtype.kind == "f"},
            filters=getattr(rows, "filters", ""),
            pins=cfg.data.pin_memory,
            fp16=self.step.precision == "fp16",
            lighter=tuple(f"augment.{k}={json.dumps(v)}" for k, v in LIGHTER.items() if cfg.options[k] != v),
            dataset=f"python convert.py repack --dataset {cfg.data.dataset} {cfg.data.train} train.h5"
            if rows.in_workers
            else "",
            unused=tuple(word for word, is_off in faster.items() if is_off and is_gpu),
        )

    def trace(self, steps: int, path: Path) -> None:
        """Profile the loop; rank 0 writes it."""
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if self.world.device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        feeds = self.feeds()
        loop = Pools(feeds.real, self.parts).steps()
        list(islice(loop, 3))
        with torch.profiler.profile(activities=kinds) as profile:
            list(islice(loop, steps))
            self.device.synchronize()
        feeds.close()
        with self.world.raise_on_every_rank():
            if self.world.is_main:
                write(path, lambda path: profile.export_chrome_trace(str(path)))


def diagnose(words: Sequence[str], world: World, asked: argparse.Namespace) -> int:
    """Measure, say what was found, and return the exit code."""
    cfg = load_config([*words])
    folder, say = Path(cfg.run.folder), (lambda _: None) if asked.json else world.print_once
    with world.raise_on_every_rank():
        found = preflight.look(
            world.device,
            world.local_world_size,
            world.gpus or [],
            cfg.data.train,
            [*cfg.data.fields.values()],
            cfg.data.dataset != "none",
            cfg.run.folder,
        )
    say("\n".join(map(str, found)))
    bench = Bench(words, world, asked.seconds)
    sizes = bench.sizes
    m, facts = bench.measure(), bench.facts()
    verdict: Verdict = world.broadcast(judge(m, facts))
    if tries := worth_trying(verdict.cause, facts):
        verdict = world.broadcast(judge(m, facts, {word: bench.try_word(verdict.cause, word) for word in tries}))
    head = f"{world}, {m.batch_size} rows a step, {sizes.tier} tier" + (
        f", {sizes.who}: {sizes.readers}" if m.supply else ""
    )
    resolved = flat(cfg) | auto.resolved(sizes, bench.rows.in_workers, bench.step.precision)
    resolved["data.echo"] = bench.parts.echo
    on = f"{world}, {bench.rows.row_bytes} B"
    numbers = diagnosis.as_json(on, resolved, m, verdict, [each._asdict() for each in found])
    say(f"\n{diagnosis.table(head, m, verdict)}")
    if asked.trace:
        bench.trace(asked.trace, folder / "trace.json")
        say(f"profile of {asked.trace} steps: {folder}/trace.json, for https://ui.perfetto.dev")
    with world.raise_on_every_rank():
        if world.is_main and asked.plot:
            write(Path(asked.plot), lambda path: write_bars(path, f"{verdict.cause}: {head}", diagnosis.drawn(m)))
    if world.is_main:
        try:
            write(folder / diagnosis.FILE, lambda path: path.write_text(json.dumps(numbers, indent=2)))
        except UserError as error:
            say(f"not kept for later runs: {error}")
    if asked.tune:
        numbers["tuned"] = tuned(bench, m, verdict, facts, asked.batch)
        say(numbers["tuned"])
    if asked.json:
        world.print_once(json.dumps(numbers, indent=2))
    return int(m.feed_ratio.step_s < asked.min_feed)


def tuned(bench: Bench, m: Measured, verdict: Verdict, facts: Facts, batch: bool) -> str:
    """Try settings, write those that are worth it to a file of their own, and tell what happened."""
    lines, notes, demand_s, choice = dict[str, Any](), list[str](), m.compute.step_s, None
    if not verdict.is_input and not batch:
        return f"{verdict.cause}: supplying rows is not what holds this up; there is nothing to tune"
    for is_larger in (False, True)[: 1 + batch]:
        if is_larger:
            more, demand_s, said = larger_batch(bench, demand_s)
            notes, lines = notes + said, lines | more
        if "data.batch_size" in lines or (verdict.is_input and not is_larger):
            choice = bench.search(lines, demand_s)
            notes += [
                f"{' '.join(_words(each.lines))}: {m.batch_size / each.timing.step_s:,.0f} rows/s supplied, "
                f"+-{100 * each.timing.spread:.0f} %"
                for each in choice.tried
            ]
            if choice.outcome == "inconclusive":
                return "\n".join([*notes, "inconclusive: this machine is too noisy to tell; nothing is written"])
            lines |= choice.lines
    if choice and choice.outcome == "not enough":
        supply_s = min((each.timing.step_s for each in choice.tried), default=0.0)
        factor = round(min(facts.most_echo, facts.echo * supply_s / demand_s), 2)
        if factor > 1.05 * facts.echo:
            lines["data.echo"] = factor
            notes.append("that is not enough: data.echo trains on each row more than once")
    if not lines:
        return "\n".join([*notes, "no setting of the supply is better than what is set: see the change above"])
    host = platform.node()
    path = Path(f"tuned.{host}.yaml")
    named = any(word.startswith("--config") for word in bench.words)
    notes = [
        f"by diagnose.py --tune on {time.strftime('%Y-%m-%d')}, {host}: {bench.world}, {machine.available_cpus()} CPUs, "
        f"torch {torch.__version__}",
        f"demand: {m.batch_size / demand_s:,.0f} rows/s",
        *notes,
        f"to use it: {'the same words, and' if named else '--config config.yaml'} --config {path}",
    ]
    with bench.world.raise_on_every_rank():
        if bench.world.is_main:
            write(path, lambda path: path.write_text(tune.overlay(lines, notes)))
    return "\n".join([*notes, f"{path}: {' '.join(_words(lines))}"])


def larger_batch(bench: Bench, step_s: float) -> tuple[dict[str, Any], float, list[str]]:
    """Double data.batch_size as long as that gives a tenth more rows/s and memory lasts.

    Returns lines, seconds a step of as many rows as before, notes.
    """
    rows, lines, notes = bench.cfg.data.batch_size, dict[str, Any](), list[str]()
    for times in BATCHES:
        word = f"data.batch_size={rows * times}"
        gc.collect()  # the bench before
        torch.cuda.empty_cache()
        try:
            now_s = Bench([*bench.words, word], bench.world, bench.seconds).compute_s / times
        except RankError:
            raise
        except UserError as error:  # on every rank: not so much memory, or not so many rows
            notes.append(f"{word}: {error}")
            break
        notes.append(f"{word}: {rows / now_s:,.0f} rows/s trained")
        if now_s > 0.9 * step_s:
            break
        lines, step_s = {"data.batch_size": rows * times}, now_s
    said = "a larger batch changes what is learned: find its learning rate"
    return lines, step_s, [*notes, said] if lines else notes


def _words(lines: Mapping[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in lines.items()]


def write(path: Path, how: Callable[[Path], object]) -> None:
    """Write a file. Raises UserError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        how(path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from None


if __name__ == "__main__":
    with exit_with_message(launch, "interrupted"), join(launch, config.dist.device, config.dist.timeout_s) as world:
        code = diagnose(words, world, options)
    raise SystemExit(code)
