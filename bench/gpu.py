"""Does the GPU wait for data? Trains networks on rows from each tier, and the same loop on one batch that stays there.

python bench/gpu.py                              all parts, some minutes
python bench/gpu.py --parts copy CIFAR-10        these parts only
python bench/gpu.py --device cpu --out FOLDER    the same code on tiny rows: does it run?

The result is written after each part. A part that fails leaves the others to be measured.

    copy      the copy from host to device, and a large matrix product: what the GPU could do
    a case    rows from the page cache, the disk, host memory and the device, and those of two DataLoaders, one tuned
              and one with its defaults, all in front of the same step; see gpu_cases.py

train.build makes what is measured, and the loop is that of train.py: batches, the transform of the workload, the step,
and the clock. A round measures each contender for some seconds. Before that, it takes as many unmeasured steps as were
prepared ahead while the others were measured.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, repeat
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import project  # noqa: F401
import publish
import torch
from gpu_cases import CASES, PREFETCH_FACTOR, TINY_CASES, Case
from processes import kept_warm, make_cold
from torch.utils.flop_counter import FlopCounterMode
from train import Parts, build, train_step

import workloads
from fastgpu.feed.tiers import Feed
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from fastgpu.telemetry.clock import Clock
from fastgpu.telemetry.monitor import Monitor

FOLDER = Path(__file__).parent / "data" / "gpu"
LR = 1e-3
COPY_BYTES = 256 << 20
MATRIX_SIDE = 8192
N_REPEATS = 20
LEAD_S = 1.0
"""Time of the same work before a measurement: the clocks rise, and NVML's watts are the mean of the last second."""
MAX_LEADS = 3
"""The work before a measurement takes at most so many times as long as the measurement."""
POLL_S = 0.2
"""Time between two reads of the GPU's counters."""
FIXED = "a batch that stays on the device"
COLD = "disk tier, cold"
TIERS = {"disk tier": "disk", "host tier": "host", "device tier": "device"}
"""{contender: data.tier}"""
TUNED = "DataLoader, tuned"
NAIVE = "DataLoader, defaults"
CONTENDERS = (FIXED, *TIERS, COLD, TUNED, NAIVE)
COUNTERS = {"gpu0/util_pct": "GPU-Util %", "gpu0/sm_active_pct": "SMs active %", "gpu0/power_w": "W"}
FEED_RATIO = 0.99
"""The feed ratio that must be reached."""
WAIT_PCT = 1.0
"""The data wait that must not be exceeded."""

LEGEND = """Above: the worst of the warm tiers of each case. In all tables: median [minimum to maximum] of the rounds.
The feed ratio is taken within a round. Data wait is measured by events on the device. MFU: relative to the matrix
product at the end of this page. Cold: the file is dropped from the page cache before each epoch. Tuned: workers on all
CPUs, prefetch_factor 4, pinned memory, non_blocking copies."""

Batches = Iterable[Rows]


class Effort(NamedTuple):
    """How long each contender is measured."""

    rounds: int
    seconds: float
    """Of one contender in one round."""


class Round(NamedTuple):
    """One contender in one round."""

    steps_per_s: float
    wait_pct: float
    counters: dict[str, float]
    """Means of what the driver counts; empty without a GPU."""


class Measured(NamedTuple):
    """One contender."""

    rounds: list[Round]
    note: str
    """The error that stopped the loop in the sync debug mode, or why there is no such contender."""


# ---------------------------------------------------------------------------------------------- loops


def loop(pools: Iterable[Batches], clock: Clock, parts: Parts, rng: torch.Generator) -> Iterator[None]:
    """The loop of train.py, which stops after each step."""
    for batches in clock.timed(pools):
        for batch in batches:
            train_step(parts, parts.workload.transform(batch, rng), LR)
            clock.count(len(batch), len(batch))
            yield


def endless(feed: Feed, batch_size: int, before_epoch: Callable[[], object]) -> Iterator[Batches]:
    """The batches of each pool, epoch after epoch."""
    for epoch in count():
        before_epoch()
        for pool in feed.pools(epoch):
            yield pool.rows.batches(batch_size)


