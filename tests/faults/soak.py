"""Let signals meet training runs, start them again, and compare their ends with a run that nobody touched.

    make soak                                               200 runs, about an hour
    python tests/faults/soak.py --runs 20                   a short form
    python tests/faults/soak.py --only kills --runs 80      about 100 kills of ranks, of the launcher, and of the tree
    python tests/faults/soak.py --only signals --runs 80    about 100 signals that ask for a stop, which alone save

Of four runs, two are `torchrun --max-restarts` with two CPU ranks, one is a plain process, and one has two ranks and
reads a Dataset through a worker process. One or two signals meet a run while it starts, trains, validates or saves.
Whenever it ends without being done, it is started again.

A signal that asks for a stop must leave stopped.json with a step, and a checkpoint of this very step, unless no step
was done. No process may be left 5 s after the end. The log of a run with a problem is kept.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch.utils._pytree import tree_flatten

HERE = Path(__file__).parent
PROJECT = HERE.parents[1] / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(HERE.parent)]

from support.ranks import copy_project
from support.runs import step_of, write_minimal

MAX_STARTS = 8  # after which a run must be done
END_S = 120  # in which a process must end that has been told to
ORPHAN_S = 5  # in which all processes must end after their launcher
PHASES = ("starting", "training", "validating", "saving")
SETTINGS = [
    *("workload=planted", "run.resume=auto", "train.epochs=6", "data.echo=2.5"),
    *("log.every_steps=10", "dist.timeout_s=20", "loader.timeout_s=10"),
]
KINDS = {"ranks": [], "process": [], "dataset": ["data.dataset=workloads.planted:Rows", "loader.num_workers=1"]}
"""{kind of run: its settings}"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
TORCHRUN += ["--max-restarts=1", "--signals-to-handle=SIGTERM,SIGINT,SIGUSR2"]


