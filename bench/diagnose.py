"""Is what diagnose.py says right, and what does watching a run cost?

python bench/diagnose.py          (--quick: one round; prints, and writes no page)

    causes       planted in a real feed in front of a simulated device (tests/simulated.py): which one is named, what
                 its cure is said to give, and what it gives
    feed ratio   measured there, against theory, over supply / demand 0.5 to 4
    watching     time that clock, log and monitor take of a training run: in its loop, and of a CPU beside it
"""

import argparse
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import project
import report
import torch
from fastgpu.diagnose.verdict import Facts, judge
from fastgpu.feed import prefetch
from fastgpu.telemetry import monitor as monitor_module
from fastgpu.telemetry.clock import Clock
from fastgpu.telemetry.log import Log
from fastgpu.telemetry.monitor import Monitor

sys.path.insert(0, str(Path(project.__file__).parents[1] / "{{cookiecutter.project_slug}}" / "tests"))
from conftest import in_world, numbered
from simulated import BLOCK, PLANTED, ROWS, seen, slow_second_rank, speed

ROUNDS = 3
LOADS = (0.5, 0.7, 0.9, 1.1, 1.3, 2, 4)  # supply / demand
STEP_S, EVERY_STEPS, WATCH_S = 0.01, 50, 20.0


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def causes(path: str, rounds: int) -> list[dict[str, Any]]:
    """[{planted, named: [cause], said: [gain], given: [gain]}]"""
    found = []
    for planted in PLANTED:
        row: dict[str, Any] = {"planted": planted.name, "cause": planted.cause, "named": [], "said": [], "given": []}
        for number in range(rounds):
            say(f"round {number + 1}: {planted.name}")
            slow = seen(path, **planted.slow)
            verdict = judge(slow, planted.facts, planted.tried)
            row["named"].append(verdict.cause)
            row["said"].append(verdict.gain)
            row["given"].append(speed(seen(path, **planted.cured)) / speed(slow))
        found.append(row)
    row = {"planted": "one slow rank of two", "cause": "STRAGGLER", "named": [], "said": [], "given": []}
    for number in range(rounds):
        say(f"round {number + 1}: {row['planted']}")
        slow, cured = (in_world(2, slow_second_rank, path, seconds)[0] for seconds in (0.03, 0.012))
        verdict = judge(slow, Facts())
        row["named"].append(verdict.cause)
        row["said"].append(verdict.gain)
        row["given"].append(speed(cured) / speed(slow))
    return [*found, row]


def ratios(path: str, rounds: int) -> list[dict[str, Any]]:
    """[{load, theory: [...], measured: [...]}], theory: what compute and supply alone allow."""
    found: list[dict[str, Any]] = []
    for load in LOADS:
        say(f"feed ratio at {load}")
        of = [seen(path, 0.012, decode_s=0.012 / load - 0.0002) for _ in range(rounds)]
        theory = [min(1.0, m.compute.step_s / m.supply.step_s) for m in of if m.supply]
        found.append({"load": load, "theory": theory, "measured": [m.feed_ratio.step_s for m in of]})
    return found