def find_sync(steps: Iterator[None], n_steps: int) -> str:
    """The first operation in so many steps that makes the host wait for the device: the first line of its error, and
    where it was called."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(n_steps):
            next(steps)
    except RuntimeError as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        first_line, _, _ = str(error).partition("\n")
        return f"{first_line} ({Path(place.filename).name}:{place.lineno})"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CaseBench:
    """The contenders of a case, in front of one model."""

    def __init__(self, case: Case, device: torch.device):
        self.case = case
        self.device = device
        world = World(rank=0, world_size=1, local_world_size=1, device=device)
        self.clock = Clock(world)
        self.rng = torch.Generator(device).manual_seed(0)
        self.results = {name: Measured([], "") for name in CONTENDERS}
        self.feeds: dict[str, Feed] = {}
        for name, tier in {**TIERS, COLD: "disk"}.items():
            config = load_config(["--config", str(case.config), f"data.tier={tier}"], workloads.find_options)
            try:
                parts = build(config, world)
            except UserError as error:  # such rows cannot be kept there
                self.results[name] = Measured([], str(error))
                continue
            parts.val_loader.close()
            self.feeds[name] = parts.loader
            if name == "disk tier":
                self.parts = parts
        self.batch_size = self.parts.sizes.batch_size
        first_pool = next(iter(self.feeds["disk tier"].pools(0))).rows
        self.fixed_batch = first_pool.take(torch.arange(self.batch_size))
        self.step_flops = self._count_flops()
        self.monitor = Monitor(world, poll_s=POLL_S)
        self.loops = {name: self.start(name) for name in CONTENDERS if not self.results[name].note}

    def close(self) -> None:
        self.monitor.close()
        self.loops.clear()  # ends the workers of DataLoaders
        for feed in self.feeds.values():
            feed.close()

    def start(self, name: str) -> Iterator[None]:
        """The steps of a contender."""
        pools: Iterator[Batches]
        if name == FIXED:
            pools = repeat([self.fixed_batch] * self.parts.sizes.pool_batches)
        elif name in self.feeds:
            evict = (lambda: make_cold([self.case.file])) if name == COLD else (lambda: None)
            pools = endless(self.feeds[name], self.batch_size, evict)
        else:
            pools = self.case.batches(self.batch_size, self.device, is_tuned=name == TUNED)
        return loop(pools, self.clock, self.parts, self.rng)

    def warm_up(self, name: str) -> None:
        """Take some steps, in which the allocator gets its memory and libraries choose their kernels; then look for
        operations that make the host wait."""
        n_steps = self.parts.sizes.pool_batches + 1
        for _ in range(min(n_steps, 30)):
            next(self.loops[name])
        if self.device.type != "cuda" or name in (TUNED, NAIVE):
            return
        if sync := find_sync(self.loops[name], n_steps):
            self.results[name] = Measured([], sync)
            self.loops[name] = self.start(name)  # the error has ended the loop

    def measure(self, name: str, seconds: float) -> None:
        """Whole steps for at least so many seconds, from idle device to idle device."""
        steps = self.loops[name]
        n_ahead = 0
        if name in self.feeds:
            n_ahead = (self.parts.config.loader.prefetch_pools + 1) * self.parts.sizes.pool_batches
        elif name == TUNED:
            n_ahead = available_cpus() * PREFETCH_FACTOR
        t0 = time.perf_counter()
        for n_steps in count(1):
            next(steps)
            lead_s = time.perf_counter() - t0
            if lead_s > MAX_LEADS * seconds or (lead_s > min(LEAD_S, seconds) and n_steps >= n_ahead):
                break
        wait_for(self.device)
        self.clock.restart()
        self.monitor.take()
        t0 = time.perf_counter()
        while time.perf_counter() - t0 < seconds:
            next(steps)
        wait_for(self.device)
        interval = self.clock.take()
        read = self.monitor.take()
        counters = {tag: read[tag] for tag in COUNTERS if tag in read}
        wait_pct = 100 * interval.wait_s / interval.seconds
        self.results[name].rounds.append(Round(interval.steps / interval.seconds, wait_pct, counters))
        say(f"  {name}: {interval}")

    def _count_flops(self) -> int:
        """Floating-point operations of a step, of its convolutions and matrix products."""
        with FlopCounterMode(display=False) as counter:
            train_step(self.parts, self.parts.workload.transform(self.fixed_batch, self.rng), LR)
        return counter.get_total_flops()


def measure_case(case: Case, device: torch.device, effort: Effort) -> dict[str, Any]:
    """JSON values: {"contenders": {name: Measured}, and what is known about the rows and the step}."""
    bench = CaseBench(case, device)
    try:
        for name in list(bench.loops):
            bench.warm_up(name)
        for number in range(effort.rounds):
            names = list(bench.loops)
            if number % 2:  # every other round backwards, so that a drift of the clock rates evens out
                names.reverse()
            for name in names:
                with kept_warm([case.file] if name == "disk tier" else []):
                    bench.measure(name, effort.seconds)
        return {
            "batch_size": bench.batch_size,
            "row_bytes": case.row_bytes,
            "step_flops": bench.step_flops,
            "precision": bench.parts.precision.name,
            "seconds": effort.seconds,
            "contenders": {
                name: {"rounds": [each._asdict() for each in measured.rounds], "note": measured.note}
                for name, measured in bench.results.items()
            },
        }
    finally:
        bench.close()


# ---------------------------------------------------------------------------------------------- the GPU alone


def measure_copy(device: torch.device) -> dict[str, Any]:
    """{"h2d_gb_per_s": [...], "matmul_tflop_per_s": [...]}: page-locked memory to the device, and a product in bf16."""
    if device.type != "cuda":
        return {}
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    a, b = (torch.randn(MATRIX_SIDE, MATRIX_SIDE, device=device, dtype=torch.bfloat16) for _ in range(2))
    copies_s = _events_s(lambda: target.copy_(source, non_blocking=True))
    products_s = _events_s(lambda: a @ b)
    return {
        "h2d_gb_per_s": [COPY_BYTES / 1e9 / seconds for seconds in copies_s],
        "matmul_tflop_per_s": [2 * MATRIX_SIDE**3 / 1e12 / seconds for seconds in products_s],
    }


def _events_s(work: Callable[[], object]) -> list[float]:
    """Seconds that the device needs, several times, after a lead-in."""
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < LEAD_S:
        _event_s(work)
    return [_event_s(work) for _ in range(N_REPEATS)]


def _event_s(work: Callable[[], object]) -> float:
    """Seconds that the device needs."""
    begin = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


# ---------------------------------------------------------------------------------------------- the page


def feed_ratios(contenders: dict[str, Any], name: str) -> list[float]:
    """Speed of a contender / speed of the fixed batch in each round."""
    speeds, fixed = ([each["steps_per_s"] for each in contenders[which]["rounds"]] for which in (name, FIXED))
    return publish.ratios(speeds, fixed)


def tables(parts: dict[str, Any]) -> list[publish.Table]:
    """The page, of those parts that were measured."""
    cases = {name: parts[name] for name in CASES if name in parts}
    page = [targets_table(cases)]
    matmul = parts.get("copy", {}).get("matmul_tflop_per_s", [])
    page += [_case_table(name, case, matmul) for name, case in cases.items()]
    if parts.get("copy"):
        cells = [publish.spread(parts["copy"]["h2d_gb_per_s"], ".1f"), publish.spread(matmul, ".0f")]
        note = (
            f"{N_REPEATS} copies of {COPY_BYTES >> 20} MiB from page-locked memory, and as many products of two bf16 "
            f"matrices of {MATRIX_SIDE} x {MATRIX_SIDE}, one at a time, while nothing else runs."
        )
        columns = ["host to device, GB/s", "matrix product, TFLOP/s"]
        page.append(publish.Table("the GPU alone", columns, [cells], note))
    return page


def targets_table(cases: dict[str, Any]) -> publish.Table:
    rows = []
    n_loops = 0
    syncs = []
    for name, case in cases.items():
        contenders = case["contenders"]
        measured = [tier for tier in TIERS if contenders[tier]["rounds"]]
        ratios = {tier: median(feed_ratios(contenders, tier)) for tier in measured}
        waits_pct = {tier: median(each["wait_pct"] for each in contenders[tier]["rounds"]) for tier in measured}
        worst = min(measured, key=ratios.__getitem__)
        longest = max(measured, key=waits_pct.__getitem__)
        rows.append([f"feed ratio, {name}", f"{ratios[worst]:.4f} ({worst})", f">= {FEED_RATIO}"])
        rows.append([f"data wait, {name}", f"{waits_pct[longest]:.2f} % ({longest})", f"<= {WAIT_PCT:g} %"])
        n_loops += len(measured)
        syncs += [tier for tier in measured if contenders[tier]["note"]]
    free = f"{n_loops - len(syncs)} of {n_loops}" if torch.cuda.is_available() else "not measured"
    rows.append(["warm loops without a host-device synchronisation", free, "all"])
    return publish.Table("targets", publish.TARGET_COLUMNS, rows, LEGEND)


def _case_table(name: str, case: dict[str, Any], matmul_tflop_per_s: Sequence[float]) -> publish.Table:
    columns = [
        "rows from",
        "rows/s",
        "feed ratio",
        "data wait %",
        *COUNTERS.values(),
        "J / 1,000 rows",
        "MFU %",
        "note",
    ]
    rows = []
    for contender, measured in case["contenders"].items():
        rounds = measured["rounds"]
        if not rounds:
            rows.append([contender, *["-"] * (len(columns) - 2), measured["note"]])
            continue
        steps_per_s = median(each["steps_per_s"] for each in rounds)
        rows_per_s = steps_per_s * case["batch_size"]
        cells = [f"{rows_per_s:,.0f}", publish.spread(feed_ratios(case["contenders"], contender), ".4f")]
        cells.append(publish.spread([each["wait_pct"] for each in rounds], ".2f"))
        for tag in COUNTERS:
            values = [each["counters"][tag] for each in rounds if tag in each["counters"]]
            cells.append(f"{median(values):.1f}" if values else "-")
        watts = [each["counters"]["gpu0/power_w"] for each in rounds if "gpu0/power_w" in each["counters"]]
        cells.append(f"{1000 * median(watts) / rows_per_s:.1f}" if watts else "-")
        tflop_per_s = case["step_flops"] * steps_per_s / 1e12
        cells.append(f"{100 * tflop_per_s / median(matmul_tflop_per_s):.1f}" if matmul_tflop_per_s else "-")
        rows.append([contender, *cells, measured["note"]])
    note = (
        f"Batch size {case['batch_size']}, {case['precision']}, mean size of a row {case['row_bytes']:,} bytes, "
        f"{case['step_flops'] / case['batch_size'] / 1e9:.2f} GFLOP a row; "
        f"{len(case['contenders'][FIXED]['rounds'])} rounds of {case['seconds']:g} s."
    )
    return publish.Table(name, columns, rows, note)


# ---------------------------------------------------------------------------------------------- all parts


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="feed ratio and data wait on a GPU")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="*", choices=["copy", *CASES], help="these parts only")
    parser.add_argument("--seconds", type=float, help="of one contender in one round (2)")
    parser.add_argument("--out", type=Path, default=publish.RESULTS, help="folder of the result (bench/results)")
    args = parser.parse_args()
    is_cpu = args.device == "cpu"
    if is_cpu and args.out == publish.RESULTS:
        sys.exit("error: --device cpu measures nothing that is worth publishing; name another folder with --out")
    if not is_cpu and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA device")
    device = torch.device("cpu") if is_cpu else torch.device("cuda", 0)
    effort = Effort(rounds=1, seconds=args.seconds or 0.1) if is_cpu else Effort(rounds=3, seconds=args.seconds or 2.0)
    folder = args.out / "gpu-data" if is_cpu else FOLDER
    folder.mkdir(parents=True, exist_ok=True)

    parts: dict[str, Any] = {}
    failed = []
    for name in args.parts or ["copy", *CASES]:
        say(f"{name}:")
        t0 = time.perf_counter()
        try:
            if name == "copy":
                parts[name] = measure_copy(device)
            else:
                parts[name] = measure_case((TINY_CASES if is_cpu else CASES)[name](folder), device, effort)
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        say(f"{name}: {time.perf_counter() - t0:.0f} s")
        publish.write("gpu", tables(parts), parts, "python bench/gpu.py", folder=args.out)
    if failed:
        sys.exit(f"error: not measured: {', '.join(failed)}; the errors are above")


if __name__ == "__main__":
    main()
