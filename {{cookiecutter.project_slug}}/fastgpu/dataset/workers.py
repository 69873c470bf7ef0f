"""Worker processes that read the items of a Dataset. Each worker waits at its end of a pipe for row numbers.

Workers are forks of this process: a fork takes every Dataset unmodified, with its open files and lambdas, and returns
its first rows after 0.06 s. A forkserver needs 3.8 s, and pickles the Dataset for each worker. But forks have to be
started before this process uses CUDA or NCCL, because neither survives a fork.
"""

import atexit
import faulthandler
import multiprocessing
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from traceback import extract_tb, format_exception_only
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils import worker as torch_worker
from torch.utils.data._utils.worker import WorkerInfo

from fastgpu.process.config import MAX_THREADS
from fastgpu.process.launch import UserError, end_with_parent, warn
from fastgpu.process.machine import lower_priority
from fastgpu.process.signals import STOP

SLOW_S = 30.0
"""After this time, a warning says that a worker may hang. Only `loader.timeout_s` ends the run."""
START_S, START_TRIES = 10.0, 3
"""A fork that has not begun to work after this time is killed and started again, up to this number of tries. If another
thread, such as a thread of autograd, holds a lock of Python during the fork, the fork waits for the lock for ever."""
CLOSE_S = 3.0
"""Maximum time that closing waits for the end of each worker. Workers that hang are left behind."""
Answer = Callable[..., object]
"""The function that a worker calls with each request. The first argument is the row numbers."""


class Workers:
    """Processes that read rows until `close`. They also end when the thread that started them ends."""

    def __init__(self, name: str, answer: Answer, infos: Sequence[WorkerInfo], timeout_s: float, *, key: str):
        """name: of the Dataset. key: the setting of the number of workers, for messages. infos: one for each process.

        timeout_s: time after which a worker prints where an item hangs. Raises UserError if workers cannot be started.
        """
        if len(infos) > MAX_THREADS:
            raise UserError(f"{key} is {len(infos)}; use at most {MAX_THREADS}")
        self._name = name
        self._key = key
        self.processes: list[ForkProcess] = []
        self._is_warned = False
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        """Pipes to the idle workers."""
        # At the exit, multiprocessing would send SIGTERM, which workers ignore, and wait for ever.
        atexit.register(self.close)
        try:
            missing = list(infos)
            for _ in range(START_TRIES):
                missing = self._start([(answer, info, timeout_s) for info in missing])
            if missing:
                raise TimeoutError(0, "they do not begin to work")
        except OSError as error:
            self.close()
            raise UserError(f"{key} is {len(infos)}: {error.strerror}; use fewer of them") from None

    def _start(self, arguments: Sequence[tuple[Answer, WorkerInfo, float]]) -> list[WorkerInfo]:
        """Start a process for each tuple of arguments of `_work`. Returns the infos of processes that did not begin."""
        fork = multiprocessing.get_context("fork")
        started = []
        for each in arguments:
            pipe, its_pipe = fork.Pipe()
            process = fork.Process(target=_work, args=(its_pipe, *each), daemon=True)
            process.start()
            its_pipe.close()
            self.processes.append(process)
            started.append((process, pipe, each[1]))
        missing = []
        for process, pipe, info in started:
            if pipe.poll(START_S):
                with suppress(EOFError):  # the process was killed: `call` reports it
                    pipe.recv()
                self._idle.put(pipe)
            else:
                process.kill()
                process.join(CLOSE_S)
                self.processes.remove(process)
                missing.append(info)
        return missing

    def call(self, rows: np.ndarray, *others: object) -> Any:
        """Let an idle worker read these rows. Raises UserError if it fails or has died. Any thread may call this."""
        pipe = self._idle.get()
        try:
            pipe.send((rows, *others))
            if not pipe.poll(SLOW_S) and not self._is_warned:
                self._is_warned = True
                warn(
                    f"{self._name}: a worker has been reading for {SLOW_S:g} s, from row {rows[0]} on. If it hangs, as "
                    f"libraries with threads of their own (polars) do in a fork, use {self._key}=0",
                    own=True,
                )
            answer = pipe.recv()
        except (OSError, EOFError):
            raise UserError(
                f"one of {len(self.processes)} workers ({self._key}) was killed or crashed while it read {self._name}: "
                f"if memory ran out, use fewer; {self._key}=0 shows its error"
            ) from None
        finally:
            self._idle.put(pipe)
        if isinstance(answer, UserError):
            raise answer
        if isinstance(answer, str):
            raise UserError(f"{self._name}: {answer}; {self._key}=0 shows the whole traceback")
        return answer

    def close(self) -> None:
        """Kill the workers, which may hang, and have nothing to save. It is safe to call this twice."""
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
            process.join(CLOSE_S)
        self.processes.clear()


def _work(pipe: Connection, answer: Answer, info: WorkerInfo, timeout_s: float) -> None:
    """The main function of a worker: answer each request with rows, a UserError, or a line that describes an error."""
    torch_worker._worker_info = info  # for `get_worker_info`
    for number in STOP:  # torchrun sends these signals to all processes of a rank, but the rank finishes its step
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    lower_priority()
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    ForkingPickler.register(np.ndarray, _pickle_array)
    pipe.send(None)  # reports that the worker has begun
    while True:
        request = pipe.recv()
        faulthandler.dump_traceback_later(timeout_s, file=sys.__stderr__ or 2)  # shows where an item hangs
        try:
            pipe.send(answer(*request))
        except UserError as error:
            pipe.send(error)
        except Exception as error:
            pipe.send(describe_error(error))
        faulthandler.cancel_dump_traceback_later()


def describe_error(error: BaseException) -> str:
    """An error in the user's code, with its notes, its file and its line."""
    if isinstance(error, SyntaxError):  # its text has file and line
        return f"SyntaxError: {error}"
    line = " ".join("".join(format_exception_only(error)).split())
    places = [place for place in extract_tb(error.__traceback__) if not place.filename.startswith("<frozen")]
    return f"{line} ({Path(places[-1].filename).name}:{places[-1].lineno})"


def _pickle_array(array: np.ndarray) -> tuple[Callable[[Tensor], np.ndarray], tuple[Tensor]]:
    """Send an array as a tensor: torch passes tensors in shared memory instead of through the pipe."""
    return Tensor.numpy, (torch.from_numpy(array),)
