"""Being asked to stop: a signal sets a flag, and the training loop looks at it between two steps.

    SIGTERM, SIGINT, SIGUSR2    finish the step, save and stop; another one, later, ends the process at once

If torchrun dies, nothing tells its ranks. A thread sees that the parent has changed, sends SIGTERM, and ends the
process if that takes too long: a rank that lives on would hold its GPU and write to a run that has been restarted.
"""

import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from fastgpu.process.launch import Launch

if TYPE_CHECKING:
    from fastgpu.process.world import World

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
ECHO_S = 2.0
"""Signals to stop that follow within this time are one request: torchrun passes on a signal that its ranks got, too."""
LAST_WORDS_S = 5.0
"""Before the loop listens, a rank ends this long after SIGTERM."""
PARENT_POLL_S = 0.5
ORPHAN_S = 4.0
"""An orphan is ended this long after its parent died."""
AGREE_S = 1.0
"""About how often the ranks ask each other whether a signal came."""
FIRST_AGREEMENT = 10
"""Steps until the first of these questions, which tells how long a step takes."""

_ending: list[tuple[int, threading.Timer]] = []
"""The signal that `end_soon` has met, and the end that it will bring."""


def end_soon(number: int, frame: FrameType | None) -> None:
    """Handle a signal by ending the process a little later, unless `Agreement.listen` takes the request over.

    torchrun sends SIGTERM as soon as one rank has ended, and the others should have the time to say what they know.
    """
    timer = threading.Timer(LAST_WORDS_S, os._exit, (128 + number,))
    timer.daemon = True
    _ending.append((number, timer))
    timer.start()


class Agreement:
    """What signals ask of the ranks, as all of them know it. Every rank calls the same methods.

    The ranks ask each other about once a second, not after each step.
    """

    def __init__(self, world: "World"):
        self.stop_signal = 0
        """Number of the signal that asked a rank for a stop, as all ranks know; 0: none did."""
        self._world = world
        self._handlers: dict[signal.Signals, Any] = {}
        self._own_signal = 0
        self._own_time = 0.0
        self._next_step = 0
        self._asked_at = 0
        self._asked = 0.0

    def listen(self, step: int) -> None:
        """Handle signals from now on, at this step, and one that came a moment ago. Call it in the main thread."""
        self._handlers = {number: signal.signal(number, self._handle) for number in STOP}
        while _ending:
            number, timer = _ending.pop()
            timer.cancel()
            self._handle(number, None)
        self._asked = time.monotonic()
        self._asked_at = step
        self._next_step = step + FIRST_AGREEMENT

    def is_asked_to_stop(self, step: int) -> bool:
        """Whether a signal to any rank asks for a stop at this step."""
        if step < self._next_step and self._world.world_size > 1:
            return False
        now = time.monotonic()
        seconds = self._world.all_reduce_max(now - self._asked)  # all ranks ask again after the same number of steps
        steps_per_s = (step - self._asked_at) / max(seconds, 1e-9)
        self._next_step = step + max(1, int(AGREE_S * steps_per_s))
        self._asked = now
        self._asked_at = step
        self.stop_signal = int(self._world.all_reduce_max(self._own_signal))
        return self.stop_signal > 0

    def is_asked_to_stop_now(self) -> bool:
        """Whether a signal to any rank asks for a stop: asked at once, and again at the next step."""
        is_asked = self._world.all_reduce_max(self._own_signal) > 0
        if is_asked:
            self._next_step = 0
        return is_asked

    def outlive_run(self) -> None:
        """Keep the handlers when this is closed: the run is over, and a signal could only spoil its orderly end."""
        self._handlers = {}

    def close(self) -> None:
        """Handle signals as before."""
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._handlers = {}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal. It interrupts whatever Python is doing, so it must not print, lock or raise."""
        if not self._own_signal:
            self._own_signal = number
            self._own_time = time.monotonic()
        elif time.monotonic() - self._own_time > ECHO_S:  # the person, or the cluster, is out of patience
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def end_with_launcher(launch: Launch) -> None:
    """From now on, end this process if torchrun, which started it, has died: by SIGTERM, and soon by force."""
    if launch.is_launched:
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent and not _has_adopted(parent):
        time.sleep(PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_S)
    os._exit(128 + signal.SIGTERM)


def _has_adopted(parent: int) -> bool:
    """Whether torchrun died before this process looked at its parent. In a container, process 1 may be torchrun."""
    with suppress(OSError):
        return parent == 1 and b"python" not in Path("/proc/1/cmdline").read_bytes()
    return False
