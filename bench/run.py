"""How fast do rows arrive? Measures this project, plain DataLoaders, the peers, and the limits of the machine.

python bench/run.py                      all modes; writes bench/results/loader_*.md
python bench/run.py --only warm cold     some modes
python bench/run.py --peers              the peer loaders, too (make bench-peers)

    warm         files in the page cache: rows/s, CPU seconds, memory
    accelerator  in front of a simulated device: which share of its speed is left, for seven lengths of a step
    cold         files not in the page cache: one epoch in a new process, compared with reading the file sequentially
    memory       host memory of the disk tier beyond its buffers

Each contender is a process of its own. In every round they are measured one after the other. Because the speed of a
machine drifts, ratios are taken within a round, and the median over the rounds is shown. Nothing here asserts a time.
"""

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import data
import project  # noqa: F401
import publish
import tables
from contenders import CONTENDERS, FIXED, H5PY, MEMMAP, OURS, RAM, SEQUENTIAL
from data import DataSpec
from peers import PEERS
from processes import PEERS_PYTHON, ContenderError, Process, kept_warm, make_cold, sequential_bytes_per_s

from fastgpu.feed.sizes import choose_readers
from fastgpu.process.machine import available_cpus

OPEN_S = 900
"""Maximum time to make a contender: a peer converts the file first."""
ANSWER_S = 60
"""Maximum time of an answer beyond the time of the measurement."""
LOADS = (2, 1.3, 1, 1 / 1.15, 0.67, 0.4, 0.2)
"""Demand of the simulated device / supply of our disk tier."""
EPOCHS = (1, 4, 12)
"""Numbers of epochs after which the memory is measured."""


class Times(NamedTuple):
    """Seconds of each measurement: (minimum, maximum)."""

    check_max: float = 3
    lead: tuple[float, float] = (0, 0.5)
    warm: tuple[float, float] = (1.5, 2)
    paced_lead: tuple[float, float] = (0.3, 0.3)
    paced: tuple[float, float] = (1.2, 1.2)
    cold: tuple[float, float] = (0, 20)


QUICK = Times(2, (0, 0.1), (0.1, 0.3), (0.05, 0.05), (0.1, 0.1), (0, 5))


class Run(NamedTuple):
    """What the command line asks for."""

    n_rounds: int
    n_workers: int
    names: frozenset[str]
    """Contenders that take part."""
    peers: tuple[str, ...]
    times: Times

    def select(self, names: Iterable[str]) -> list[str]:
        """The contenders among `names` that take part, then the peers."""
        return [name for name in names if name in self.names] + list(self.peers)

    def start(self, name: str, spec: DataSpec) -> Process:
        """Start the process of a contender. Raises ContenderError if the peers are not installed."""
        is_peer = name in PEERS
        if is_peer and not PEERS_PYTHON.exists():
            raise ContenderError("not installable: bench/.venv-peers is not there; make bench-peers makes it")
        return Process(name, spec, n_workers=self.n_workers, is_peer=is_peer)


class Lineup:
    """The contenders of one mode on one data set, started and checked. A contender that fails leaves, with a reason."""

    def __init__(self, run: Run, spec: DataSpec, names: Iterable[str], stack: ExitStack) -> None:
        """The processes end with `stack`."""
        self.results: dict[str, Any] = {}
        self.processes: dict[str, Process] = {}
        self._files: dict[str, list[str]] = {}
        max_s = run.times.check_max
        for name in names:
            with self._drop_if_failed(name):  # all start at once, because they spend most of the time on imports
                self.processes[name] = stack.enter_context(run.start(name, spec))
        for name in list(self.processes):
            say(f"{spec.name}: {name}: open and check")
            with self._drop_if_failed(name):
                self._files[name] = self.processes[name].ask("files", OPEN_S)["files"]
                self.results[name] = {"rounds": []}
                if name != FIXED:  # the fixed batch has no rows of the file
                    self.results[name] |= self.processes[name].ask("check", max_s + ANSWER_S, max_s=max_s)

    @contextmanager
    def _drop_if_failed(self, name: str) -> Iterator[None]:
        try:
            yield
        except ContenderError as failure:
            say(f"{name}: {failure}")
            self.results[name] = {"failed": str(failure)}
            if process := self.processes.pop(name, None):
                process.close(0)

    def measure(
        self, name: str, lead_s: tuple[float, float], span_s: tuple[float, float], step_s: float = 0.0
    ) -> dict[str, float] | None:
        """The result of `worker.run`, or None if the contender has left."""
        if name in self.processes:
            timeout_s = lead_s[1] + span_s[1] + ANSWER_S
            with self._drop_if_failed(name), kept_warm(self._files[name]):
                return self.processes[name].ask("run", timeout_s, lead_s=lead_s, span_s=span_s, step_s=step_s)
        return None


def measure_warm(run: Run, spec: DataSpec) -> dict[str, Any]:
    """{contender: {"rounds": [results of worker.run]} or {"failed": reason}}"""
    with ExitStack() as stack:
        lineup = Lineup(run, spec, run.select(name for name in CONTENDERS if name != FIXED), stack)
        for number in range(run.n_rounds):
            for name in list(lineup.processes):
                result = lineup.measure(name, run.times.lead, run.times.warm)
                if result:
                    lineup.results[name]["rounds"].append(result | speed(result, spec))
                    say(f"{spec.name}, warm, round {number + 1}: {name}: {rows_per_s(result):,.0f} rows/s")
    return lineup.results


