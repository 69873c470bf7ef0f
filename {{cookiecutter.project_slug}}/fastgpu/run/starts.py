"""The progress rule: a run that was started three times without saving a checkpoint is not started again.

Whatever restarts a job (torchrun, Slurm, Kubernetes) cannot tell a fault that comes again from one that does not. A
file in the folder of the run has one line for each start since the last checkpoint.
"""

import socket
import time
from pathlib import Path

from fastgpu.process.atomic import open_own
from fastgpu.process.launch import UserError, warn

NAME = "starts.txt"
MAX_STARTS = 3


def refuse_without_progress(run: Path) -> None:
    """Raise UserError if the last three starts of the run in this folder have not led to a checkpoint."""
    path = run / NAME
    starts = path.read_text().splitlines() if path.exists() else []
    if len(starts) >= MAX_STARTS:
        raise UserError(
            f"{run} was started {len(starts)} times without saving a checkpoint, last at {starts[-1]}; see what ended "
            f"it, then delete {path} (if an epoch takes long, run.checkpoint_every_steps saves inside it)"
        )


def note_start(run: Path) -> None:
    """Write down that the run in this folder has been started."""
    try:
        with open_own(run / NAME, "a") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} on {socket.gethostname()}\n")
    except OSError as error:
        warn(f"cannot write {run / NAME} ({error}); training goes on")


def forget_starts(run: Path) -> None:
    """A checkpoint is saved, or the run is over: count from the beginning."""
    (run / NAME).unlink(missing_ok=True)
