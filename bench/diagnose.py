"""Is what diagnose.py says right, and what does watching a run cost?

python bench/diagnose.py          (--quick: one round; prints, and writes no page)

    causes       planted in a real feed in front of a simulated device (tests/tools/diagnose/simulated.py): which one
                 is named, which gain is predicted for its cure, and which gain the cure gives
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
from types import SimpleNamespace
from typing import Any

import h5py
import numpy as np
import project
import publish
import torch
from publish import spread

from fastgpu.diagnose.verdict import N_ROUNDS, Facts, judge
from fastgpu.feed import prefetch
from fastgpu.process.world import World
from fastgpu.telemetry.clock import Clock
from fastgpu.telemetry.monitor import Monitor, machine_counters
from fastgpu.telemetry.tensorboard import TensorBoard

sys.path.insert(0, str(Path(project.__file__).parents[1] / "tests/engine"))
sys.path.insert(0, str(Path(project.__file__).parents[1] / "tests/tools/diagnose"))
from harness import in_world, numbered
from simulated import BLOCK_ROWS, N_ROWS, PLANTED, Planted, Times, measure_simulated, measure_slow_second_rank, speed

ROUNDS = 3
LOADS = (0.5, 0.7, 0.9, 1.1, 1.3, 2, 4)
"""Supply / demand."""
STEP_S = 0.01
EVERY_STEPS = 50
WATCH_S = 20.0


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def name_cause(path: str, plan: Planted | None, rounds: int) -> dict[str, Any]:
    """{planted, cause, named: [cause], said: [gain], given: [gain]}. plan: None for one slow rank of two."""
    name, cause = (plan.name, plan.cause) if plan else ("one slow rank of two", "RANKS")
    row: dict[str, Any] = {"planted": name, "cause": cause, "named": [], "said": [], "given": []}
    for number in range(rounds):
        say(f"round {number + 1}: {name}")
        if plan:
            slow = measure_simulated(path, plan.times, n_rounds=N_ROUNDS)
            cured = measure_simulated(path, plan.cured)
            verdict = judge(slow, plan.facts, plan.tried)
        else:
            slow = in_world(2, measure_slow_second_rank, path, 0.03, N_ROUNDS)[0]
            cured = in_world(2, measure_slow_second_rank, path, 0.012)[0]
            verdict = judge(slow, Facts())
        row["named"].append(verdict.cause)
        row["said"].append(verdict.gain)
        row["given"].append(speed(cured) / speed(slow))
    return row


def ratios(path: str, loads: tuple[float, ...], rounds: int) -> list[dict[str, Any]]:
    """[{load, theory: [ratio], measured: [ratio]}]. In theory compute and supply alone decide the ratio."""
    rows: list[dict[str, Any]] = []
    for load in loads:
        say(f"feed ratio at {load}")
        times = Times(step_s=0.012, decode_s=0.012 / load - 0.0002)
        measured = [measure_simulated(path, times) for _ in range(rounds)]
        theory = [min(1.0, m.compute_s / m.supply_s) for m in measured if m.supply]
        rows.append({"load": load, "theory": theory, "measured": [m.feed_ratio.median for m in measured]})
    return rows


def watching(folder: Path, seconds: float) -> dict[str, float]:
    """Shares of the time of a run of steps of 10 ms, with a point every 50 steps, for so many seconds."""
    spent = {"loop": 0.0, "thread": 0.0}

    def timed(where: str, clock: Callable[[], float], function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            t0 = clock()
            found = function(*arguments)
            spent[where] += clock() - t0
            return found

        return run

    of_machine = machine_counters([])
    of_machine.read = timed("thread", time.thread_time, of_machine.read)  # type: ignore[method-assign]
    alone = World(0, 1, 1, torch.device("cpu"))
    watch, clock = Monitor(alone, of_machine), Clock(alone)
    log = TensorBoard(SimpleNamespace(folder=folder, config={"log.wandb": ""}, first_row=0, first_step=0), 10**9, alone)
    spent["thread"] = 0.0
    count = timed("loop", time.perf_counter, clock.count)
    advance = timed("loop", time.perf_counter, log.count)
    take = timed("loop", time.perf_counter, clock.take)
    scalars = timed("loop", time.perf_counter, log.write)
    counters = timed("loop", time.perf_counter, watch.take)
    pools = clock.timed(iter(int, 1))  # zeros without end
    steps = 0
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        before = time.perf_counter()
        next(pools)
        spent["loop"] += time.perf_counter() - before
        time.sleep(STEP_S)
        steps += 1
        count(64, 64)
        advance(64)
        if steps % EVERY_STEPS == 0:
            interval = take()
            scalars(steps, {"train/loss": 1.0, "train/lr": 0.1} | counters(), interval)
    passed_s = time.perf_counter() - t0
    log.__exit__(None)
    watch.close()
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
    parser.add_argument("--tiny", action="store_true", help="the first cause, one load and a short watch: does it run?")
    args = parser.parse_args()
    is_quick = args.quick or args.tiny
    rounds = 1 if is_quick else ROUNDS
    planted = PLANTED[:1] if args.tiny else [*PLANTED, None]
    loads = LOADS[:1] if args.tiny else LOADS
    prefetch.JOB_BYTES = 1  # a block is a job, however small the rows
    with tempfile.TemporaryDirectory() as name:
        path = str(Path(name) / "rows.h5")
        with h5py.File(path, "w") as file:
            file.create_dataset("images", data=numbered(N_ROWS, (1, 4, 2)), chunks=(BLOCK_ROWS, 1, 4, 2))
            file["labels"] = np.arange(N_ROWS) % 4
        watch_s = 2.0 if args.tiny else WATCH_S
        watched = [watching(Path(name) / str(number), watch_s) for number in range(rounds)]
        named = [name_cause(path, plan, rounds) for plan in planted]
        ratio = ratios(path, loads, rounds)
    off = [abs(given / said - 1) for row in named for said, given in zip(row["said"], row["given"], strict=True)]
    far = [abs(m / t - 1) for row in ratio for m, t in zip(row["measured"], row["theory"], strict=True)]
    right = sum(name == row["cause"] for row in named for name in row["named"])
    shares = [100 * (each["loop_share"] + each["thread_share"]) for each in watched]
    targets = [
        ["planted causes named right", f"{right} of {rounds * len(named)}", "all"],
        ["speed after the cure / predicted, farthest from 1", f"{100 * max(off):.0f} %", "<= 15 %"],
        ["feed ratio / theory at supply/demand 0.5-4, farthest from 1", f"{100 * max(far):.1f} %", "<= 3 %"],
        ["watching a run: share of its time (steps of 10 ms, no GPU)", spread(shares, ".2f", " %"), "< 1 %"],
    ]
    assert not [each for each in threading.enumerate() if each.name == "monitor"]
    tables = [
        publish.Table("targets", publish.TARGET_COLUMNS, targets),
        publish.Table(
            "Planted causes",
            ["planted", "named", "gain, predicted", "gain, given"],
            [
                [
                    row["planted"],
                    ", ".join(dict.fromkeys(row["named"])),
                    spread(row["said"], ".2f", "x"),
                    spread(row["given"], ".2f", "x"),
                ]
                for row in named
            ],
            f"Median of {rounds} rounds, least and most. The device and what is slow are simulated by sleeps; "
            "the feed (file, readers, pools) and the measurements are the project's own.",
        ),
        publish.Table(
            "Feed ratio",
            ["supply / demand, planted", "theory", "measured"],
            [[str(row["load"]), spread(row["theory"], ".3f"), spread(row["measured"], ".3f")] for row in ratio],
            "Theory: the lesser of 1 and compute's time / supply's, each measured alone.",
        ),
        publish.Table(
            "Watching",
            ["part", "measured"],
            [
                [
                    "clock and log in the loop, a step",
                    spread([1e6 * each["loop_s_a_step"] for each in watched], ".0f", " us"),
                ],
                [
                    "the same, share of steps of 10 ms",
                    spread([100 * each["loop_share"] for each in watched], ".2f", " %"),
                ],
                [
                    "the thread of the monitor, share of a CPU",
                    spread([100 * each["thread_share"] for each in watched], ".2f", " %"),
                ],
            ],
            f"A point every {EVERY_STEPS} steps, host counters only: there is no GPU here.",
        ),
    ]
    if is_quick:
        print(*(table.markdown() for table in tables), sep="\n")
    else:
        publish.write(
            "diagnose", tables, {"causes": named, "feed_ratio": ratio, "watching": watched}, "python bench/diagnose.py"
        )


if __name__ == "__main__":
    main()
