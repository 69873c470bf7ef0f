"""Kill training runs at random moments, start them again, and compare their ends with a run that nobody touched.

    make soak                              200 runs, about an hour
    python tests/faults/soak.py --runs 8   a short form

Each run is `torchrun --max-restarts` with two CPU ranks. One or two faults meet it, at moments drawn from its whole
duration: while it starts, trains, validates, saves, or ends. Whenever it ends without being done, it is started again.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

PROJECT = Path(__file__).parents[2] / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests" / "fastgpu")]

from harness import write_minimal  # noqa: E402 (found by the line above)

RANKS = 2
MAX_STARTS = 8
"""A run that is not done after so many starts has failed."""
END_S = 120
"""A process that has been told to end, and does not, has failed."""
ORPHAN_S = 10
SETTINGS = ["run.resume=auto", "run.checkpoint_every_steps=7", "train.epochs=6", "data.echo=2.5", "log.every_steps=10"]


@dataclass
class Outcome:
    """What became of one run."""

    faults: list[str] = field(default_factory=list)
    starts: int = 0
    done: bool = False
    equal: bool = False
    orphans: int = 0
    leftovers: list[str] = field(default_factory=list)
    last_words: str = ""


def processes_of(run: str) -> list[psutil.Process]:
    """All processes with the name of the run on their command line: torchrun and its ranks."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        is_alive = process.info["status"] != psutil.STATUS_ZOMBIE
        if is_alive and f"run.name={run}" in (process.info["cmdline"] or []):
            found.append(process)
    return found


def ranks_of(run: str) -> list[psutil.Process]:
    return [process for process in processes_of(run) if "torch.distributed.run" not in process.cmdline()]


def to_launcher(number: signal.Signals) -> Callable[[str, subprocess.Popen[str], random.Random], None]:
    return lambda run, launcher, rng: launcher.send_signal(number)


def to_a_rank(number: signal.Signals) -> Callable[[str, subprocess.Popen[str], random.Random], None]:
    def send(run: str, launcher: subprocess.Popen[str], rng: random.Random) -> None:
        ranks = ranks_of(run)
        if ranks:
            rng.choice(ranks).send_signal(number)

    return send


def to_all(run: str, launcher: subprocess.Popen[str], rng: random.Random) -> None:
    for process in processes_of(run):
        process.kill()


FAULTS = {
    "kill a rank": to_a_rank(signal.SIGKILL),
    "kill torchrun": to_launcher(signal.SIGKILL),
    "kill all": to_all,
    "SIGTERM to torchrun": to_launcher(signal.SIGTERM),
    "SIGINT to torchrun": to_launcher(signal.SIGINT),
    "SIGUSR1 to torchrun": to_launcher(signal.SIGUSR1),
    "SIGTERM to a rank": to_a_rank(signal.SIGTERM),
    "SIGUSR1 to a rank": to_a_rank(signal.SIGUSR1),
}


def start(folder: Path, run: str) -> subprocess.Popen[str]:
    """torchrun in `folder`, with its output in <run>.log."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
    command = [sys.executable, *launcher, str(PROJECT / "train.py"), f"run.name={run}", *SETTINGS]
    with (folder / f"{run}.log").open("a") as log:
        return subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True
        )


def result_of(folder: Path, run: str) -> str:
    """SHA-256 over the weights and the optimizer of the last checkpoint; "" if there is none."""
    saved = sorted(folder.glob(f"runs/{run}/checkpoints/last-*"))
    if not saved:
        return ""
    return hashlib.sha256((saved[-1] / "model.pt").read_bytes() + (saved[-1] / "step.pt").read_bytes()).hexdigest()


def is_done(folder: Path, run: str) -> bool:
    return "\ndone: epoch" in (folder / f"{run}.log").read_text()


def soak(folder: Path, run: str, duration_s: float, expected: str) -> Outcome:
    """One run with one or two faults, drawn by its name."""
    rng = random.Random(run)
    outcome = Outcome()
    n_faults = rng.choice((1, 1, 2))
    while outcome.starts < MAX_STARTS and not outcome.done:
        launcher = start(folder, run)
        outcome.starts += 1
        if len(outcome.faults) < n_faults:
            try:
                launcher.wait(rng.uniform(0, duration_s))
            except subprocess.TimeoutExpired:
                name = rng.choice(list(FAULTS))
                FAULTS[name](run, launcher, rng)
                outcome.faults.append(name)
        try:
            launcher.wait(END_S + duration_s)
        except subprocess.TimeoutExpired:
            outcome.last_words = "did not end"
            to_all(run, launcher, rng)
            launcher.wait()
            break
        outcome.done = is_done(folder, run)
    until = time.monotonic() + ORPHAN_S
    while processes_of(run) and time.monotonic() < until:
        time.sleep(0.2)
    outcome.orphans = len(processes_of(run))
    outcome.leftovers = [path.name for path in folder.glob(f"runs/{run}/**/*partial*")]
    outcome.equal = outcome.done and result_of(folder, run) == expected
    if not outcome.equal and not outcome.last_words:
        outcome.last_words = (folder / f"{run}.log").read_text()[-400:]
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every outcome here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        folder = Path(name)
        write_minimal(folder)
        before = time.monotonic()
        start(folder, "untouched").wait()
        duration_s = time.monotonic() - before
        expected = result_of(folder, "untouched")
        if not is_done(folder, "untouched"):
            print((folder / "untouched.log").read_text())
            return 1
        print(f"a run that nobody touches takes {duration_s:.1f} s")
        outcomes = []
        for number in range(args.runs):
            outcome = soak(folder, f"soak{args.seed}-{number}", duration_s, expected)
            outcomes.append(outcome)
            print(f"{number}: {asdict(outcome)}" if not outcome.equal else f"{number}: {outcome.faults}", flush=True)
    good = [each for each in outcomes if each.equal and not each.orphans and not each.leftovers]
    starts = sum(each.starts for each in outcomes)
    print(
        f"{len(outcomes)} runs, {sum(len(each.faults) for each in outcomes)} faults, {starts} starts: "
        f"{sum(each.done for each in outcomes)} done, {sum(each.equal for each in outcomes)} bitwise equal, "
        f"{sum(each.orphans for each in outcomes)} orphans, {sum(len(each.leftovers) for each in outcomes)} leftovers"
    )
    if args.json:
        args.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1) + "\n")
    return int(len(good) < len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
