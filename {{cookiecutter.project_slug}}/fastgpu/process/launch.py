"""What the launcher told this process, messages for a person, and the exit when a person has to change something.

The only module that reads environment variables. It does not import torch, so an error in the config is reported at
once.
"""

import atexit
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, NamedTuple, NoReturn

EXIT_S = 2.0
"""Time for what is registered with `atexit` if Python's own exit would hang."""

SPEAKER_S = 3.0
"""How long ranks wait until the first one has printed a message: torchrun ends all of them with the first that ends."""
MAX_LINE = 1000
"""Characters of a line of a message. It may quote what a damaged file holds, whatever its length."""


RECORDED = ("CUDA_", "FI_", "GLOO_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "UCX_")
"""Beginnings of the environment variables that change how NCCL, CUDA, OpenMP and torch work."""


class UserError(ValueError):
    """An error that a person can fix. The message names the key or path, the value, what is allowed, and the cure."""


class RankError(UserError):
    """A UserError that one rank alone meets during training. That rank prints it, whichever it is."""


class HangError(RankError):
    """A thread hangs, and so may Python's own exit: it waits for the locks of that thread."""


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
    shares_store: bool = False
    """Whether torchrun keeps one store for all restarts of the processes."""

    @property
    def is_local_main(self) -> bool:
        """Whether this process prints for its machine: a person sees one message, not one from each rank."""
        return self.local_rank == 0


def read_launch() -> Launch:
    """The values that torchrun set in the environment (https://docs.pytorch.org/docs/stable/elastic/run.html)."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    numbers = [int(os.environ.get(name, default)) for name, default in zip(names, Launch()[:-2], strict=True)]
    rank, world_size, local_rank, local_world_size, attempt = numbers
    is_launched = "TORCHELASTIC_RUN_ID" in os.environ
    shares_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Launch(rank, world_size, local_rank, local_world_size, attempt, is_launched, shares_store)


def read_environment() -> dict[str, str]:
    """{variable: value} of all that `RECORDED` names. This project sets none of them; torchrun and clusters do."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(RECORDED)}


def warn(text: str) -> None:
    """Print a warning once for the whole job. Every warning of the project goes through here."""
    if read_launch().rank == 0:
        print(f"warning: {text}", flush=True)


@contextmanager
def exit_with_message(
    interrupted: str = "interrupted; run.resume=auto continues from the last checkpoint",
) -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2 on every rank. Bugs keep their traceback.

    A fatal signal (a bug in a driver, a file truncated while it is mapped) leaves a traceback, too.
    """
    faulthandler.enable(sys.__stderr__ or 2)
    launch = read_launch()
    try:
        yield
    except UserError as error:
        if launch.is_local_main or isinstance(error, RankError):
            lines = f"error: {error}".splitlines()
            lines = [line if len(line) <= MAX_LINE else f"{line[:MAX_LINE]} ..." for line in lines]
            print(*lines, sep="\n", file=sys.stderr, flush=True)
        elif launch.is_launched:
            time.sleep(SPEAKER_S)
        if isinstance(error, HangError):
            _exit_by_force(2)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if launch.is_local_main:
            print(f"\n{interrupted}", file=sys.stderr, flush=True)
        raise SystemExit(130) from None


@contextmanager
def stop_at_closed_pipe(file: IO[str]) -> Iterator[None]:
    """End the program with exit code 1, without a message, when the reader of `file` has seen enough (`head`)."""
    try:
        yield
        file.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # or Python complains when it flushes at exit
        raise SystemExit(1) from None


def _exit_by_force(code: int) -> NoReturn:
    """End the process, whatever hangs in it. Functions registered with `atexit` are called if they are quick."""
    timer = threading.Timer(EXIT_S, os._exit, [code])
    timer.daemon = True
    timer.start()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(code)
