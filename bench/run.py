"""How fast do rows arrive? Measures this project, the usual ways, other loaders, and the limits of the machine.

python bench/run.py [loader | encoded | layouts | idle | recsys | windows] [--peers]

    warm         files in the page cache: rows/s and CPU seconds
    accelerator  in front of a simulated device: which share of its speed is left, for seven lengths of a step
    cold         files not in the page cache: one epoch in a new process, compared with reading the file sequentially

Each contender is a process of its own. In every round they are measured one after the other. Because the speed of a
machine drifts, ratios are taken within a round, and the median over the rounds is shown.
"""

import signal
import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import contenders
import data
import idle
import jpegs
import ours
import peers
import publish
import recsys
import tables
import windows
from data import DataSpec
from peers import FIXED, is_peer
from processes import Process, kept_warm, make_cold, read_through
from publish import take_turns

LOADS = (2, 1.3, 1, 1 / 1.15, 0.67, 0.4, 0.2)
"""Demand of the simulated device / supply of our disk tier."""
CHECK_S = 3
LEAD_S = (0, 1)
WARM_S = (1.5, 4)
PACED_S = (1.2, 1.2)
COLD_S = (0, 20)
"""(minimum, maximum) seconds of a measurement. Between the two, it ends with an epoch."""
QUICK_SHARE = 0.1
"""Share of these times that --quick takes."""


class Suite(NamedTuple):
    """What a page compares."""

    names: list[str]
    """Contenders, ours first. Those of one data set begin with its name and a colon."""
    specs: tuple[DataSpec, ...]
    make: Callable[[DataSpec], None]
    paced: tuple[str, ...] = ()
    """Contenders in front of the simulated device. The modes but `warm` measure the first data set only."""
    cold: tuple[str, ...] = ()
    """Contenders on files that are not in the page cache, and peers."""


SUITES = {
    "loader": Suite(
        [*contenders.LOADERS, *peers.LOADERS],
        (DataSpec("celeba", 10_000, (3, 218, 178), 256), DataSpec("cifar", 200_000, (3, 32, 32), 1024)),
        data.make,
        paced=(contenders.OURS, contenders.PLAIN_H5PY, contenders.H5PY_BATCHES, contenders.RAM_BATCHES),
        cold=(contenders.OURS, contenders.PLAIN_H5PY, contenders.H5PY_BATCHES),
    ),
    "encoded": Suite(
        list(jpegs.CONTENDERS),
        (DataSpec("500x375", 2_000, (3, 375, 500), 256), DataSpec("256x256", 4_000, (3, 256, 256), 256)),
        data.make_jpegs,
        paced=(jpegs.OURS, jpegs.PILLOW, jpegs.PILLOW_BATCHES, jpegs.SIMPLEJPEG_BATCHES),
        cold=(jpegs.OURS, jpegs.PILLOW, jpegs.PILLOW_BATCHES, jpegs.SIMPLEJPEG_BATCHES),
    ),
    "layouts": Suite(
        list(contenders.LAYOUTS),
        (DataSpec("celeba", 4_000, (3, 218, 178), 256), DataSpec("cifar", 60_000, (3, 32, 32), 1024)),
        data.make,
        cold=tuple(contenders.LAYOUTS),
    ),
    "idle": Suite(
        list(idle.CONTENDERS),
        (
            DataSpec("cifar", 50_000, (3, 32, 32), 256),
            *(DataSpec(name, 10_000, (1, 48, 48), 256) for name in ("faces", "waiting", "uneven")),
        ),
        data.make,
    ),
    "recsys": Suite(
        list(recsys.CONTENDERS),
        tuple(DataSpec(name, 136_677, (20_108,), 500) for name in ("feed", "step")),
        data.make_users,
    ),
    "windows": Suite(
        list(windows.CONTENDERS),
        (DataSpec("4 KiB", 131_072, (2048,), 64), DataSpec("1 MiB", 512, (16_384, 16), 16)),
        windows.make,
    ),
}


class Run(NamedTuple):
    """What the command line asks for."""

    suite: Suite
    names: list[str]
    """Contenders that take part."""
    n_rounds: int
    time_share: float

    def seconds(self, *span: float) -> list[float]:
        return [self.time_share * seconds for seconds in span]


