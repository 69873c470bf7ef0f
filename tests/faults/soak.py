"""Let faults meet training runs, start them again, and compare their ends with a run that nobody touched.

    make soak                              200 runs, about an hour, and a page in bench/results
    python tests/faults/soak.py --runs 8   a short form
    python tests/faults/soak.py --signals  signals only, and no checkpoints but those that they ask for

Of four runs, two are `torchrun --max-restarts` with two CPU ranks, one is a plain process, and one has two ranks and
reads a Dataset through a worker process. One or two faults meet a run while it starts, trains, validates or saves.
Whenever it ends without being done, it is started again.

A signal that asks for a stop must leave stopped.json with a step, and a checkpoint of this very step. The log of a run
with a problem is kept.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

HERE = Path(__file__).parent
PROJECT = HERE.parents[1] / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(HERE.parent / "engine"), str(HERE.parents[1] / "bench")]

import publish
from harness import copy_project, write_minimal

RANKS = 2
MAX_STARTS = 8
"""A run that is not done after so many starts has failed."""
END_S = 120
"""A process that has been told to end, and does not, has failed."""
ORPHAN_S = 10
PHASES = ("starting", "training", "validating", "saving", "ending")
SETTINGS = [
    *("workload=planted", "run.resume=auto", "train.epochs=6", "data.echo=2.5"),
    *("log.every_steps=10", "dist.timeout_s=20", "loader.timeout_s=10"),
]
MORE_CHECKPOINTS = ["run.checkpoint_every_steps=7"]
STEPS_PER_EPOCH = 52
KINDS = {
    "ranks": [],
    "process": [],
    "dataset": ["data.dataset=workloads.planted:Rows", "loader.num_workers=1"],
}
"""{kind of run: its settings}"""
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
TORCHRUN += ["--signals-to-handle=SIGTERM,SIGINT,SIGUSR2"]


@dataclass
class Outcome:
    """What became of one run."""

    faults: list[str] = field(default_factory=list)
    """`fault while phase`"""
    starts: int = 0
    done: bool = False
    equal: bool = False
    orphans: int = 0
    leftovers: list[str] = field(default_factory=list)
    first_step_s: list[float] = field(default_factory=list)
    """Seconds from each kill or later start to the first step after it."""
    answers: list[str] = field(default_factory=list)
    """`signal: what the run did`"""
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return self.equal and not (self.orphans or self.leftovers or self.problems)


class Untouched(NamedTuple):
    """A run without faults."""

    result: str
    start_s: float
    """Seconds to its first step."""
    train_s: float
    """Seconds from there to its last checkpoint."""

    def __str__(self) -> str:
        return f"{self.start_s:.1f} s to its first step and {self.train_s:.1f} s from there to its last checkpoint"


class Run:
    """A run in a folder of its own, whose name is that of the run."""

    def __init__(self, folder: Path, kind: str, settings: list[str]):
        self.folder = folder
        self.kind = kind
        self.rng = random.Random(folder.name)
        self.words = [f"run.name={folder.name}", *settings, *KINDS[kind]]
        self.outcome = Outcome()
        folder.mkdir()
        write_minimal(folder, n_val_rows=2000)

    def start(self) -> None:
        (self.folder / "phase").write_text("starting")
        self.outcome.starts += 1
        self.interrupted_at = time.time()
        self.launcher = self.launch("--max-restarts=1", "log")

    def launch(self, flag: str, log: str) -> subprocess.Popen[str]:
        command = [sys.executable, *([] if self.kind == "process" else [*TORCHRUN, flag])]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        with (self.folder / log).open("a") as file:
            return subprocess.Popen(
                [*command, "../train.py", *self.words],
                cwd=self.folder,
                stdout=file,
                stderr=file,
                env=environment,
                text=True,
            )

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def phase(self) -> str:
        if is_done(self):
            return "ending"
        is_saving = any(self.folder.glob("runs/*/checkpoints/.*partial*"))
        return "saving" if is_saving else (self.folder / "phase").read_text()

    @property
    def ranks(self) -> list[psutil.Process]:
        try:
            launcher = psutil.Process(self.launcher.pid)
            return [launcher] if self.kind == "process" else launcher.children()
        except psutil.NoSuchProcess:
            return []

    def steps_saved(self, since: float = 0.0) -> set[int]:
        """Steps of the checkpoints that were begun after this time."""
        saved = set()
        for path in self.folder.glob("runs/*/checkpoints/last-*"):
            with suppress(FileNotFoundError):  # it was removed meanwhile
                if path.stat().st_mtime >= since:
                    saved.add(json.loads((path / "state.json").read_text())["progress"]["step"])
        return saved

    def processes(self) -> list[psutil.Process]:
        """All processes with the name of the run on their command line: torchrun, its ranks, and their workers."""
        found = []
        for process in psutil.process_iter(["cmdline", "status"]):
            is_alive = process.info["status"] != psutil.STATUS_ZOMBIE
            if is_alive and self.words[0] in (process.info["cmdline"] or []):
                found.append(process)
        return found

    def wait_for(self, phase: str, seconds: float) -> bool:
        """Wait for this phase, but not after the end of the run. Returns whether it was met."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.launcher.poll() is None:
            if self.phase == phase:
                return True
            time.sleep(0.001)
        return False

    def result(self) -> str:
        """SHA-256 over the weights and the optimizer of the last checkpoint; "" if there is none."""
        saved = sorted(self.folder.glob("runs/*/checkpoints/last-*"))
        names = ("model.pt", "step.pt") if saved else ()
        return hashlib.sha256(b"".join((saved[-1] / name).read_bytes() for name in names)).hexdigest() if saved else ""

    def first_step_s(self) -> float | None:
        """Seconds from the last start, or kill, to the first step after it. None: there was none."""
        path = self.folder / "steps"
        times = [float(line) for line in path.read_text().splitlines()] if path.exists() else []
        return min((each - self.interrupted_at for each in times if each > self.interrupted_at), default=None)


