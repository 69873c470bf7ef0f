"""launch/slurm.sh on two nodes: runs are preempted, cancelled, out of time, and lose processes and nodes."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
from harness import copy_project, same_weights, write_minimal
from slurm_cluster import Cluster, is_installed
from template import PROJECT

pytestmark = [pytest.mark.slurm, pytest.mark.skipif(not is_installed(), reason="needs root, slurmctld and slurmd")]
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


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose steps take 20 ms, and `runs/untouched`: four ranks without Slurm."""
    folder = tmp_path_factory.mktemp("project")
    write_minimal(folder)
    copy_project(folder)
    shutil.copytree(PROJECT / "launch", folder / "launch")
    (folder / "workloads/slow.py").write_text(SLOW_WORKLOAD)
    (folder / ".venv/bin").mkdir(parents=True)
    (folder / ".venv/bin/activate").write_text(f"PATH={Path(sys.executable).parent}:$PATH\n")
    (folder / "other.sh").write_text("#!/usr/bin/env bash\nsleep 1\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run([*torchrun, "train.py", *WORDS, "run.name=untouched"], cwd=folder, check=True)
    return folder


class Job:
    """A job of launch/slurm.sh with two processes on each of two nodes."""

    def __init__(self, cluster: Cluster, project: Path, *words: str, options: tuple[str, ...] = (), procs: int = 2):
        self.cluster = cluster
        self.project = project
        given = ("--gpus-per-node=0", "--cpus-per-task=2", *options, "launch/slurm.sh", *WORDS, *words)
        self.id = cluster.submit(project, *given, PROCS=str(procs))
        self.run = project / "runs" / f"slurm-{self.id}"

    @property
    def log(self) -> str:
        logs = list(self.project.glob(f"*-{self.id}.out"))
        return logs[0].read_text() if logs else ""

    @property
    def restarts(self) -> int:
        return int(self.cluster.job(self.id)["Restarts"])

    @property
    def starts(self) -> list[int]:
        """The step at which each start of the run began."""
        return [int(step) for step in re.findall(r"(?m), at step (\d+)$", self.log)]

    @property
    def stops(self) -> list[int]:
        """The step at which the run was asked to stop each time."""
        return [int(step) for step in re.findall(r"asked to stop at step (\d+)", self.log)]

    def wait_for_start(self, number: int) -> None:
        """Wait until the run has begun for that time, and has taken some steps."""
        self.cluster.wait_until(lambda: len(self.starts) >= number, lambda: self.log)
        done = self.n_reports
        self.cluster.wait_until(lambda: self.n_reports > done, lambda: self.log)

    @property
    def n_reports(self) -> int:
        """Lines of metrics.jsonl, of which the run writes one for every five steps."""
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

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


@pytest.fixture
def submit(cluster, project):
    """submit(*words, options=...) is a Job."""
    return partial(Job, cluster, project)


def assert_equal_end(job: Job) -> None:
    assert job.wait_for_end() == "COMPLETED", job.log
    assert same_weights(job.run, job.project / "runs/untouched")
    assert job.starts[0] == 0
    starts = job.starts[1:]
    if starts and f"at step {starts[-1]}\ndone: " in job.log:
        starts.pop()  # the signal came while the last step was taken, and a finished run was queued again
    assert starts == job.stops, job.log  # no step was taken twice


@pytest.mark.parametrize(("nodes", "procs"), [(2, 2), (1, 4)])
def test_four_processes_end_as_four_without_slurm(submit, nodes, procs):
    job = submit(options=(f"--nodes={nodes}",), procs=procs)
    assert_equal_end(job)
    assert "4 x CPU over gloo" in job.log
    assert job.restarts == 0


def test_a_job_preempted_twice_goes_on_where_it_stopped(submit, cluster, project):
    job = submit()
    for number in (1, 2):
        job.wait_for_start(number)
        other = cluster.submit(project, "--partition=high", "--nodes=2", "--exclusive", "other.sh")
        cluster.wait_for_state(other, "RUNNING", "COMPLETED")
        cluster.wait_until(lambda number=number: job.restarts == number, lambda: job.log)
        cluster.wait_for_state(job.id, "RUNNING")
    assert_equal_end(job)
    assert len(job.stops) == 2


def test_a_job_whose_time_is_over_goes_on(submit, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.3")
    job = submit(options=("--time=3", "--signal=TERM@75"))  # after 75 to 105 s: Slurm looks every half minute
    assert_equal_end(job)
    assert job.restarts == len(job.stops) > 0


@pytest.mark.parametrize(("killed", "restarts"), [("train.py", 0), ("torchrun", 1)])
def test_a_killed_rank_is_restarted_by_torchrun_and_a_killed_torchrun_by_slurm(submit, killed, restarts):
    job = submit("run.checkpoint_every_steps=20")
    job.wait_for_start(1)
    job.processes(killed)[-1].kill()
    assert job.wait_for_end() == "COMPLETED", job.log
    assert same_weights(job.run, job.project / "runs/untouched")
    assert job.restarts == restarts
    assert len(job.starts) == 2


def test_a_job_that_loses_a_node_is_queued_again(submit, cluster, monkeypatch):
    monkeypatch.setenv("STEP_S", "0.2")  # 84 s: Slurm misses a node after 10 to 40 s
    job = submit("run.checkpoint_every_steps=20")
    job.wait_for_start(1)
    cluster.daemons["c2"].kill()
    cluster.daemons["c2"].wait()
    cluster.wait_until(lambda: job.restarts == 1, lambda: job.log)
    cluster.start_daemon("c2", "slurmd", "-D", "-N", "c2")
    assert job.wait_for_end() == "COMPLETED", job.log
    assert same_weights(job.run, job.project / "runs/untouched")
    assert not job.processes("train.py")


def test_a_cancelled_job_has_saved_its_step_and_stays_away(submit, cluster):
    job = submit()
    job.wait_for_start(1)
    cluster.call("scancel", job.id)
    assert job.wait_for_end() == "CANCELLED"
    cluster.wait_until(lambda: not job.processes("train.py"))
    assert len(job.stops) == 1
    assert (job.run / f"checkpoints/last-{job.stops[0]}").exists() or (job.run / "stopped.json").exists()
    assert job.restarts == 0


def test_a_chain_of_jobs_ends_one_run(submit, cluster, monkeypatch):
    monkeypatch.setenv("RUN_NAME", "chain")
    options = ("--job-name=chain", "--dependency=singleton", "--no-requeue")
    jobs = [submit(options=options) for _ in range(3)]
    for job in jobs:
        job.run = job.project / "runs/chain"
    jobs[0].wait_for_start(1)
    cluster.call("scancel", "--signal=TERM", jobs[0].id)
    assert [job.wait_for_end() for job in jobs] == ["FAILED", "COMPLETED", "COMPLETED"], "".join(j.log for j in jobs)
    assert jobs[0].stops == jobs[1].starts
    assert same_weights(jobs[0].run, jobs[0].project / "runs/untouched")
