"""How fast do rows come? This project, plain DataLoaders, the peers, and the limits of the machine.

python bench/run.py                      all modes; bench/results/loader_*.md
python bench/run.py --only warm cold     some
python bench/run.py --peers              the peer loaders too (make bench-peers)

    warm         files in the page cache: rows/s, CPU seconds, memory
    accelerator  in front of a device that takes T ms a batch: how much of its speed is left, for seven T
    cold         files not in the page cache: one epoch in a fresh process, against reading the file through
    memory       host memory of the disk tier beyond the buffers that were asked for

Every contender is a process of its own; one is measured at a time, in turn, in each of several rounds. Ratios are taken
within a round, as the machine's speed drifts, and the median of them is given. Nothing here asserts a time.
"""

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import data
import project  # noqa: F401
import report
import tables
from contenders import CONTENDERS, FIXED, H5PY, MEMMAP, OURS, RAM, SEQUENTIAL
from fastgpu.feed import sizes as auto
from fastgpu.process import machine
from peers import PEERS
from processes import PEERS_PYTHON, ContenderError, Process, kept_warm, make_cold, sequential_bytes_per_s

MODES = ("warm", "accelerator", "cold", "memory")
OPEN_S, ANSWER_S = 900, 60  # how long a contender may take to be made (peers convert the file), and beyond a measure
LOADS = (2, 1.3, 1, 1 / 1.15, 0.67, 0.4, 0.2)  # demand of the device / supply of our disk tier
EPOCHS = (1, 4, 12)  # after which memory is measured


class Times(NamedTuple):
    """Seconds of one measure: (at least, at most)."""

    check_cap: float = 3
    lead: tuple[float, float] = (0, 0.5)
    warm: tuple[float, float] = (1.5, 2)
    paced_lead: tuple[float, float] = (0.3, 0.3)
    paced: tuple[float, float] = (1.2, 1.2)
    cold: tuple[float, float] = (0, 20)


QUICK = Times(2, (0, 0.1), (0.1, 0.3), (0.05, 0.05), (0.1, 0.1), (0, 5))


class Run(NamedTuple):
    """What was asked for."""

    rounds: int
    workers: int
    names: frozenset[str]
    peers: tuple[str, ...]
    times: Times

    def among(self, names: Iterable[str]) -> list[str]:
        """Those of them that take part, then the peers."""
        return [name for name in names if name in self.names] + list(self.peers)

    def process(self, name: str, rows: data.Rows) -> Process:
        if name in PEERS and not PEERS_PYTHON.exists():
            raise ContenderError("not installable: bench/.venv-peers is not there; make bench-peers makes it")
        return Process(name, rows, self.workers, name in PEERS)


class Field:
    """The contenders of a mode on one data set, all started and checked; those that fail leave, with the reason."""

    def __init__(self, run: Run, rows: data.Rows, names: Iterable[str], stack: ExitStack) -> None:
        self.found: dict[str, Any] = {}
        self.processes: dict[str, Process] = {}
        self._files: dict[str, list[str]] = {}
        cap_s = run.times.check_cap
        for name in names:
            with self._or_leaves(name):  # started all at once: most of it is imports
                self.processes[name] = stack.enter_context(run.process(name, rows))
        for name in list(self.processes):
            say(f"{rows.name}: {name}: open and check")
            with self._or_leaves(name):
                self._files[name] = self.processes[name].ask("files", OPEN_S)["files"]
                self.found[name] = {"rounds": []}
                if name != FIXED:  # its rows are nobody's
                    self.found[name] |= self.processes[name].ask("check", cap_s + ANSWER_S, cap_s=cap_s)

    @contextmanager
    def _or_leaves(self, name: str) -> Iterator[None]:
        try:
            yield
        except ContenderError as failure:
            say(f"{name}: {failure}")
            self.found[name] = {"failed": str(failure)}
            if process := self.processes.pop(name, None):
                process.close(0)

    def measure(
        self, name: str, lead_s: tuple[float, float], span_s: tuple[float, float], step_s: float = 0.0
    ) -> dict[str, float] | None:
        """What `worker.run` found, or None if the contender has left."""
        if name in self.processes:
            wait_s = lead_s[1] + span_s[1] + ANSWER_S
            with self._or_leaves(name), kept_warm(self._files[name]):
                return self.processes[name].ask("run", wait_s, lead_s=lead_s, span_s=span_s, step_s=step_s)
        return None


def warm(run: Run, rows: data.Rows) -> dict[str, Any]:
    """{contender: {"rounds": [what worker.run found]} or {"failed": why}}"""
    with ExitStack() as stack:
        field = Field(run, rows, run.among(name for name in CONTENDERS if name != FIXED), stack)
        for number in range(run.rounds):
            for name in list(field.processes):
                if got := field.measure(name, run.times.lead, run.times.warm):
                    field.found[name]["rounds"].append(got | speed(got, rows))
                    say(f"{rows.name}, warm, round {number + 1}: {name}: {got['rows'] / got['seconds']:,.0f} rows/s")
    return field.found


