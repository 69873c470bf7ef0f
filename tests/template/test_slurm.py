"""launch/slurm.sh on two nodes: runs are preempted, cancelled, out of time, and lose processes and nodes.

The nodes are processes of this machine. They need root and Debian's packages slurmctld, slurmd and slurm-client.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from support import PROJECT
from support.ranks import TIMEOUT_S, copy_project, free_port, printed_by, train_command, wait_until
from support.runs import same_weights, write_minimal

is_installed = os.geteuid() == 0 and all(map(shutil.which, ("slurmctld", "slurmd", "sbatch", "scontrol")))
pytestmark = [pytest.mark.slurm, pytest.mark.skipif(not is_installed, reason="needs root, slurmctld and slurmd")]
NODES = ("c1", "c2")
WORDS = ("workload=slow", "train.epochs=20")
SLOW_WORKLOAD = """\
import os
import time

from workloads import minimal


class Workload(minimal.Workload):
    def loss(self, model, batch):
        time.sleep(float(os.environ.get("STEP_S", "0.02")))
        return super().loss(model, batch)
"""
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
SlurmdTimeout=10
SchedulerParameters=bf_interval=1,sched_interval=1
NodeName=c1 NodeAddr=127.0.0.1 Port={port_1} CPUs=64
NodeName=c2 NodeAddr=127.0.0.1 Port={port_2} CPUs=64
PartitionName=low Nodes=c1,c2 Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes=c1,c2 PriorityTier=2 State=UP
"""
"""cred_expire is how long a job that is queued again waits; 120 s unless it is set."""


class Cluster:
    """Two nodes of 64 CPUs each, and the partitions `low` and `high`: jobs of `high` preempt those of `low`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        ports = {name: free_port() for name in ("port", "port_1", "port_2")}
        host = socket.gethostname().split(".")[0]
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIG.format(**ports, host=host, folder=folder))

    @property
    def variables(self) -> dict[str, str]:
        """What Slurm's programs need, and where the jobs' ranks find each other: the nodes' names mean nothing here."""
        here = {"PET_LOCAL_ADDR": "127.0.0.1", "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
        return here | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self, name: str, *command: str) -> None:
        """Start a daemon."""
        with (self.folder / "daemons.log").open("ab") as log:
            environment = os.environ | self.variables
            self.daemons[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node)

    def close(self) -> None:
        """Cancel what runs, and end the daemons."""
        for job in self.call("squeue", "-h", "-o", "%i").split():
            for words in (["--signal=KILL", "--full"], []):
                subprocess.run(["scancel", *words, job], env=os.environ | self.variables, check=False)
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait(TIMEOUT_S)

    def call(self, *command: str, cwd: Path = PROJECT, **variables: str) -> str:
        """What one of Slurm's programs prints."""
        return printed_by(command, cwd, **(self.variables | variables)).strip()

    def facts(self, job: str) -> dict[str, str]:
        """What scontrol knows of a job: JobState, ExitCode, Restarts, ..."""
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: str, *states: str) -> str:
        wait_until(lambda: self.facts(job)["JobState"] in states)
        return self.facts(job)["JobState"]


class Job:
    """A job of launch/slurm.sh with two processes on each of two nodes."""

    def __init__(self, cluster: Cluster, project: Path, *words: str, options: tuple[str, ...] = ()):
        self.cluster = cluster
        self.project = project
        given = ("--gpus-per-node=0", "--cpus-per-task=2", *options, "launch/slurm.sh", *WORDS, *words)
        self.id = cluster.call("sbatch", "--parsable", *given, cwd=project, PROCS="2")
        self.run = project / "runs" / f"slurm-{self.id}"

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in self.project.glob(f"*-{self.id}.out"))

    @property
    def restarts(self) -> int:
        return int(self.cluster.facts(self.id)["Restarts"])

    def steps(self, said: str) -> list[int]:
        """The steps that the log names after these words, which begin or end a start of the run."""
        return [int(step) for step in re.findall(rf"(?m){said} at step (\d+)", self.log)]

    @property
    def starts(self) -> list[int]:
        return self.steps(",")

    @property
    def stops(self) -> list[int]:
        return self.steps("asked to stop")

    def wait_for_start(self, number: int) -> None:
        """Wait until the run has begun for that time, and has taken some steps."""
        wait_until(lambda: len(self.starts) >= number)
        metrics = self.run / "metrics.jsonl"
        n_bytes = metrics.stat().st_size if metrics.exists() else 0
        wait_until(lambda: metrics.exists() and metrics.stat().st_size > n_bytes)

    def wait_for_end(self) -> str:
        return self.cluster.wait_for_state(self.id, "COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")

    def processes(self, name: str) -> list[psutil.Process]:
        """The ranks (`train.py`) or the agents (`torchrun`) of the job."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            is_agent = any(word.endswith("torchrun") for word in words)
            if f"run.name={self.run.name}" in words and is_agent == (name == "torchrun"):
                found.append(process)
        return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            cluster.start_node(node)
        wait_until(lambda: cluster.call("sinfo", "-h", "-o", "%t %D", "-p", "low") == "idle 2")
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose steps take 20 ms, and `runs/untouched`: four ranks without Slurm."""
    folder = copy_project(tmp_path_factory.mktemp("project"))
    write_minimal(folder)
    shutil.copytree(PROJECT / "launch", folder / "launch")
    (folder / "workloads/slow.py").write_text(SLOW_WORKLOAD)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    (folder / "other.sh").write_text("#!/usr/bin/env bash\nsleep 1\n")
    printed_by(train_command(*WORDS, "run.name=untouched", ranks=4, root=folder), folder)
    return folder


