"""Send signals to runs at random moments, continue those that stopped, and compare their ends with an untouched run.

    python tests/faults/signals.py --runs 100

A signal goes to a plain process, to one of two ranks, or to their torchrun, while the run starts, or at any moment from
its first step to its end: it trains, validates or saves then. What must follow:

    SIGTERM, SIGINT, SIGUSR2    stopped.json names a step, a checkpoint of this very step is there, and the continued
                                run ends with the same weights; or the run ends before it trains, or was over
    SIGUSR1                     a checkpoint is written, and the run goes on to the same weights; torchrun dies of it,
                                and its ranks stop
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from soak import END_S, ORPHAN_S, PROJECT, is_done, processes_of, ranks_of, result_of, to_all, write_minimal

EPOCHS = 12
STEPS_PER_EPOCH = 42
SETTINGS = [f"train.epochs={EPOCHS}", "data.echo=2", "data.pool_batches=7", "run.resume=auto", "log.every_steps=1"]
TORCHRUN = ["--standalone", "--nproc-per-node=2", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR2"]
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2, signal.SIGUSR1)
TARGETS = ("process", "rank", "torchrun")


def start(folder: Path, run: str, *, alone: bool) -> subprocess.Popen[str]:
    """A run in `folder`, with its output in <run>.log."""
    launcher = [] if alone else ["-m", "torch.distributed.run", *TORCHRUN]
    command = [sys.executable, *launcher, str(PROJECT / "train.py"), f"run.name={run}", *SETTINGS]
    with (folder / f"{run}.log").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True
        )


def saved_steps(folder: Path, run: str) -> set[int]:
    names = [path.name for path in folder.glob(f"runs/{run}/checkpoints/last-*")]
    return {int(name.removeprefix("last-")) for name in names if "partial" not in name}


def has_started(folder: Path, run: str) -> bool:
    return "at step 0" in (folder / f"{run}.log").read_text()


def wait_for_step(folder: Path, run: str, step: int, process: subprocess.Popen[str]) -> None:
    """Wait until a run has logged this step. The run goes on meanwhile, so the moment of the return is a random one."""
    metrics = folder / "runs" / run / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text().count("train/loss") >= step):
        time.sleep(0.005)


def run_untouched(folder: Path, run: str, *, alone: bool) -> float:
    """A run that nobody touches. Returns the seconds to its first step."""
    t0 = time.monotonic()
    process = start(folder, run, alone=alone)
    wait_for_step(folder, run, 1, process)
    to_start_s = time.monotonic() - t0
    process.wait()
    assert is_done(folder, run), (folder / f"{run}.log").read_text()
    return to_start_s


def end(folder: Path, run: str, process: subprocess.Popen[str]) -> set[int]:
    """Wait for the end of a run. Returns the steps of the checkpoints that were seen meanwhile."""
    seen: set[int] = set()
    deadline = time.monotonic() + END_S
    while process.poll() is None:
        seen |= saved_steps(folder, run)
        time.sleep(0.01)
        if time.monotonic() > deadline:
            to_all(run, process, random.Random())
            process.wait()
            raise AssertionError("did not end")
    deadline = time.monotonic() + ORPHAN_S
    while processes_of(run) and time.monotonic() < deadline:
        time.sleep(0.1)
    if processes_of(run):
        to_all(run, process, random.Random())
        raise AssertionError("left processes behind")
    return seen | saved_steps(folder, run)


def try_signal(folder: Path, run: str, to_start_s: dict[bool, float], expected: dict[bool, str]) -> str:
    """Send one signal to one run, both drawn by its name. Returns what came of it. Raises AssertionError."""
    rng = random.Random(run)
    target, number, phase = rng.choice(TARGETS), rng.choice(SIGNALS), rng.choice(("starting", "later", "later"))
    alone = target == "process"
    process = start(folder, run, alone=alone)
    if phase == "starting":
        time.sleep(rng.uniform(0, to_start_s[alone]))
    else:
        wait_for_step(folder, run, rng.randrange(EPOCHS * STEPS_PER_EPOCH), process)
    phase = "training" if has_started(folder, run) else "starting"
    if target == "rank":
        while not (ranks := ranks_of(run)) and process.poll() is None:
            time.sleep(0.01)
        if ranks:
            rng.choice(ranks).send_signal(number)
    else:
        process.send_signal(number)
    steps = end(folder, run, process)
    label = f"{number.name} to {target}, {phase}"
    marker = folder / "runs" / run / "stopped.json"
    if marker.exists():
        step = json.loads(marker.read_text())["step"]
        assert max(steps) == step, f"{label}: stopped at step {step}, checkpoints {steps}"
        assert process.returncode == 128 + number or not alone, f"{label}: exit code {process.returncode}"
        outcome = "stopped with a checkpoint of its step"
    elif is_done(folder, run):
        is_saved = any(step % STEPS_PER_EPOCH for step in steps)
        outcome = "saved and went on" if is_saved else "was at the end of an epoch, or before or after all steps"
    else:
        assert phase == "starting", f"{label}: no checkpoint, exit code {process.returncode}"
        outcome = "ended before it trained"
    if not is_done(folder, run):
        end(folder, run, start(folder, run, alone=alone))
    assert is_done(folder, run), f"{label}: {outcome}, but could not be continued"
    assert not marker.exists(), f"{label}: stopped.json is still there"
    assert result_of(folder, run) == expected[alone], f"{label}: {outcome}, but ends with other weights"
    return f"{label}: {outcome}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    outcomes = []
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores it, and so would its runs
    with tempfile.TemporaryDirectory(prefix="signals-") as name:
        folder = Path(name)
        write_minimal(folder)
        to_start_s = {alone: run_untouched(folder, f"untouched-{alone}", alone=alone) for alone in (True, False)}
        expected = {alone: result_of(folder, f"untouched-{alone}") for alone in (True, False)}
        print(
            f"seconds to the first step: {to_start_s[True]:.1f} alone, {to_start_s[False]:.1f} with two ranks",
            flush=True,
        )
        failures = 0
        for number in range(args.runs):
            run = f"signal{args.seed}-{number}"
            try:
                outcomes.append(try_signal(folder, run, to_start_s, expected))
                print(f"{number}: {outcomes[-1]}", flush=True)
            except AssertionError as error:
                failures += 1
                print(f"{number}: FAILED {error}\n{(folder / f'{run}.log').read_text()[-2000:]}", flush=True)
    for outcome, count in sorted(Counter(outcome.partition(": ")[2] for outcome in outcomes).items()):
        print(f"{count:4d}  {outcome}")
    print(f"{failures:4d}  FAILED")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