# ---------------------------------------------------------------------------------------------- faults


def send(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def to_launcher(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.launcher.send_signal(number)


def to_a_rank(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: send(run.rng.sample(run.ranks, min(1, len(run.ranks))), number)


def kill_all(run: Run) -> None:
    send(run.processes(), signal.SIGKILL)


def stop_a_worker(run: Run) -> None:
    workers = [child for rank in run.ranks for child in rank.children() if run.words[0] in child.cmdline()]
    send(run.rng.sample(workers, min(1, len(workers))), signal.SIGSTOP)


def plant_nan(run: Run) -> None:
    """The loss is NaN until the run ends."""
    (run.folder / "nan").touch()


def fill_disk(run: Run) -> None:
    """For three seconds, no byte fits on the file system of the run."""
    with (run.folder / "runs" / "ballast").open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            time.sleep(3)
    (run.folder / "runs" / "ballast").unlink()


def start_another(run: Run) -> None:
    """A second process for the same run must be refused as long as the first one lives."""
    other = run.launch("--max-restarts=0", "other.log")
    other.wait(END_S)
    said = (run.folder / "other.log").read_text()
    if run.launcher.poll() is None and "is in use by" not in said:
        run.outcome.problems.append(f"a second writer was let in: {said[-300:]}")


def set_clock(run: Run) -> None:
    """Everything that the run wrote has the time of another clock."""
    kill_all(run)
    offset_s = run.rng.choice((-400, 400)) * 86400
    for path in run.folder.rglob("*"):
        os.utime(path, (time.time() + offset_s,) * 2)


FAULTS: dict[str, tuple[int, Callable[[Run], None]]] = {
    "SIGKILL to a rank": (5, to_a_rank(signal.SIGKILL)),
    "SIGKILL to torchrun": (4, to_launcher(signal.SIGKILL)),
    "SIGKILL to all": (4, kill_all),
    "SIGTERM to torchrun": (2, to_launcher(signal.SIGTERM)),
    "SIGINT to torchrun": (2, to_launcher(signal.SIGINT)),
    "SIGUSR2 to torchrun": (1, to_launcher(signal.SIGUSR2)),
    "SIGTERM to a rank": (2, to_a_rank(signal.SIGTERM)),
    "SIGUSR2 to a rank": (1, to_a_rank(signal.SIGUSR2)),
    "SIGSTOP to a rank": (1, to_a_rank(signal.SIGSTOP)),
    "SIGSTOP to a worker": (1, stop_a_worker),
    "NaN": (1, plant_nan),
    "disk full": (1, fill_disk),
    "second writer": (1, start_another),
    "wrong clock": (1, set_clock),
}
"""{fault: (weight, what does it)}"""
STOPS = ("SIGTERM", "SIGINT", "SIGUSR2")


def answer_to_stop(run: Run, fault: str, met_at: str) -> str:
    """What a run, asked to stop, did. Raises AssertionError if the step it met is lost."""
    marker = run.folder / "runs" / run.folder.name / "stopped.json"
    if marker.exists():
        step = json.loads(marker.read_text())["step"]
        assert step in run.steps_saved(), f"{fault}: stopped at step {step}, checkpoints {run.steps_saved()}"
        number = signal.Signals[fault.split()[0]]
        is_told = run.kind != "process" or run.launcher.returncode in (
            128 + number,
            -number,
        )  # a shell says 128 to both
        assert is_told, f"{fault}: exit code {run.launcher.returncode}"
        return "stopped with a checkpoint of its step"
    if is_done(run):
        return "had made its last step"
    assert met_at == "starting", f"{fault}: the step was not saved, exit code {run.launcher.returncode}"
    return "ended before it trained"


def meet(run: Run, name: str, usual: Untouched) -> None:
    """Let a fault meet the run at a moment of a phase, both drawn."""
    phase = run.rng.choice(PHASES[1:4] if "worker" in name else PHASES[:4])
    if phase == "starting":
        while not run.ranks and run.launcher.poll() is None:
            time.sleep(0.01)
        time.sleep(run.rng.uniform(0, usual.start_s))
    else:
        run.wait_for("training", END_S)
        time.sleep(run.rng.uniform(0, usual.train_s))
        run.wait_for(phase, usual.train_s)
    if run.launcher.poll() is None:
        phase = run.phase
        run.outcome.faults.append(f"{name} while {phase}")
        run.interrupted_at = time.time()
        FAULTS[name][1](run)
        fault = run.outcome.faults[-1]
        with note_problem(run):
            if name.startswith(STOPS):
                run.launcher.wait(END_S)
                run.outcome.answers.append(f"{name}: {answer_to_stop(run, fault, phase)}")


@contextmanager
def note_problem(run: Run) -> Iterator[None]:
    """A failed assertion becomes a problem of this run."""
    try:
        yield
    except AssertionError as error:
        run.outcome.problems.append(f"{error}: {run.log[-300:]}")


def is_done(run: Run) -> bool:
    return "\ndone: epoch" in run.log


def can_meet(run: Run, name: str) -> bool:
    """Whether a run of this kind has what the fault is aimed at."""
    if "worker" in name:
        return run.kind == "dataset"
    needs_others = "torchrun" in name or name == "SIGSTOP to a rank"  # a process alone may be stopped, as by Ctrl-Z
    return run.kind != "process" or not needs_others


def soak(run: Run, usual: Untouched, names: list[str]) -> Outcome:
    """A run with one or two of these faults, drawn by its name."""
    outcome = run.outcome
    names = [name for name in names if can_meet(run, name)]
    has_disk = mount(run.folder / "runs")
    if not has_disk and "disk full" in names:
        names.remove("disk full")
    faults = run.rng.choices(names, [FAULTS[name][0] for name in names], k=run.rng.choice((1, 1, 2)))
    try:
        while outcome.starts < MAX_STARTS and not outcome.done:
            run.start()
            if faults:
                meet(run, faults.pop(), usual)
            run.launcher.wait(END_S + usual.start_s + usual.train_s)
            (run.folder / "nan").unlink(missing_ok=True)
            outcome.done = is_done(run)
            if outcome.faults and (seconds := run.first_step_s()) is not None:
                outcome.first_step_s.append(round(seconds, 2))
    except subprocess.TimeoutExpired:
        outcome.problems.append("did not end")
        kill_all(run)
        run.launcher.wait()
    until = time.monotonic() + ORPHAN_S
    while run.processes() and time.monotonic() < until:
        time.sleep(0.2)
    outcome.orphans = len(run.processes())
    kill_all(run)
    outcome.leftovers = [path.name for path in run.folder.glob("runs/**/*partial*")]
    outcome.equal = outcome.done and run.result() == usual.result
    if not outcome.equal:
        outcome.problems.append(run.log[-600:])
    if has_disk:
        subprocess.run(["umount", run.folder / "runs"], check=True)
    return outcome


def mount(folder: Path) -> bool:
    """A small file system of its own, which can be filled. Only root can have one, on Linux."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "none", folder]
    return (
        shutil.which("mount") is not None and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


# ---------------------------------------------------------------------------------------------- all runs


def untouched(base: Path, kind: str, settings: list[str]) -> Untouched:
    """A run without faults."""
    run = Run(base / f"untouched-{kind}", kind, settings)
    run.start()
    run.launcher.wait()
    if not is_done(run):
        sys.exit(f"error: a run without faults fails: {run.log}")
    start_s = run.first_step_s() or 0.0
    saved_at = max(path.stat().st_mtime for path in run.folder.glob("runs/*/checkpoints/*"))
    return Untouched(run.result(), start_s, saved_at - run.interrupted_at - start_s)


def describe(outcomes: list[Outcome], usual: Untouched) -> list[publish.Table]:
    """Two tables: the whole, and how often each fault met each phase."""
    met = Counter(tuple(fault.split(" while ")) for each in outcomes for fault in each.faults)
    seconds = [second for each in outcomes for second in each.first_step_s] or [float("nan")]
    rows = [
        ["runs", f"{len(outcomes)}"],
        ["faults that met them", f"{met.total()}"],
        ["starts", f"{sum(each.starts for each in outcomes)}"],
        ["runs that came to their end", f"{sum(each.done for each in outcomes)}"],
        ["of these, equal bit for bit to a run without faults", f"{sum(each.equal for each in outcomes)}"],
        [f"processes left after {ORPHAN_S} s", f"{sum(each.orphans for each in outcomes)}"],
        ["partial files left", f"{sum(len(each.leftovers) for each in outcomes)}"],
        ["other problems", f"{sum(len(each.problems) for each in outcomes)}"],
        ["seconds from a new start to the first step, median", f"{median(seconds):.1f}"],
        ["the same, maximum", f"{max(seconds):.1f}"],
    ]
    note = f"{RANKS} gloo ranks on the CPUs; a run without faults takes {usual}."
    answers = Counter(tuple(answer.split(": ")) for each in outcomes for answer in each.answers)
    phases = [
        [name, *(f"{met[name, phase]}" for phase in PHASES)] for name in FAULTS if any(name in key for key in met)
    ]
    totals = [f"{sum(count for key, count in met.items() if key[1] == phase)}" for phase in PHASES]
    return [
        publish.Table("outcomes", ["what", "number"], rows, note),
        publish.Table("faults, by the phase that they met", ["fault", *PHASES], [*phases, ["all", *totals]]),
        publish.Table(
            "what followed a signal",
            ["signal", "the run", "times"],
            [[*key, f"{answers[key]}"] for key in sorted(answers)],
        ),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no run after this time")
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--publish", action="store_true", help="write a page to bench/results")
    parser.add_argument("--signals", action="store_true", help="no faults but signals")
    args = parser.parse_args()
    outcomes: list[Outcome] = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
    names = [name for name in FAULTS if not args.signals or name.startswith(STOPS)]
    settings = SETTINGS if args.signals else SETTINGS + MORE_CHECKPOINTS
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        base = copy_project(Path(name))
        shutil.copyfile(HERE / "planted.py", base / "workloads" / "planted.py")
        until = time.monotonic() + args.seconds
        usual = {kind: untouched(base, kind, settings) for kind in KINDS}
        print(f"a run without faults takes {usual['ranks']}", flush=True)

        def try_run(number: int) -> None:
            if time.monotonic() > until:
                return
            kind = ("ranks", "process", "ranks", "dataset")[number % 4]
            run = Run(base / f"soak{args.seed}-{number}", kind, settings)
            outcome = soak(run, usual[kind], names)
            outcomes.append(outcome)
            print(f"{number}: {asdict(outcome)}", flush=True)
            if not outcome.is_good:
                print(f"the log of it: {keep_log(run)}", flush=True)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(try_run, range(args.runs)))
    tables = describe(outcomes, usual["ranks"])
    for table in tables:
        print(f"\n{table.title}\n\n{table.markdown()}")
    if args.publish:
        data = {"seed": args.seed, "runs": [asdict(each) for each in outcomes]}
        words = f"--runs {args.runs} --jobs {args.jobs}{' --signals' * args.signals}"
        publish.write("signals" if args.signals else "soak", tables, data, f"python tests/faults/soak.py {words}")
    return int(not all(each.is_good for each in outcomes))


def keep_log(run: Run) -> Path:
    """Copy the log of a run to where it outlives the runs' folder. Returns its path."""
    path = Path(tempfile.gettempdir()) / f"{run.folder.name}.log"
    shutil.copyfile(run.folder / "log", path)
    return path


if __name__ == "__main__":
    sys.exit(main())
