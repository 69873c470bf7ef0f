"""Worker processes that read the items of a Dataset. Each waits at its end of a pipe for numbers of rows.

They are forks of this process: a fork takes every Dataset unmodified, with its open files and lambdas, and gives its
first rows after 0.06 s, where a forkserver needs 3.8 s and pickles the Dataset for each worker. In return they have to
be started before this process uses CUDA or NCCL, neither of which survives a fork.
"""

import atexit
import faulthandler
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from queue import SimpleQueue
from traceback import extract_tb, format_exception_only

import numpy as np
import torch
from torch import Tensor

from fastgpu.dataset.items import Columns
from fastgpu.process.launch import UserError, end_with_parent, warn
from fastgpu.process.signals import STOP

READERS_NICE = 5
"""Workers and reader threads have a lower priority than the training loop, by so many steps of nice(1)."""
SLOW_S = 30.0
"""After this time, a person is told that a worker may hang. Only `loader.timeout_s` ends the run."""
CLOSE_S = 3.0
"""How long closing waits for the end of workers and threads. Those that hang are left behind."""
ReadRows = Callable[[np.ndarray, int, int, int], Columns]
"""(row numbers, seed, epoch, repeat) -> columns of these rows, as `ItemSource.read_rows`."""


class Workers:
    """Processes that read rows until `close`. They also end with the thread that made them."""

    def __init__(self, name: str, read_rows: ReadRows, n_workers: int, timeout_s: float):
        """name: of the Dataset, for messages. timeout_s: after which a worker prints where an item hangs.

        Raises UserError if the processes cannot be started.
        """
        self._name = name
        self.processes: list[ForkProcess] = []
        self._is_warned = False
        self._idle: SimpleQueue[Connection] = SimpleQueue()
        """Pipes to the workers that have nothing to do."""
        # multiprocessing would send SIGTERM at the exit, which workers ignore, and wait for ever.
        atexit.register(self.close)
        fork = multiprocessing.get_context("fork")
        try:
            for _ in range(n_workers):
                pipe, its_pipe = fork.Pipe()
                process = fork.Process(target=_work, args=(its_pipe, name, read_rows, timeout_s), daemon=True)
                process.start()
                its_pipe.close()
                self.processes.append(process)
                self._idle.put(pipe)
        except OSError as error:
            self.close()
            raise UserError(f"loader.num_workers is {n_workers}: {error.strerror}; use fewer of them") from None

    def read_rows(self, rows: np.ndarray, seed: int, epoch: int, repeat: int) -> Columns:
        """Let an idle worker read these rows. Raises UserError if it cannot, or died. Any thread may call this."""
        pipe = self._idle.get()
        try:
            pipe.send((rows, seed, epoch, repeat))
            if not pipe.poll(SLOW_S) and not self._is_warned:
                self._is_warned = True
                warn(
                    f"{self._name}: a worker has been reading for {SLOW_S:g} s, from row {rows[0]} on. If it hangs, as "
                    "libraries with threads of their own (polars) do in a fork, use loader.num_workers=0",
                    own=True,
                )
            answer: Columns | str = pipe.recv()
        except (OSError, EOFError):
            raise UserError(
                f"one of the loader.num_workers ({len(self.processes)}) was killed or crashed reading {self._name}: "
                "if memory ran out use fewer; loader.num_workers=0 shows its error"
            ) from None
        finally:
            self._idle.put(pipe)
        if isinstance(answer, str):
            raise UserError(answer)
        return answer

    def close(self) -> None:
        """Kill the workers: they may hang, or be stopped, and have nothing to save. It is safe to call this twice."""
        atexit.unregister(self.close)
        for process in self.processes:
            process.kill()
            process.join(CLOSE_S)
        self.processes.clear()


def _work(pipe: Connection, name: str, read_rows: ReadRows, timeout_s: float) -> None:
    """The program of a worker: answer each request with columns, or with a line that says what is wrong."""
    for number in STOP:  # torchrun sends them to all processes of a rank, which has a step to finish
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()
    os.nice(READERS_NICE)
    torch.set_num_threads(1)  # those of OpenMP do not survive a fork
    ForkingPickler.register(np.ndarray, _pickle_array)
    while True:
        request = pipe.recv()
        faulthandler.dump_traceback_later(timeout_s, file=sys.__stderr__ or 2)  # shows where an item hangs
        try:
            pipe.send(read_rows(*request))
        except UserError as error:
            pipe.send(str(error))
        except Exception as error:
            pipe.send(f"{name}: {describe_error(error)}; loader.num_workers=0 shows the whole traceback")
        faulthandler.cancel_dump_traceback_later()


def describe_error(error: BaseException) -> str:
    """An error of a person's code with its notes, its file and its line."""
    if isinstance(error, SyntaxError):  # which names them
        return f"SyntaxError: {error}"
    line = " ".join("".join(format_exception_only(error)).split())
    places = [place for place in extract_tb(error.__traceback__) if not place.filename.startswith("<frozen")]
    return f"{line} ({Path(places[-1].filename).name}:{places[-1].lineno})"


def _pickle_array(array: np.ndarray) -> tuple[Callable[[Tensor], np.ndarray], tuple[Tensor]]:
    """Send an array as a tensor: torch passes tensors on in shared memory, and not through the pipe."""
    return Tensor.numpy, (torch.from_numpy(array),)