class Run:
    """A run in a folder of its own, whose name is that of the run."""

    def __init__(self, folder: Path, kind: str, settings: list[str]):
        self.folder = folder
        self.kind = kind
        self.rng = random.Random(folder.name)
        self.words = [f"run.name={folder.name}", *settings, *KINDS[kind]]
        self.n_starts = 0
        self.faults: list[str] = []
        self.n_saved = 0  # signals that have left a checkpoint of their step
        self.problems: list[str] = []
        self.start_s = self.train_s = 0.0  # to the first step, and from there to the last checkpoint
        folder.mkdir()
        write_minimal(folder, n_val_rows=2000)

    def start(self) -> None:
        (self.folder / "phase").write_text("starting")
        self.n_starts += 1
        command = [sys.executable, *([] if self.kind == "process" else TORCHRUN), "../train.py", *self.words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self.folder / "log").open("a") as file:
            self.launcher = subprocess.Popen(command, cwd=self.folder, stdout=file, stderr=file, env=environment)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def is_done(self) -> bool:
        return "\ndone: epoch" in self.log

    @property
    def phase(self) -> str:
        if any(self.folder.glob("runs/*/checkpoints/.*partial*")):
            return "saving"
        return (self.folder / "phase").read_text()

    @property
    def ranks(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(self.launcher.pid)
            return [launcher] if self.kind == "process" else launcher.children()
        return []

    @property
    def checkpoints(self) -> list[Path]:
        return sorted(self.folder.glob("runs/*/checkpoints/last-*"))

    @property
    def result(self) -> str:
        """SHA-256 over every bit of the weights and the optimizer of the last checkpoint.

        Not over its files: they also tell which equal numbers were one object of Python.
        """
        digest = hashlib.sha256()
        for path in sorted(self.checkpoints[-1].glob("*.pt")):
            values, structure = tree_flatten(torch.load(path, weights_only=True))
            digest.update(repr(structure).encode())
            for value in values:
                is_tensor = isinstance(value, torch.Tensor)
                digest.update(value.numpy().tobytes() if is_tensor else repr(value).encode())
        return digest.hexdigest()

    def processes(self) -> list[psutil.Process]:
        """All processes with the name of the run on their command line: torchrun, its ranks, and their workers."""
        living = [each for each in psutil.process_iter(["cmdline", "status"]) if each.info["status"] != "zombie"]
        return [each for each in living if self.words[0] in (each.info["cmdline"] or [])]

    def wait_for(self, phase: str, seconds: float) -> None:
        """Wait for this phase, but not after the end of the run."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.launcher.poll() is None and self.phase != phase:
            time.sleep(0.001)


# ---------------------------------------------------------------------------------------------- faults


FAULTS = {
    "SIGKILL to a rank": 5,
    "SIGKILL to torchrun": 4,
    "SIGKILL to all": 4,
    "SIGTERM to torchrun": 2,
    "SIGINT to torchrun": 2,
    "SIGUSR2 to torchrun": 1,
    "SIGTERM to a rank": 2,
    "SIGUSR2 to a rank": 1,
    "SIGSTOP to a rank": 1,
}
"""{fault: weight}"""
STOPS = ("SIGTERM", "SIGINT", "SIGUSR2")
ONLY = {"kills": ("SIGKILL",), "signals": STOPS}


def inflict(run: Run, name: str) -> None:
    number = signal.Signals[name.split()[0]]
    if name.endswith("torchrun"):
        run.launcher.send_signal(number)
        return
    for process in run.processes() if name.endswith("all") else run.rng.sample(run.ranks, min(1, len(run.ranks))):
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def meet(run: Run, name: str, usual: Run) -> None:
    """Let a fault meet the run at a moment of a phase, both drawn."""
    phase = run.rng.choice(PHASES)
    if phase == "starting":
        while not run.ranks and run.launcher.poll() is None:
            time.sleep(0.01)
        time.sleep(run.rng.uniform(0, usual.start_s))
    else:
        run.wait_for("training", END_S)
        time.sleep(run.rng.uniform(0, usual.train_s))
        run.wait_for(phase, usual.train_s)
    if run.launcher.poll() is not None:
        return
    met_at = run.phase
    run.faults.append(f"{name} while {met_at}")
    inflict(run, name)
    if name.startswith(STOPS):
        run.launcher.wait(END_S)
        if problem := wrong_answer(run, name, met_at):
            run.problems.append(f"{run.faults[-1]}: {problem}: {run.log[-300:]}")


def wrong_answer(run: Run, fault: str, met_at: str) -> str:
    """What is wrong with the answer to a signal that asks for a stop; empty if nothing is."""
    marker = run.folder / "runs" / run.folder.name / "stopped.json"
    code = run.launcher.returncode
    if not marker.exists():
        return "" if run.is_done or met_at == "starting" else f"the step was not saved, exit code {code}"
    step = json.loads(marker.read_text())["step"]
    if step not in map(step_of, run.checkpoints):
        return f"stopped at step {step}, which is not saved"
    run.n_saved += 1
    number = signal.Signals[fault.split()[0]]
    is_told = run.kind != "process" or code in (128 + number, -number)  # a shell says 128 to both
    return "" if is_told else f"exit code {code}"


def soak(run: Run, usual: Run, names: list[str]) -> None:
    """A run with one or two of these faults, drawn by its name. Notes what is wrong with it."""
    if run.kind == "process":  # it has no torchrun, and may be stopped, as by Ctrl-Z
        names = [name for name in names if "torchrun" not in name and name != "SIGSTOP to a rank"]
    faults = run.rng.choices(names, [FAULTS[name] for name in names], k=run.rng.choice((1, 1, 2)))
    with ThreadPoolExecutor() as watchers:  # beside the next start, which orphans must not disturb
        watched = []
        try:
            while run.n_starts < MAX_STARTS and not (run.n_starts and run.is_done):
                run.start()
                if faults:
                    meet(run, faults.pop(), usual)
                run.launcher.wait(END_S + usual.start_s + usual.train_s)
                watched.append(watchers.submit(psutil.wait_procs, run.processes(), ORPHAN_S))
        except subprocess.TimeoutExpired:
            run.problems.append("did not end")
            inflict(run, "SIGKILL to all")
            run.launcher.wait()
    if orphans := [process for watch in watched for process in watch.result()[1]]:
        run.problems.append(f"{len(orphans)} processes were left after {ORPHAN_S} s")
    inflict(run, "SIGKILL to all")
    if leftovers := [path.name for path in run.folder.glob("runs/**/*partial*")]:
        run.problems.append(f"files are left: {leftovers}")
    if not run.is_done or run.result != usual.result:
        run.problems.append(f"another end than that of a run without faults: {run.log[-600:]}")


# ---------------------------------------------------------------------------------------------- all runs


def untouched(base: Path, kind: str, settings: list[str]) -> Run:
    """A run without faults."""
    run = Run(base / f"untouched-{kind}", kind, settings)
    began_at = time.time()
    run.start()
    run.wait_for("training", END_S)
    stepped_at = time.time()
    run.launcher.wait()
    if not run.is_done:
        sys.exit(f"error: a run without faults fails: {run.log}")
    run.start_s = stepped_at - began_at
    run.train_s = run.checkpoints[-1].stat().st_mtime - stepped_at
    return run


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--only", choices=ONLY, help="kills, or signals that ask for a stop")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    names = [name for name in FAULTS if not args.only or name.startswith(ONLY[args.only])]
    settings = SETTINGS if args.only == "signals" else [*SETTINGS, "run.checkpoint_every_steps=7"]
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        base = copy_project(Path(name))
        shutil.copyfile(HERE / "planted.py", base / "workloads" / "planted.py")
        usual = {kind: untouched(base, kind, settings) for kind in KINDS}

        def try_run(number: int) -> Run:
            kind = ("ranks", "process", "ranks", "dataset")[number % 4]
            run = Run(base / f"soak-{number}", kind, settings)
            soak(run, usual[kind], names)
            print(f"{number}: {kind}, {run.n_starts} starts, {run.faults}: {run.problems or 'equal'}", flush=True)
            if run.problems:
                shutil.copyfile(run.folder / "log", Path(tempfile.gettempdir()) / f"{run.folder.name}.log")
            return run

        with ThreadPoolExecutor(args.jobs) as pool:
            runs = list(pool.map(try_run, range(args.runs)))
    met = Counter(fault for run in runs for fault in run.faults)
    for fault, times in sorted(met.items()):
        print(f"{times:4}  {fault}")
    n_kills, n_signals = (sum(met[each] for each in met if each.startswith(ONLY[kind])) for kind in ONLY)
    n_saved = sum(run.n_saved for run in runs)
    n_good = sum(not run.problems for run in runs)
    print(
        f"{n_kills} kills of ranks, launcher and tree; {n_signals} signals, of which {n_saved} saved a step in training"
    )
    print(f"{n_good} of {len(runs)} runs end bitwise equal to one without faults, with nothing left after {ORPHAN_S} s")
    return int(n_good < len(runs))


if __name__ == "__main__":
    sys.exit(main())