class Lineup(ExitStack):
    """Contenders on one data set. Each is started and checked when it is measured for the first time."""

    def __init__(self, run: Run, spec: DataSpec) -> None:
        super().__init__()
        self.run = run
        self.spec = spec
        self.started: dict[str, tuple[Process, list[str]]] = {}

    def measure(self, name: str, span_s: tuple[float, float], step_s: float = 0.0) -> dict[str, float]:
        """The result of `worker.run` on files in the page cache. Raises FailedError."""
        if name not in self.started:
            process = self.enter_context(Process(name, self.spec, ours.CPUS))
            files = process.ask("files")["files"]
            if name in contenders.CONTENDERS or name in peers.LOADERS:  # labels are row numbers
                process.ask("check", max_s=CHECK_S)
            self.started[name] = process, files
        process, files = self.started[name]
        with kept_warm(files):
            lead_s, span_s = self.run.seconds(*LEAD_S), self.run.seconds(*span_s)
            return process.ask("run", lead_s=lead_s, span_s=span_s, step_s=step_s)


def measure_warm(run: Run, spec: DataSpec) -> dict[str, Any]:
    """{contender: results of worker.run, or why it failed}"""
    names = [name for name in run.names if ":" not in name or name.startswith(f"{spec.name}:")]
    with Lineup(run, spec) as lineup:
        ways = {name: partial(lineup.measure, name, WARM_S) for name in names}
        return take_turns(f"{spec.name}, warm", ways, run.n_rounds)


def measure_accelerator(run: Run, spec: DataSpec) -> dict[str, Any]:
    """{load: {contender: results of worker.run, or why it failed}}"""
    by_load = {}
    with Lineup(run, spec) as lineup:
        for load in LOADS:
            supply = lineup.measure(run.suite.paced[0], WARM_S)
            step_s = spec.batch_size / (load * supply["rows"] / supply["seconds"])
            ways = {name: partial(lineup.measure, name, PACED_S, step_s) for name in (FIXED, *run.suite.paced)}
            by_load[f"{load:.2f}"] = take_turns(f"{spec.name}, load {load:.2f}", ways, run.n_rounds)
    return by_load


def measure_cold(run: Run, spec: DataSpec) -> dict[str, Any]:
    """Like `measure_warm`. "cached" is the share of the files that could not be evicted before."""

    def sequential() -> dict[str, float]:
        cached = make_cold([spec.h5])
        return {"rows": spec.n_rows, "seconds": read_through(spec.h5), "cpu_s": 0, "cached": cached}

    def measure(name: str) -> dict[str, float]:
        with Process(name, spec, ours.CPUS) as process:
            cached = make_cold(process.ask("files")["files"])
            return process.ask("run", lead_s=None, span_s=run.seconds(*COLD_S), step_s=0) | {"cached": cached}

    names = [name for name in run.names if name in run.suite.cold or is_peer(name)]
    ways = {name: partial(measure, name) for name in names}
    return take_turns(f"{spec.name}, cold", {tables.SEQUENTIAL: sequential, **ways}, run.n_rounds)


def main() -> None:
    parser = publish.parser(__doc__)
    parser.add_argument("suite", choices=SUITES, nargs="?", default="loader")
    parser.add_argument("--peers", action="store_true", help="the peers, too")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so no process is left behind
    suite = SUITES[args.suite]
    names = [name for name in suite.names if args.peers or not is_peer(name)]
    run = Run(suite, names, args.rounds, QUICK_SHARE if args.quick else 1)
    specs = [spec.small() if args.quick else spec for spec in suite.specs]
    results: dict[str, Any] = {"data": {}, "warm": {}, "accelerator": {}, "cold": {}}
    for spec in specs:
        suite.make(spec)
        results["data"][spec.name] = spec._asdict()
        results["warm"][spec.name] = measure_warm(run, spec)
    first = specs[0]
    if suite.paced:
        results["accelerator"][first.name] = measure_accelerator(run, first)
    if suite.cold:
        results["cold"][first.name] = measure_cold(run, first)
    publish.write_result(args.suite, tables.tables(args.suite, results), results, args)


if __name__ == "__main__":
    main()
