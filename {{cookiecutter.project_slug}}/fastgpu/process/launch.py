"""What the launcher told this process, messages for a person, and the exit when a person has to change something.

The only module that reads environment variables. It does not import torch, so an error in the config is reported at
once.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

SPEAKER_S = 3.0
"""How long ranks wait until the first one has printed a message: torchrun ends all of them with the first that ends."""
PR_SET_PDEATHSIG = 1
"""Lets Linux kill this process when its parent, torchrun, dies."""


class UserError(ValueError):
    """An error that a person can fix. The message names the key or path, the value, what is allowed, and the cure."""


class RankError(UserError):
    """A UserError that one rank alone meets. That rank prints it; others are raised on every rank."""


class HangError(RankError):
    """A thread hangs. Python's own exit would wait for the locks of that thread, so the process ends by force."""


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
    """The values that torchrun set in the environment (https://docs.pytorch.org/docs/stable/elastic/run.html)."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    numbers = [int(os.environ.get(name, default)) for name, default in zip(names, Launch()[:-1], strict=True)]
    return Launch._make([*numbers, "TORCHELASTIC_RUN_ID" in os.environ])


def warn(text: str) -> None:
    """Print a warning once for the whole job. Every warning of the project goes through here."""
    if read_launch().rank == 0:
        print(f"warning: {text}", flush=True)


@contextmanager
def exit_with_message(*others: type[Exception]) -> Iterator[None]:
    """Turn a `UserError`, and others that are no bugs, such as OSError if a disk is full, into one line on stderr for
    each machine, and exit code 2 on every rank. Bugs keep their traceback; a fatal signal (a bug in a driver, a file
    truncated while it is mapped) leaves one, too."""
    told: tuple[type[Exception], ...] = (UserError, *others)
    faulthandler.enable(sys.__stderr__ or 2)
    launch = read_launch()
    try:
        if launch.is_launched:
            end_with_parent()
            check_parent()
        yield
    except told as error:
        if launch.local_rank == 0 or isinstance(error, RankError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        elif launch.is_launched:
            time.sleep(SPEAKER_S)
        if isinstance(error, HangError):
            sys.stdout.flush()
            os._exit(2)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if launch.local_rank == 0:
            print("\ninterrupted", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


def end_with_parent() -> None:
    """Let Linux kill this process when the thread that started it ends: as an orphan of torchrun it would hold its GPU,
    and write to a run that has been restarted."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def check_parent() -> None:
    """Raise RankError if torchrun ended before `end_with_parent`: its store, which listens for as long as it lives, is
    gone, and a rank would wait for the others until `dist.timeout_s`."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5).close()
        except ConnectionRefusedError:
            raise RankError("torchrun, which started this process, has ended") from None
        except OSError:
            pass  # such as a name that is not known yet: torch tries for longer