def watching(folder: Path) -> dict[str, float]:
    """Shares of the time of a run of steps of 10 ms, with a point every 50 steps."""
    spent = {"loop": 0.0, "thread": 0.0}

    def timed(where: str, clock: Callable[[], float], function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            t0 = clock()
            found = function(*arguments)
            spent[where] += clock() - t0
            return found

        return run

    poll = monitor_module.Monitor._poll
    monitor_module.Monitor._poll = timed("thread", time.thread_time, poll)  # type: ignore[method-assign]
    watch, clock = Monitor([]), Clock(torch.device("cpu"))
    log = Log(folder, 10**9)
    spent["thread"] = 0.0
    count, lap = timed("loop", time.perf_counter, clock.count), timed("loop", time.perf_counter, clock.lap)
    scalars = timed("loop", time.perf_counter, log.scalars)
    counters = timed("loop", time.perf_counter, watch.scalars)
    pools, steps, t0 = clock.waits(iter(int, 1)), 0, time.perf_counter()
    while time.perf_counter() - t0 < WATCH_S:
        before = time.perf_counter()
        next(pools)
        spent["loop"] += time.perf_counter() - before
        time.sleep(STEP_S)
        steps += 1
        count(64, 64)
        if steps % EVERY_STEPS == 0:
            scalars(steps, {"train/loss": 1.0, "train/lr": 0.1} | lap().scalars() | counters(1000.0))
    passed_s = time.perf_counter() - t0
    log.finish({}, {})
    watch.close()
    monitor_module.Monitor._poll = poll  # type: ignore[method-assign]
    return {
        "steps": steps,
        "seconds": passed_s,
        "loop_s_a_step": spent["loop"] / steps,
        "loop_share": spent["loop"] / passed_s,
        "thread_share": spent["thread"] / passed_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round; prints, and writes no page")
    quick = parser.parse_args().quick
    rounds = 1 if quick else ROUNDS
    prefetch.JOB_BYTES = 1  # a block is a job, however small the rows
    with tempfile.TemporaryDirectory() as name:
        path = str(Path(name) / "rows.h5")
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=numbered(ROWS, (1, 4, 2)), chunks=(BLOCK, 1, 4, 2))
            file["labels"] = np.arange(ROWS) % 4
        watched = [watching(Path(name) / str(number)) for number in range(rounds)]
        named, ratio = causes(path, rounds), ratios(path, rounds)
    off = [abs(given / said - 1) for row in named for said, given in zip(row["said"], row["given"], strict=True)]
    far = [abs(m / t - 1) for row in ratio for m, t in zip(row["measured"], row["theory"], strict=True)]
    right = sum(name == row["cause"] for row in named for name in row["named"])
    shares = [100 * (each["loop_share"] + each["thread_share"]) for each in watched]
    targets = [
        ["planted causes named right", f"{right} of {rounds * len(named)}", "all"],
        ["speed after the cure / predicted, farthest from 1", f"{100 * max(off):.0f} %", "<= 15 %"],
        ["feed ratio / theory at supply/demand 0.5-4, farthest from 1", f"{100 * max(far):.1f} %", "<= 3 %"],
        ["watching a run: share of its time (steps of 10 ms, no GPU)", _spread(shares, ".2f", " %"), "< 1 %"],
    ]
    assert not [each for each in threading.enumerate() if each.name == "monitor"]
    tables = [
        report.Table("targets", ["what", "measured", "must / aim"], targets),
        report.Table(
            "Planted causes",
            ["planted", "named", "gain, predicted", "gain, given"],
            [
                [
                    row["planted"],
                    ", ".join(dict.fromkeys(row["named"])),
                    _spread(row["said"], ".2f", "x"),
                    _spread(row["given"], ".2f", "x"),
                ]
                for row in named
            ],
            f"Median of {rounds} rounds, least and most. The device and what is slow are simulated by sleeps; "
            "the feed (file, readers, pools) and the measurements are the project's own.",
        ),
        report.Table(
            "Feed ratio",
            ["supply / demand, planted", "theory", "measured"],
            [[str(row["load"]), _spread(row["theory"], ".3f"), _spread(row["measured"], ".3f")] for row in ratio],
            "Theory: the lesser of 1 and compute's time / supply's, each measured alone.",
        ),
        report.Table(
            "Watching",
            ["part", "measured"],
            [
                [
                    "clock and log in the loop, a step",
                    _spread([1e6 * each["loop_s_a_step"] for each in watched], ".0f", " us"),
                ],
                [
                    "the same, share of steps of 10 ms",
                    _spread([100 * each["loop_share"] for each in watched], ".2f", " %"),
                ],
                [
                    "the monitor's thread, share of a CPU",
                    _spread([100 * each["thread_share"] for each in watched], ".2f", " %"),
                ],
            ],
            f"A point every {EVERY_STEPS} steps, host counters only: there is no GPU here.",
        ),
    ]
    if quick:
        print(*(table.markdown() for table in tables), sep="\n")
    else:
        report.write(
            "diagnose", tables, {"causes": named, "feed_ratio": ratio, "watching": watched}, "python bench/diagnose.py"
        )


def _spread(values: list[float], form: str, unit: str = "") -> str:
    return f"{median(values):{form}}{unit} [{min(values):{form}}-{max(values):{form}}]"


if __name__ == "__main__":
    main()