@pytest.fixture
def submit(cluster, project) -> Iterator[Callable[..., Job]]:
    """submit(*words, options=...) is a Job. What it has printed is shown if the test fails."""
    jobs = []

    def start(*words: str, options: tuple[str, ...] = ()) -> Job:
        jobs.append(Job(cluster, project, *words, options=options))
        return jobs[-1]

    yield start
    for job in jobs:
        print(cluster.facts(job.id), job.log)


def assert_equal_end(job: Job) -> None:
    assert job.wait_for_end() == "COMPLETED"
    assert same_weights(job.run, job.project / "runs/untouched")


def assert_no_step_was_taken_twice(job: Job) -> None:
    first, *starts = job.starts
    if starts and f"at step {starts[-1]}\ndone: " in job.log:
        starts.pop()  # the signal came while the last step was taken, and a finished run was queued again
    assert (first, starts) == (0, job.stops)


def test_slurm_preempted_twice_continues(submit, cluster, project):
    job = submit()
    for number in (1, 2):
        job.wait_for_start(number)
        other = cluster.call(
            "sbatch", "--parsable", "--partition=high", "--nodes=2", "--exclusive", "other.sh", cwd=project
        )
        cluster.wait_for_state(other, "RUNNING", "COMPLETED")
        wait_until(lambda number=number: job.restarts == number)
        cluster.wait_for_state(job.id, "RUNNING")
    assert_equal_end(job)
    assert_no_step_was_taken_twice(job)
    assert len(job.stops) == 2
    assert "4 x CPU over gloo" in job.log


def test_slurm_out_of_time_continues(submit, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.3")
    job = submit(options=("--time=3", "--signal=TERM@75"))  # after 75 to 105 s: Slurm looks every half minute
    assert_equal_end(job)
    assert_no_step_was_taken_twice(job)
    assert job.restarts == len(job.stops) > 0


@pytest.mark.parametrize(("killed", "restarts"), [("train.py", 0), ("torchrun", 1)])
def test_slurm_killed_processes_are_restarted(submit, killed, restarts):
    job = submit("run.checkpoint_every_steps=20")
    job.wait_for_start(1)
    job.processes(killed)[-1].kill()
    assert_equal_end(job)
    assert job.restarts == restarts
    assert len(job.starts) == 2


def test_slurm_lost_node_is_queued_again(submit, cluster, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.2")  # 84 s: Slurm misses a node after 10 to 40 s
    job = submit("run.checkpoint_every_steps=20")
    job.wait_for_start(1)
    cluster.daemons["c2"].kill()
    cluster.daemons["c2"].wait()
    wait_until(lambda: job.restarts == 1)
    cluster.start_node("c2")
    assert_equal_end(job)
    assert not job.processes("train.py")


def test_slurm_cancelled_stays_away(submit, cluster):
    job = submit()
    job.wait_for_start(1)
    cluster.call("scancel", job.id)
    assert job.wait_for_end() == "CANCELLED"
    wait_until(lambda: not job.processes("train.py"))
    assert len(job.stops) == 1
    assert (job.run / f"checkpoints/last-{job.stops[0]}").exists() or (job.run / "stopped.json").exists()
    assert job.restarts == 0


def test_slurm_chain_of_jobs_ends_one_run(submit, cluster, monkeypatch):
    monkeypatch.setenv("RUN_NAME", "chain")
    options = ("--job-name=chain", "--dependency=singleton", "--no-requeue")
    jobs = [submit(options=options) for _ in range(3)]
    for job in jobs:
        job.run = job.project / "runs/chain"
    jobs[0].wait_for_start(1)
    cluster.call("scancel", "--signal=TERM", jobs[0].id)
    assert [job.wait_for_end() for job in jobs] == ["FAILED", "COMPLETED", "COMPLETED"]
    assert jobs[0].stops == jobs[1].starts
    assert same_weights(jobs[0].run, jobs[0].project / "runs/untouched")
