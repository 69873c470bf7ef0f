"""Signals to any rank, on which all ranks act at the same step."""

from fastgpu.process.signals import Requests
from fastgpu.process.world import World

AGREE_S = 1.0
"""About how often the ranks ask each other whether a signal came."""
FIRST_AGREEMENTS = 10
"""Steps between these questions until the first report tells how long a step takes."""


class Agreement:
    """Asks the ranks about once a second, not after each step, what signals want. Every rank calls the same methods."""

    def __init__(self, world: World):
        self.stop_signal = 0
        """Number of the signal that asked a rank for a stop, as all ranks know; 0: none did."""
        self._world = world
        self._requests = Requests()
        self._next_step = 0
        self._steps_between = FIRST_AGREEMENTS

    def listen(self) -> None:
        """Handle signals from now on. Call it in the main thread."""
        self._requests.listen()

    def set_pace(self, steps_per_s: float) -> None:
        """Tell how fast the steps are, on every rank the same."""
        self._steps_between = max(1, int(AGREE_S * steps_per_s))

    def is_asked_to_stop(self, step: int) -> bool:
        """Whether a signal to any rank asks for a stop at this step."""
        if step < self._next_step and self._world.world_size > 1:
            return False
        self._next_step = step + self._steps_between
        self.stop_signal = int(self._world.all_reduce_max(self._requests.stop_signal))
        return self.stop_signal > 0

    def is_asked_to_stop_now(self) -> bool:
        """Whether a signal to any rank asks for a stop: asked at once, and again at the next step."""
        is_asked = self._world.all_reduce_max(float(self._requests.stop_signal > 0)) > 0
        if is_asked:
            self._next_step = 0
        return is_asked

    def outlive_run(self) -> None:
        """Keep the handlers: the run is over, and a signal could only spoil its orderly end."""
        self._requests.outlive_run()

    def close(self) -> None:
        """Handle signals as before."""
        self._requests.close()
