"""Being asked to stop or to save: signals set flags, and the training loop looks at them between two steps.

    SIGTERM, SIGINT, SIGUSR2    finish the step, save and stop; the second one ends the process at once
    SIGUSR1                     finish the step, save and go on

If torchrun dies, nothing tells its ranks. A thread sees that the parent has changed, asks for a stop, and ends the
process if that takes too long: a rank that lives on would hold its GPU and write to a run that has been restarted.
"""

import os
import signal
import threading
import time
from types import FrameType

STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
SAVE = signal.SIGUSR1
PARENT_POLL_S = 0.5
ORPHAN_S = 4.0
"""An orphan is ended this long after its parent died."""


class Requests:
    """What this process has been asked to do. There is one, made by `listen`."""

    def __init__(self) -> None:
        self.stop_signal = 0
        """Number of the signal that asked for a stop; 0: none did."""
        self.save = False
        """Whether a signal asked for a checkpoint since this was last set to False."""

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember a signal. It interrupts whatever Python is doing, so it must not print, lock or raise."""
        if number == SAVE:
            self.save = True
        elif self.stop_signal:  # asked before: the person, or the cluster, is out of patience
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        else:
            self.stop_signal = number


def listen(*, watch_parent: bool) -> Requests:
    """Handle the signals above from now on. Call it in the main thread.

    watch_parent: whether the parent is a launcher without which this process must not go on.
    """
    requests = Requests()
    for number in (*STOP, SAVE):
        signal.signal(number, requests.handle)
    if watch_parent:
        threading.Thread(target=_end_with_parent, args=(os.getppid(), requests), daemon=True).start()
    return requests


def _end_with_parent(parent: int, requests: Requests) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    requests.stop_signal = requests.stop_signal or signal.SIGTERM
    time.sleep(ORPHAN_S)
    os._exit(128 + signal.SIGTERM)