def measure_accelerator(run: Run, spec: DataSpec) -> dict[str, Any]:
    """{contender: {"rounds": [{"supply": rows/s of our disk tier in this round, "2.00": rows/s at this load, ...}]}}"""
    with ExitStack() as stack:
        lineup = Lineup(run, spec, run.select((OURS, FIXED, H5PY, RAM)), stack)
        for number in range(run.n_rounds):
            result = lineup.measure(OURS, run.times.lead, run.times.warm)
            if not result:
                break
            supply = rows_per_s(result)
            speeds: dict[str, dict[str, float]] = {name: {"supply": supply} for name in lineup.processes}
            for load in LOADS:
                step_s = spec.batch_size / (load * supply)
                say(f"{spec.name}, accelerator, round {number + 1}: a step takes {1000 * step_s:.2f} ms")
                for name in list(lineup.processes):
                    result = lineup.measure(name, run.times.paced_lead, run.times.paced, step_s)
                    if result:
                        speeds[name][f"{load:.2f}"] = rows_per_s(result)
            for name in lineup.processes:
                lineup.results[name]["rounds"].append(speeds[name])
    return lineup.results


def measure_cold(run: Run, spec: DataSpec) -> dict[str, Any]:
    """Like `measure_warm`. "cached" is the share of the files that could not be evicted before."""
    names = run.select((OURS, H5PY, MEMMAP))
    results: dict[str, Any] = {name: {"rounds": []} for name in (SEQUENTIAL, *names)}
    for number in range(run.n_rounds):
        cached = make_cold([spec.h5])
        bytes_per_s = sequential_bytes_per_s(spec.h5)
        results[SEQUENTIAL]["rounds"].append({"bytes_per_s": bytes_per_s, "cached": cached})
        for name in names:
            if "failed" in results[name]:
                continue
            try:
                with run.start(name, spec) as process:
                    cached = make_cold(process.ask("files", OPEN_S)["files"])
                    span_s = run.times.cold
                    result = process.ask("run", 2 * span_s[1] + ANSWER_S, lead_s=None, span_s=span_s, step_s=0)
            except ContenderError as failure:
                say(f"{name}: {failure}")
                results[name] = {"failed": str(failure)}
                continue
            results[name]["rounds"].append(result | speed(result, spec) | {"cached": cached})
            say(f"{spec.name}, cold, round {number + 1}: {name}: {rows_per_s(result):,.0f} rows/s")
    return results


def measure_memory(run: Run, spec: DataSpec) -> dict[str, Any]:
    """Memory of our disk tier: {"epochs": {"4": bytes after 4 epochs}, "imports": bytes, "buffers": bytes}."""
    say(f"{spec.name}: memory")
    try:
        with run.start(OURS, spec) as process:
            before = process.ask("memory", OPEN_S)
            bytes_after: dict[str, int] = {}
            n_done = 0
            for n_epochs in EPOCHS:
                while n_done < n_epochs:
                    process.ask("run", OPEN_S, lead_s=None, span_s=(0, OPEN_S), step_s=0)
                    n_done += 1
                bytes_after[str(n_epochs)] = process.ask("memory", ANSWER_S)["now"]
    except ContenderError as failure:
        return {"failed": str(failure)}
    return {"epochs": bytes_after, "imports": before["imports"], "buffers": before["buffers"]}


MODES = {
    "warm": measure_warm,
    "accelerator": measure_accelerator,
    "cold": measure_cold,
    "memory": measure_memory,
}
ALL_DATA_MODES = ("warm", "memory")
"""Modes that measure every data set. The others measure the large images only."""


def rows_per_s(result: Mapping[str, float]) -> float:
    return result["rows"] / result["seconds"]


def speed(result: Mapping[str, float], spec: DataSpec) -> dict[str, float]:
    return {"bytes_per_s": spec.row_bytes * rows_per_s(result)}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--peers", nargs="*", choices=PEERS, metavar="PEER", help="these peers, or all if none is named"
    )
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="tiny data and times: a test of the benchmark itself")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so no process is left behind
    peers = () if args.peers is None else tuple(args.peers or PEERS)
    times = QUICK if args.quick else Times()
    run = Run(args.rounds, available_cpus(), frozenset(args.contenders), peers, times)
    results: dict[str, Any] = {mode: {} for mode in MODES}
    results |= {"workers": run.n_workers, "readers": choose_readers("auto", 1), "data": {}}
    for spec in data.QUICK if args.quick else data.FULL:
        say(f"{spec.name}: {spec.n_rows:,} rows of {spec.row_bytes:,} bytes")
        data.make(spec)
        results["data"][spec.name] = spec._asdict() | {"row_bytes": spec.row_bytes}
        for mode, measure in MODES.items():
            if mode in args.only and (mode in ALL_DATA_MODES or spec.name == "celeba"):
                results[mode][spec.name] = measure(run, spec)
    is_whole = not args.quick and set(args.only) == set(MODES) and set(args.contenders) == set(CONTENDERS)
    what = "loader" if is_whole else "loader-part"  # never overwrites the page of a whole run
    publish.write(what, tables.tables(results), results, "python bench/run.py " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
