"""Being asked to stop: a signal sets a flag, and the training loop looks at it between two steps.

SIGTERM, SIGINT, SIGUSR2    finish the step, save and stop; another one, later, ends the process at once
"""

import os
import signal
import time
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastgpu.process.world import World

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
ECHO_S = 2.0
"""Signals to stop that follow within this time are one request: torchrun passes on a signal that its ranks got, too."""
AGREE_S = 1.0
"""About how often the ranks ask each other whether a signal came, after the first two steps."""


class Agreement:
    """What signals ask of the ranks, as all of them know it. Every rank calls the same methods."""

    def __init__(self, world: "World", step: int):
        """Handle signals from this step to the end of the process. Call it in the main thread."""
        self.stop_signal = 0
        """Number of the signal that asked a rank for a stop, as all ranks know; 0: none did."""
        self._world = world
        self._own_signal = 0
        self._own_time = 0.0
        self._next_step = 0
        self._asked = step, time.monotonic()
        for number in STOP:
            signal.signal(number, self._handle)

    def is_asked_to_stop(self, step: int, *, at_once: bool = False) -> bool:
        """Whether a signal to any rank asks for a stop at this step. at_once: the ranks ask each other now."""
        if step < self._next_step and self._world.world_size > 1 and not at_once:
            return False
        asked_step, asked_time = self._asked
        self._asked = step, time.monotonic()
        answers = self._world.all_gather((self._asked[1] - asked_time, self._own_signal))
        seconds, self.stop_signal = map(max, zip(*answers, strict=True))  # so all ranks ask again at the same step
        self._next_step = step + max(1, int(AGREE_S * (step - asked_step) / max(seconds, 1e-9)))
        return self.stop_signal > 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal. It interrupts whatever Python is doing, so it must not print, lock or raise."""
        if not self._own_signal:
            self._own_signal = number
            self._own_time = time.monotonic()
        elif time.monotonic() - self._own_time > ECHO_S:  # the person, or the cluster, is out of patience
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
