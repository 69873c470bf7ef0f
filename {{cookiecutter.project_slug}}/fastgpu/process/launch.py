"""The start and the end of a process: torchrun's environment variables, messages for a person, the exit code.

Only this module reads environment variables. It does not import torch, so errors in the config are shown immediately.
"""

import ctypes
import faulthandler
import io
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TextIO

__all__ = ["Launch", "SharedError", "UserError", "exit_with_message", "warn"]

CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 13), *range(14, 32), *range(127, 160))}
ESCAPES = CONTROL | {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}
"""Translation table for output: control characters, and bytes of a file name that are no text, become `\\xNN`."""
# Parts of a URL that may be secret: `user:password@` (for http also a user alone), and the query after `?`, up to a
# `::/group`. A URL contains no quotation mark, and no backslash, which precedes a quotation mark in JSON.
USER = re.compile(r"(?<=://)[^\s/?#@'\"]*:(?!\d+/)[^\s?#@'\"]*@|(?<=http://)[^\s/?#@'\"]+@|(?<=https://)[^\s/?#@'\"]+@")
QUERY = re.compile(r"(https?://[^\s?'\"]+\?)(?:(?!:[:\s]|,\w+://)[^\s'\"\\])+", re.IGNORECASE)
LEFT_OUT = "..."
"""Replaces the query of a URL, which may contain a signature."""
STARTED_S = time.time()
"""Time at which this process started: this module is one of the first that it imports."""
EXIT_DELAY_S = 3.0
"""The other ranks of a machine exit this much later, so that the first rank can print the message for all: torchrun
kills all ranks when one exits. Without the delay, no message was printed in 4 of 4 jobs with a first rank that was
0.3 s late."""


class UserError(ValueError):
    """An error that the user can fix. The message names the key or path, the value, what is allowed, and the fix."""


class SharedError(UserError):
    """A UserError that all ranks raise at the same place. The first rank of each machine prints it."""


class HangError(UserError):
    """Raised when a thread hangs. Python's exit would wait for the locks of the thread, so `os._exit` is called."""


class Launch(NamedTuple):
    """One of the processes that `torchrun` started. The defaults describe a plain `python train.py`."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    attempt: int = 0
    """How often torchrun has restarted the processes of this job."""
    is_launched: bool = False
    """Whether torchrun started this process and waits for its end."""


def read_launch() -> Launch:
    """The values that torchrun set in the environment (https://docs.pytorch.org/docs/stable/elastic/run.html).

    Empty variables, which some job templates set, count as unset. Raises SharedError if a variable is no number, or if
    this process is one of several but cannot find the others.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    given = {name: os.environ[name] for name in (*names, "MASTER_ADDR", "MASTER_PORT") if os.environ.get(name)}
    cure = "start with torchrun, which sets all, or unset RANK, WORLD_SIZE and LOCAL_RANK"
    is_one_of_several = given.get("WORLD_SIZE", "1") != "1"
    for name in (*names, *["MASTER_PORT"] * is_one_of_several):  # a Service of Kubernetes sets MASTER_PORT to a URL
        if not re.fullmatch("[0-9]{1,9}", given.get(name, "0")):
            raise SharedError(f"{name} is {given[name]!r} in the environment; it should be a number: {cure}")
    numbers = [int(given.get(name, default)) for name, default in zip(names, Launch()[:-1], strict=True)]
    launch = Launch._make([*numbers, bool(os.environ.get("TORCHELASTIC_RUN_ID"))])
    missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if is_one_of_several and name not in given]
    if missing or launch.world_size <= max(launch.rank, launch.local_rank) or not launch.local_world_size:
        found = ", ".join(f"{name}={given[name]}" for name in names[:4] if name in given)
        problem = f"but no {', '.join(missing)}" if missing else f"which do not fit {launch.world_size} processes"
        raise SharedError(f"the environment has {found}, {problem}: {cure}")
    return launch


def planned_ranks() -> list[tuple[int, int]]:
    """[(ranks, ranks of each machine)] of the job that torchrun's variables describe, for the fewest and most machines.

    launch/node.sh checks a run in one process before it starts torchrun, which restarts a job that fails.
    """
    machines = re.findall("[1-9][0-9]*", os.environ.get("PET_NNODES", ""))
    own = re.fullmatch("[1-9][0-9]*", os.environ.get("PET_NPROC_PER_NODE", ""))  # it may be a word, such as gpu
    return [(int(each) * int(own[0]), int(own[0])) for each in machines] if own else []


