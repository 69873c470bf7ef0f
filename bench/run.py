"""How fast do rows arrive? Measures this project, the usual ways, other loaders, and the limits of the machine.

python bench/run.py                      rows of pixels; writes bench/results/loader_*.md
python bench/run.py encoded              JPEG files, decoded in each epoch, and converted
python bench/run.py layouts              what the layout of an HDF5 file costs
python bench/run.py idle                 the usual ways to load small images, and what a DataLoader's settings change
python bench/run.py recsys               sparse users, dense and sparse
python bench/run.py loader --peers       with the peer loaders, too, as encoded does (make bench-peers)

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
import layouts
import ours
import peers
import publish
import recsys
import tables
from data import DataSpec
from peers import FIXED, is_peer
from processes import Process, kept_warm, make_cold, read_through
from publish import FailedError, take_turns
from tables import rows_per_s

OPEN_S = 900
"""Maximum time to make a contender: a peer converts the file first."""
ANSWER_S = 60
"""Maximum time of an answer beyond the time of the measurement."""
LOADS = (2, 1.3, 1, 1 / 1.15, 0.67, 0.4, 0.2)
"""Demand of the simulated device / supply of our disk tier."""
Span = tuple[float, float]
"""(minimum, maximum) seconds. Between the two, a measurement ends with an epoch."""


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
    is_checked: bool = False
    """Whether the labels are row numbers, by which the rows that come are checked."""


SUITES = {
    "loader": Suite(
        [*contenders.CONTENDERS, *peers.PEERS],
        data.FULL,
        data.make,
        paced=(contenders.OURS, contenders.H5PY, contenders.RAM),
        cold=(contenders.OURS, contenders.H5PY, contenders.MEMMAP),
        is_checked=True,
    ),
    "encoded": Suite(
        list(jpegs.CONTENDERS),
        (DataSpec("500x375", 2_000, (3, 375, 500), 256), DataSpec("341x256", 2_000, (3, 256, 341), 256)),
        data.make_jpegs,
        paced=(jpegs.OURS, jpegs.PILLOW),
        cold=(jpegs.OURS, jpegs.PILLOW),
    ),
    "layouts": Suite(
        list(layouts.CONTENDERS),
        (DataSpec("celeba", 4_000, (3, 218, 178), 256), DataSpec("cifar", 60_000, (3, 32, 32), 1024)),
        data.make,
        cold=tuple(layouts.CONTENDERS),
        is_checked=True,
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
}


class Times(NamedTuple):
    """How long each measurement takes, and the lead-in before it."""

    check_max_s: float = 3
    lead: Span = (0, 1)
    warm: Span = (1.5, 4)
    paced: Span = (1.2, 1.2)
    cold: Span = (0, 20)


QUICK = Times(2, (0, 0.1), (0.1, 0.3), (0.1, 0.1), (0, 5))


class Run(NamedTuple):
    """What the command line asks for."""

    suite: Suite
    names: list[str]
    """Contenders that take part."""
    n_rounds: int
    times: Times

    def select(self, spec: DataSpec) -> list[str]:
        """The contenders of a data set."""
        return [name for name in self.names if ":" not in name or name.startswith(f"{spec.name}:")]


def start(name: str, spec: DataSpec) -> Process:
    """The process of a contender. Raises FailedError if the peers are not installed."""
    return Process(name, spec, n_workers=ours.CPUS, is_peer=is_peer(name))


class Lineup:
    """Contenders on one data set, started and checked. Those that cannot run are in `failed`, with a reason."""

    def __init__(self, run: Run, spec: DataSpec, names: list[str], stack: ExitStack) -> None:
        """The processes end with `stack`."""
        self.times = run.times
        self.processes: dict[str, Process] = {}
        self.files: dict[str, list[str]] = {}
        self.failed: dict[str, str] = {}
        for name in names:  # all start at once, because they spend most of the time on imports
            try:
                self.processes[name] = stack.enter_context(start(name, spec))
            except FailedError as failure:
                self.failed[name] = str(failure)
        for name, process in self.processes.items():
            try:
                self.files[name] = process.ask("files", OPEN_S)["files"]
                if run.suite.is_checked and name != FIXED:
                    process.ask("check", OPEN_S, max_s=run.times.check_max_s)
            except FailedError as failure:
                self.failed[name] = str(failure)
                process.close(0)

    def measure(self, name: str, span: Span, step_s: float = 0.0) -> dict[str, float]:
        """The result of `worker.run` on files in the page cache. Raises FailedError."""
        if name in self.failed:
            raise FailedError(self.failed[name])
        with kept_warm(self.files[name]):
            timeout_s = self.times.lead[1] + span[1] + ANSWER_S
            return self.processes[name].ask("run", timeout_s, lead_s=self.times.lead, span_s=span, step_s=step_s)


def measure_warm(run: Run, spec: DataSpec) -> dict[str, Any]:
    """{contender: results of worker.run, or why it failed}"""
    with ExitStack() as stack:
        names = run.select(spec)
        lineup = Lineup(run, spec, names, stack)
        ways = {name: partial(lineup.measure, name, run.times.warm) for name in names}
        return take_turns(f"{spec.name}, warm", ways, run.n_rounds)


def measure_accelerator(run: Run, spec: DataSpec) -> dict[str, Any]:
    """{load: {contender: results of worker.run, or why it failed}}"""
    with ExitStack() as stack:
        names = [FIXED, *run.suite.paced]
        lineup = Lineup(run, spec, names, stack)
        by_load = {}
        for load in LOADS:
            supply = rows_per_s(lineup.measure(run.suite.paced[0], run.times.warm))
            step_s = spec.batch_size / (load * supply)
            ways = {name: partial(lineup.measure, name, run.times.paced, step_s) for name in names}
            by_load[f"{load:.2f}"] = take_turns(f"{spec.name}, load {load:.2f}", ways, run.n_rounds)
        return by_load


def measure_cold(run: Run, spec: DataSpec) -> dict[str, Any]:
    """Like `measure_warm`. "cached" is the share of the files that could not be evicted before."""

    def sequential() -> dict[str, float]:
        cached = make_cold([spec.h5])
        return {"rows": spec.n_rows, "seconds": read_through(spec.h5), "cpu_s": 0, "cached": cached}

    def measure(name: str) -> dict[str, float]:
        with start(name, spec) as process:
            cached = make_cold(process.ask("files", OPEN_S)["files"])
            span = run.times.cold
            result = process.ask("run", 2 * span[1] + ANSWER_S, lead_s=None, span_s=span, step_s=0)
            return {**result, "cached": cached}

    names = [name for name in run.names if name in run.suite.cold or is_peer(name)]
    ways = {name: partial(measure, name) for name in names}
    return take_turns(f"{spec.name}, cold", {tables.SEQUENTIAL: sequential, **ways}, run.n_rounds)


MODES = {"warm": measure_warm, "accelerator": measure_accelerator, "cold": measure_cold}


def main() -> None:
    parser = publish.parser(__doc__)
    parser.add_argument("suite", choices=SUITES, nargs="?", default="loader")
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--peers", action="store_true", help="the peers, too")
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="these only")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so no process is left behind
    suite = SUITES[args.suite]
    names = args.contenders or [name for name in suite.names if args.peers or not is_peer(name)]
    run = Run(suite, names, args.rounds, QUICK if args.quick else Times())
    specs = tuple(spec.small() for spec in suite.specs) if args.quick else suite.specs
    results: dict[str, Any] = {"data": {spec.name: spec._asdict() for spec in specs}, **{mode: {} for mode in MODES}}
    for spec in specs:
        suite.make(spec)
        if "warm" in args.only and run.select(spec):
            results["warm"][spec.name] = measure_warm(run, spec)
    if "accelerator" in args.only and suite.paced:
        results["accelerator"][specs[0].name] = measure_accelerator(run, specs[0])
    if "cold" in args.only and suite.cold:
        results["cold"][specs[0].name] = measure_cold(run, specs[0])
    is_whole = not args.contenders and args.only == list(MODES)
    what = args.suite if is_whole else f"{args.suite}-part"  # a part replaces no whole page
    publish.write_result(what, tables.tables(args.suite, results), results, args)


if __name__ == "__main__":
    main()