def accelerator(run: Run, rows: data.Rows) -> dict[str, Any]:
    """{contender: {"rounds": [{"supply": rows/s of our disk tier in this round, "2.00": rows/s at that load, ...}]}}"""
    with ExitStack() as stack:
        field = Field(run, rows, run.among((OURS, FIXED, H5PY, RAM)), stack)
        for number in range(run.rounds):
            got = field.measure(OURS, run.times.lead, run.times.warm)
            if not got:
                break
            supply = got["rows"] / got["seconds"]
            speeds: dict[str, dict[str, float]] = {name: {"supply": supply} for name in field.processes}
            for load in LOADS:
                step_s = rows.batch_size / (load * supply)
                say(f"{rows.name}, accelerator, round {number + 1}: a step takes {1000 * step_s:.2f} ms")
                for name in list(field.processes):
                    if got := field.measure(name, run.times.paced_lead, run.times.paced, step_s):
                        speeds[name][f"{load:.2f}"] = got["rows"] / got["seconds"]
            for name in field.processes:
                field.found[name]["rounds"].append(speeds[name])
    return field.found


def cold(run: Run, rows: data.Rows) -> dict[str, Any]:
    """As `warm`; "cached" is the part of the files that could not be evicted before."""
    found: dict[str, Any] = {name: {"rounds": []} for name in (SEQUENTIAL, *run.among((OURS, H5PY, MEMMAP)))}
    for number in range(run.rounds):
        cached = make_cold([rows.h5])
        got: dict[str, float] = {"bytes_per_s": sequential_bytes_per_s(rows.h5), "cached": cached}
        found[SEQUENTIAL]["rounds"].append(got)
        for name in [name for name in found if name != SEQUENTIAL and "failed" not in found[name]]:
            try:
                with run.process(name, rows) as process:
                    cached = make_cold(process.ask("files", OPEN_S)["files"])
                    span_s = run.times.cold
                    got = process.ask("run", 2 * span_s[1] + ANSWER_S, lead_s=None, span_s=span_s, step_s=0)
            except ContenderError as failure:
                say(f"{name}: {failure}")
                found[name] = {"failed": str(failure)}
                continue
            found[name]["rounds"].append(got | speed(got, rows) | {"cached": cached})
            say(f"{rows.name}, cold, round {number + 1}: {name}: {got['rows'] / got['seconds']:,.0f} rows/s")
    return found


def memory(run: Run, rows: data.Rows) -> dict[str, Any]:
    """Of our disk tier: {"epochs": {"5": bytes after as many}, "imports": bytes, "buffers": bytes}."""
    say(f"{rows.name}: memory")
    try:
        with run.process(OURS, rows) as process:
            found, after, done = process.ask("memory", OPEN_S), dict[str, int](), 0
            for epochs in EPOCHS:
                while done < epochs:
                    process.ask("run", OPEN_S, lead_s=None, span_s=(0, OPEN_S), step_s=0)
                    done += 1
                after[str(epochs)] = process.ask("memory", ANSWER_S)["now"]
    except ContenderError as failure:
        return {"failed": str(failure)}
    return {"epochs": after, "imports": found["imports"], "buffers": found["buffers"]}


def speed(got: Mapping[str, float], rows: data.Rows) -> dict[str, float]:
    return {"bytes_per_s": rows.row_bytes * got["rows"] / got["seconds"]}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODES, default=MODES, metavar="MODE")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", nargs="*", choices=PEERS, metavar="PEER", help="these, or all if none is named")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=CONTENDERS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="tiny data and times: a test of the benchmark itself")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # an exception, so that no process is left behind
    chosen = () if asked.peers is None else tuple(asked.peers or PEERS)
    run = Run(
        asked.rounds,
        machine.available_cpus(),
        frozenset(asked.contenders),
        chosen,
        QUICK if asked.quick else Times(),
    )
    found: dict[str, Any] = {mode: {} for mode in MODES} | {
        "workers": run.workers,
        "readers": auto.choose_readers("auto", 1),
    }
    for rows in data.QUICK if asked.quick else data.FULL:
        say(f"{rows.name}: {rows.rows:,} rows of {rows.row_bytes:,} bytes")
        data.make(rows)
        found.setdefault("data", {})[rows.name] = rows._asdict() | {"row_bytes": rows.row_bytes}
        for mode, measure in zip(MODES, (warm, accelerator, cold, memory), strict=True):
            if mode in asked.only and (mode in ("warm", "memory") or rows.name == "celeba"):
                found[mode][rows.name] = measure(run, rows)
    whole = not asked.quick and set(asked.only) == set(MODES) and set(asked.contenders) == set(CONTENDERS)
    what = "loader" if whole else "loader-part"  # never in the place of a whole run's page
    report.write(what, tables.tables(found), found, "python bench/run.py " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