def check_alone() -> None:
    """Raise SharedError if srun started several copies of this process, and each would train alone.

    Only srun sets SLURM_STEP_NUM_TASKS. SLURM_NTASKS belongs to the job, and is also set in the shell of `salloc` and
    in a script for `sbatch`, where one process runs. If WORLD_SIZE is set, the tasks know each other.
    """
    n_tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "")
    if n_tasks not in ("", "1") and not os.environ.get("WORLD_SIZE"):
        if os.environ.get("SLURM_PROCID", "0") != "0":
            raise SystemExit(2)  # the first task prints the message for all
        cure = "start torchrun once on each node (srun --ntasks-per-node=1), as the template's launch/slurm.sh does"
        raise SharedError(f"srun started {n_tasks} tasks, and each would train alone: {cure}")


def say(text: str, file: TextIO | None = None) -> None:
    """Print text to stdout, or to `file`. Control characters, except ends of lines, are shown as `\\x1b`.

    If the disk is full or the pipe is closed, this and all later output is dropped.
    """
    file = file or sys.stdout
    text = text.translate(ESCAPES | {13: "\\x0d"})
    try:
        print(without_secrets(text), file=file, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # also takes the text that Python has buffered
        if file is not sys.stderr:
            say(f"warning: stdout is lost from here on ({error.strerror}); training continues", sys.stderr)


def without_secrets(text: str) -> str:
    """The text without the passwords and queries of URLs. All text that is printed or recorded passes through here."""
    return QUERY.sub(rf"\1{LEFT_OUT}", USER.sub("", text)) if "://" in text else text


def list_first(items: Sequence[str], separator: str = ", ") -> str:
    """The first 20 items, joined, and the number of further items."""
    more = f"{len(items) - 20:,} more" if separator == " or " else f"and {len(items) - 20:,} more"
    return separator.join([*items[:20], *[more] * (len(items) > 20)])


def warn(text: str, *, own: bool = False) -> None:
    """Print a warning once for the whole job. All warnings of the project pass through here.

    own: the warning is about this rank or its node, so every rank that calls this prints it, with its number.
    """
    launch = read_launch()
    if own or launch.rank == 0:
        rank = f"[rank {launch.rank}] " if own and launch.world_size > 1 else ""
        say(f"warning: {rank}{text}")


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process immediately: imported modules may swallow a KeyboardInterrupt."""

    def end(number: int, frame: object) -> None:
        if read_launch().local_rank == 0:
            say("\ninterrupted", sys.stderr)
        os._exit(130)

    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


@contextmanager
def exit_with_message(*others: type[Exception]) -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2. Bugs keep their traceback.

    A rank prints its own error after its number; a SharedError is printed once for each machine. others: further types
    of errors that are no bugs, such as OSError if a disk is full. A fatal signal (a bug in a driver, a mapped file that
    was truncated) leaves a traceback, too. After the block, Ctrl-C ends the process immediately.
    """
    expected: tuple[type[Exception], ...] = (UserError, *others)
    faulthandler.enable(sys.__stderr__ or 2)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that cannot be encoded must not end a run
        sys.stdout.reconfigure(errors="backslashreplace")
    launch = Launch()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        launch = read_launch()
        if launch.is_launched:
            end_with_parent()
            check_parent()
        yield
        end_on_interrupt()
    except expected as error:
        is_shared = isinstance(error, SharedError)
        if launch.local_rank == 0 or not is_shared:
            rank = "" if is_shared or launch.world_size == 1 else f"[rank {launch.rank}] "
            is_output = isinstance(error, OSError) and not error.filename
            text = f"the output cannot be written ({error})" if is_output else str(error)
            say(f"error: {rank}{text}", sys.stderr)
        elif launch.is_launched:
            time.sleep(EXIT_DELAY_S)
        if isinstance(error, HangError):
            sys.stdout.flush()
            os._exit(2)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if launch.local_rank == 0:
            say("\ninterrupted", sys.stderr)
        raise SystemExit(130) from None


def end_with_parent() -> None:
    """Let Linux kill this process when the thread that started it ends.

    If torchrun is gone, the process would keep its GPU, and write to a run that has been restarted.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_parent() -> None:
    """Raise UserError if torchrun ended before `end_with_parent` was called.

    Such a rank would try to reach the store of torchrun, which ends with torchrun, for all of `dist.timeout_s` (ten
    minutes).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5).close()
        except ConnectionRefusedError:
            raise UserError("torchrun, which started this process, has ended") from None
        except OSError:
            pass  # for example, a name that cannot be resolved yet: torch retries for longer
