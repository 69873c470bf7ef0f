"""One training run, from its folder to its last checkpoint.

run          a run as the training loop uses it: its folder, position and checkpoints, and the signals to it
record       what a run is: in its folder, in model.json, for the other ranks, and for a person
checkpoint   saving and resuming: complete or absent, verified when read; the model to use
"""

from fastgpu.run.checkpoint import Stateful
from fastgpu.run.record import describe_model, identify_job
from fastgpu.run.run import Run, saved_canonical_ranks

__all__ = ["Run", "Stateful", "describe_model", "identify_job", "saved_canonical_ranks"]
