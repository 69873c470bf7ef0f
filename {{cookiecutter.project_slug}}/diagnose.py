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

from fastgpu.config import flat, load_config
from fastgpu.launch import UserError, clear_exit, read_launch


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
    if found.seconds <= 0:
        raise UserError(f"--seconds is {found.seconds:g}; it should be above 0")
    if found.batch and not found.tune:
        raise UserError("--batch says what --tune may change; give both")
    return found, words


if __name__ == "__main__":  # before torch, whose import takes seconds
    launch = read_launch()
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        raise SystemExit(0)
    with clear_exit(launch):
        options, words = parse(sys.argv[1:])
        config = load_config(words)

import copy
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import workloads
from fastgpu import auto, diagnosis, preflight, tune
from fastgpu.bottleneck import Facts, Measured, Timing, Verdict, judge, worth_trying
from fastgpu.ceilings import Feeds, Parts, Pools, TorchDevice, first_batch, make_feeds, measure, time_of, units_for
from fastgpu.dist import World, join
from fastgpu.order import BlockSampler
from fastgpu.plot import write_bars
from train import make_step, open_rows

POOL_S = 0.1  # to train on or to supply: larger pools are cut while measuring, or a few of them would take minutes
BATCHES = (2, 4, 8, 16, 32, 64)  # x data.batch_rows, with --batch
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
        alone.model = self.model
        if self.cfg.train.compile and world.size > 1:  # what was compiled is DDP around it
            self.model.compile()
        self.transform = lambda rows: self.workload.transform(rows, rng)
        times = 1.0 if self.cfg.data.echo == "auto" else self.cfg.data.echo
        self.parts = Parts(self.transform, lambda rows: step(rows, 0.0), lambda rows: alone(rows, 0.0),
                           self.sizes.batch_rows, times)  # fmt: skip
        with world.together():
            self.batch = first_batch(self.rows, self.order(self.rows, self.sizes, 1), self.sizes.readers, world.device)
        world.require(self.fits(), f"data.batch_rows is {self.cfg.data.batch_rows}: out of memory; use fewer")
        self.compute_s, self.pool_batches = self.compute(self.transform).step_s, 1
        slowest_s = max(self.compute_s, self.supply({}).step_s if self.sizes.tier == "disk" else 0.0)
        self.pool_batches = min(self.sizes.pool_batches, max(1, round(POOL_S / slowest_s)))

    def order(self, rows: Any, sizes: auto.Sizes, pool_batches: int) -> BlockSampler:
        return BlockSampler(
            rows.block_rows, sizes.batch_rows, rank=self.world.rank, world_size=self.world.size, lanes=sizes.lanes,
            pool_batches=pool_batches, seed=self.cfg.run.seed,
        )  # fmt: skip

    def fits(self) -> bool:
        """Whether the device has room for a step."""
        try:
            self.parts.alone(self.transform(self.batch))
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

    def feeds(self, words: Sequence[str] = ()) -> Feeds:
        """As with these words on the command line, too."""
        cfg = load_config([*self.words, *words])
        rows, _, _, sizes = open_rows(cfg, self.world) if words else (self.rows, None, None, self.sizes)
        is_pool_asked = any(word.startswith("data.pool_batches=") for word in words)
        order = self.order(rows, sizes, sizes.pool_batches if is_pool_asked else self.pool_batches)
        with self.world.together():
            return make_feeds(rows, order, sizes, self.world.device, cfg.data.prefetch_pools, cfg.data.pin_memory)

    def measure(self) -> Measured:
        feeds, is_seen = self.feeds(), self.world.is_first and sys.stderr.isatty()
        show = (lambda text: print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)) if is_seen else None
        found = measure(self.world, self.device, self.parts, self.batch, feeds, self.seconds, tell=show)
        feeds.close()
        if show:
            show("")
        return found

    def supply(self, lines: Mapping[str, Any]) -> Timing:
        """Of the supply with these lines in the config."""
        feeds = self.feeds(_words(lines))
        pools = Pools(feeds.real, self.parts)
        pools.pass_by(2 * feeds.ahead)
        found = self.timing(pools.pass_by, 2)
        feeds.close()
        return found

    def search(self, lines: Mapping[str, Any], demand_s: float) -> tune.Choice:
        """What feeds a demand, beside these lines."""
        by_h5py = getattr(self.rows, "by_h5py", False)
        cpus = max(1, auto.cpus() // self.world.local_size)
        ladders = tune.ladders(cpus, self.sizes.pool_batches, self.rows.in_workers, by_h5py)
        return tune.search(lambda more: self.supply({**lines, **more}), demand_s, ladders)

    def try_word(self, cause: str, word: str) -> float:
        """Seconds a step of the part of the loop that the word changes."""
        if cause == "AUGMENT":
            cfg = load_config([*self.words, word])
            other = workloads.make(cfg.workload, self.rows, self.val_rows, cfg.options)
            rng = self.world.reseed(cfg.run.seed)
            return self.compute(lambda rows: other.transform(rows, rng)).step_s
        if cause != "COPY":
            return self.supply(dict([word.split("=", 1)])).step_s
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
        free = {"device": torch.cuda.mem_get_info()[0] if is_gpu else 0,
                "host": auto.free_host_bytes() // self.world.local_size}  # fmt: skip
        near = next((tier for tier, room in free.items() if need < 0.8 * room), None)
        faster = {"train.compile=true": not cfg.train.compile, "train.precision=bf16": cfg.train.precision == "fp32",
                  "train.channels_last=true": not cfg.train.channels_last}  # fmt: skip
        return Facts(
            readers_key="loader.workers" if rows.in_workers else "data.readers",
            readers=self.sizes.readers,
            near_tier=near if self.sizes.tier == "disk" and not rows.in_workers else None,
            echo=self.parts.echo,
            most_echo=4.0 if self.workload.redraws else 2.0,
            float_fields={name: field.dtype.itemsize for name, field in rows.fields.items() if field.dtype.kind == "f"},
            filters=getattr(rows, "filters", ""),
            pins=cfg.data.pin_memory,
            fp16=self.step.precision == "fp16",
            lighter=tuple(f"augment.{k}={json.dumps(v)}" for k, v in LIGHTER.items() if cfg.options[k] != v),
            dataset=f"python convert.py repack --dataset {cfg.data.dataset} {cfg.data.train} train.h5"
            if rows.in_workers else "",
            unused=tuple(word for word, is_off in faster.items() if is_off and is_gpu),
        )  # fmt: skip

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
        if self.world.is_first:
            path.parent.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(path))


def diagnose(words: Sequence[str], world: World, asked: argparse.Namespace) -> int:
    """Measure, say what was found, and return the exit code."""
    bench = Bench(words, world, asked.seconds)
    cfg, sizes, folder = bench.cfg, bench.sizes, Path(bench.cfg.run.folder)
    say = (lambda _: None) if asked.json else world.say
    paths = [cfg.data.train] if isinstance(cfg.data.train, str) else cfg.data.train
    state_bytes = 3 * sum(each.nbytes for each in bench.model.parameters())  # and two moments of the optimizer
    with world.together():
        found = preflight.look(world.device, world.local_size, world.gpus or [], paths, [*cfg.data.fields.values()],
                               bench.rows.in_workers, cfg.run.folder, state_bytes)  # fmt: skip
    say("\n".join(map(str, found)))
    m, facts = bench.measure(), bench.facts()
    verdict: Verdict = world.from_first(judge(m, facts))
    if tries := worth_trying(verdict.cause, facts):
        verdict = world.from_first(judge(m, facts, {word: bench.try_word(verdict.cause, word) for word in tries}))
    head = f"{world}, {m.batch_rows} rows a step, {sizes.tier} tier" + (
        f", {sizes.who}: {sizes.readers}" if m.supply else ""
    )
    resolved = flat(cfg) | auto.resolved(sizes, bench.rows.in_workers, bench.step.precision)
    numbers = diagnosis.as_json(str(world), resolved, m, verdict, [each._asdict() for each in found])
    say(f"\n{diagnosis.table(head, m, verdict)}")
    if asked.json:
        world.say(json.dumps(numbers, indent=2))
    if asked.trace:
        bench.trace(asked.trace, folder / "trace.json")
        say(f"profile of {asked.trace} steps: {folder}/trace.json, for https://ui.perfetto.dev")
    with world.together():
        if world.is_first:
            write(folder / diagnosis.FILE, lambda path: path.write_text(json.dumps(numbers, indent=2)))
        if world.is_first and asked.plot:
            write(Path(asked.plot), lambda path: write_bars(path, f"{verdict.cause}: {head}", diagnosis.drawn(m)))
    if asked.tune:
        say(tuned(bench, m, verdict, facts, asked.batch))
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
        if verdict.is_input or (is_larger and "data.batch_rows" in lines):
            choice = bench.search(lines, demand_s)
            notes += [f"{' '.join(_words(each.lines))}: {m.batch_rows / each.timing.step_s:,.0f} rows/s supplied, "
                      f"+-{100 * each.timing.spread:.0f} %" for each in choice.tried]  # fmt: skip
            if choice.outcome == "inconclusive":
                return "\n".join([*notes, "inconclusive: this machine is too noisy to tell; nothing is written"])
            lines |= choice.lines
    if choice and choice.outcome == "not enough":
        supply_s = min(each.timing.step_s for each in choice.tried)
        lines["data.echo"] = round(max(1.0, min(facts.most_echo, facts.echo * supply_s / demand_s)), 2)
        notes.append("that is not enough: data.echo trains on each row more than once")
    if not lines:
        return "\n".join([*notes, "nothing is better than it is"])
    host = platform.node()
    path = Path(f"tuned.{host}.yaml")
    notes = [f"by diagnose.py --tune on {time.strftime('%Y-%m-%d')}, {host}: {bench.world}, {auto.cpus()} CPUs, "
             f"torch {torch.__version__}", f"demand: {m.batch_rows / demand_s:,.0f} rows/s", *notes,
             f"to use it: --config config.yaml --config {path}"]  # fmt: skip
    with bench.world.together():
        if bench.world.is_first:
            write(path, lambda path: path.write_text(tune.overlay(lines, notes)))
    return "\n".join([*notes, f"{path}: {' '.join(_words(lines))}"])


def larger_batch(bench: Bench, step_s: float) -> tuple[dict[str, Any], float, list[str]]:
    """Double data.batch_rows as long as that gives a tenth more rows/s and memory lasts.

    Returns lines, seconds a step of as many rows as before, notes.
    """
    rows, lines, notes = bench.cfg.data.batch_rows, dict[str, Any](), list[str]()
    for times in BATCHES:
        word = f"data.batch_rows={rows * times}"
        try:
            now_s = Bench([*bench.words, word], bench.world, bench.seconds).compute_s / times
        except UserError as error:  # on every rank: not so much memory, or not so many rows
            notes.append(f"{word}: {error}")
            break
        notes.append(f"{word}: {rows / now_s:,.0f} rows/s trained")
        if now_s > 0.9 * step_s:
            break
        lines, step_s = {"data.batch_rows": rows * times}, now_s
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
    with clear_exit(launch), join(launch, config.dist.device, config.dist.timeout_s) as world:
        code = diagnose(words, world, options)
    raise SystemExit(code)
