"""A Slurm cluster of two nodes, which are processes of this machine. It needs root and Debian's packages slurmctld,
slurmd and slurm-client."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from harness import ROOT, free_port, run_to_end

NODES = ("c1", "c2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "scontrol")
TIMEOUT_S = 400
GPUS = 8
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
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
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
NodeName=c1 NodeAddr=127.0.0.1 Port={port_1} CPUs=64 Gres=gpu:{gpus}
NodeName=c2 NodeAddr=127.0.0.1 Port={port_2} CPUs=64 Gres=gpu:{gpus}
PartitionName=low Nodes=c1,c2 Default=YES PriorityTier=1 GraceTime=30 State=UP
PartitionName=high Nodes=c1,c2 PriorityTier=2 State=UP
"""
"""cred_expire is how long a job that is queued again waits; 120 s unless it is set."""


class Cluster:
    """Two nodes of 64 CPUs and 8 GPUs each (files that stand for them), and the partitions `low` and `high`: jobs of
    `high` preempt those of `low`."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        values = {name: free_port() for name in ("port", "port_1", "port_2")}
        values |= {"host": socket.gethostname().split(".")[0], "folder": folder, "gpus": GPUS}
        (folder / "state").mkdir(parents=True)
        (folder / "slurm.conf").write_text(CONFIG.format(**values))
        gpus = [f"NodeName={node} Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n" for node in NODES]
        (folder / "gres.conf").write_text("".join(gpus))
        for number in range(GPUS):
            os.mknod(folder / f"gpu{number}", 0o20666, os.makedev(1, 3))

    @property
    def environment(self) -> dict[str, str]:
        """What Slurm's programs need, and where the jobs' ranks find each other: the nodes' names mean nothing here."""
        here = {"PET_LOCAL_ADDR": "127.0.0.1", "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}"}
        return os.environ | here | {"SLURM_CONF": str(self.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        self.start_daemon("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_daemon(node, "slurmd", "-D", "-N", node)
        self.wait_until(lambda: self.call("sinfo", "-h", "-o", "%t %D", "-p", "low").split() == ["idle", "2"])

    def start_daemon(self, name: str, *command: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons[name] = subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def close(self) -> None:
        """Cancel what runs, and end the daemons."""
        for job in self.call("squeue", "-h", "-o", "%i").split():
            for words in (["--signal=KILL", "--full"], []):
                subprocess.run(["scancel", *words, job], env=self.environment, check=False)
        for daemon in self.daemons.values():
            daemon.terminate()
        for daemon in self.daemons.values():
            daemon.wait(TIMEOUT_S)

    def call(self, *command: str, cwd: Path = ROOT, **variables: str) -> str:
        """What one of Slurm's programs prints."""
        done = run_to_end([*command], cwd, **(self.environment | variables))
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, cwd: Path, *words: str, **variables: str) -> str:
        """Submit a job. Returns its id."""
        return self.call("sbatch", "--parsable", *words, cwd=cwd, **variables).strip()

    def job(self, job: str) -> dict[str, str]:
        """What scontrol knows of a job: JobState, ExitCode, Restarts, ..."""
        words = self.call("scontrol", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, job: str, *states: str) -> str:
        self.wait_until(lambda: self.job(job)["JobState"] in states, lambda: f"{self.job(job)}")
        return self.job(job)["JobState"]

    def wait_until(self, condition: Callable[[], bool], say: Callable[[], str] = str) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not condition():
            assert time.monotonic() < until, f"{say()}\n{(self.folder / 'slurmctld.log').read_text()[-3000:]}"
            time.sleep(0.1)


def is_installed() -> bool:
    return os.geteuid() == 0 and all(shutil.which(program) for program in PROGRAMS)
