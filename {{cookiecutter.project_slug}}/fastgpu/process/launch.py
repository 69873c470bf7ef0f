"""The start and the end of a process: what torchrun set, messages for a person, the exit code.

The only module that reads environment variables. It does not import torch, so errors in the config come at once.
"""

import ctypes
import faulthandler
import io
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import NamedTuple, ParamSpec, TextIO, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

CONTROL = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 13), *range(14, 32), *range(127, 160))}
ESCAPES = CONTROL | {0xDC00 + byte: f"\\x{byte:02x}" for byte in range(128, 256)}
"""How text is shown: terminals obey control characters, and bytes of a file name that are no text are surrogates."""
STARTED_S = time.time()
"""When this process started: this is one of the first modules that it imports."""
EXIT_DELAY_S = 3.0
"""The other ranks of a machine exit this much later, so that the first one can print the message of all: torchrun kills
all ranks when one exits. With a first rank that was 0.3 s late, no message came in 4 of 4 jobs without this."""


class UserError(ValueError):
    """An error that a person can fix. It names key or path, value, what is allowed and cure."""


class SharedError(UserError):
    """A UserError that all ranks raise at the same place: the first of each machine prints it."""


class HangError(UserError):
    """A thread hangs. Python's exit would wait for its locks, so the process ends by force."""


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


def say(text: str, file: TextIO | None = None) -> None:
    """Print a line to stdout, or to `file`. On a full disk or to a closed pipe, it and all later output is dropped."""
    file = file or sys.stdout
    try:
        print(text, file=file, flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # what Python has kept of it goes there, too
        if file is not sys.stderr:
            say(f"warning: stdout is lost from here on ({error.strerror}); training goes on", sys.stderr)


class _Terminal(io.TextIOWrapper):
    def write(self, text: str) -> int:
        return super().write(text.translate(ESCAPES))


def warn(text: str, *, own: bool = False) -> None:
    """Print a warning, once for the whole job. Every warning of the project goes through here.

    own: it is about this rank or its node, so every rank that calls prints it, with its number.
    """
    launch = read_launch()
    if own or launch.rank == 0:
        rank = f"[rank {launch.rank}] " if own and launch.world_size > 1 else ""
        say(f"warning: {rank}{text}")


def attempt(function: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> Callable[[], T]:
    """Call a function now. The result returns its value, or raises its UserError, when it is called.

    So what has to be done before the ranks know each other can fail where they end together.
    """
    outcome: Future[T] = Future()
    try:
        outcome.set_result(function(*arguments, **options))
    except UserError as error:
        outcome.set_exception(error)
    return outcome.result


def start_tool() -> None:
    """Set up a program that writes files, and shows names of files and classes, whatever these hold.

    SIGTERM and SIGHUP end it by an exception, so that files that are not complete are removed. Standard output and
    error show what terminals obey or cannot encode as `\\x1b`.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup sets it
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    end_on_interrupt()
    for name in ("stdout", "stderr"):
        if stream := getattr(sys, name):  # None: it was closed
            how = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
            setattr(sys, name, _Terminal(stream.buffer, stream.encoding, "backslashreplace", **how))


def end_on_interrupt() -> None:
    """Let Ctrl-C end the process at once: a KeyboardInterrupt may be lost in one of the modules that are imported."""

    def end(number: int, frame: object) -> None:
        if read_launch().local_rank == 0:
            say("\ninterrupted", sys.stderr)
        os._exit(130)

    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, end)


@contextmanager
def exit_with_message(*others: type[Exception]) -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2. Bugs keep their traceback.

    A rank prints its own error with its number before it; a SharedError is printed once for each machine. others: types
    of errors that are no bugs either, such as OSError if a disk is full. A fatal signal (a bug in a driver, a mapped
    file that was truncated) leaves a traceback, too. After the block, Ctrl-C ends the process at once.
    """
    expected: tuple[type[Exception], ...] = (UserError, *others)
    faulthandler.enable(sys.__stderr__ or 2)
    launch = read_launch()
    if signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
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

    Without torchrun it would hold its GPU, and write to a run that has been restarted.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def check_parent() -> None:
    """Raise UserError if torchrun ended before `end_with_parent` was called.

    Such a rank would look for the store of torchrun, which listens for as long as torchrun lives, for all of
    `dist.timeout_s` (ten minutes).
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        try:
            socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), timeout=5).close()
        except ConnectionRefusedError:
            raise UserError("torchrun, which started this process, has ended") from None
        except OSError:
            pass  # such as a name that cannot be resolved yet: torch tries for longer
