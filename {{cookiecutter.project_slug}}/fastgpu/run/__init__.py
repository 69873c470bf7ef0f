"""One training run, from its folder to its last checkpoint.

run          a run as the training loop uses it: its folder, position and checkpoints, and the signals to it
record       records of a run: files in its folder, model.json, and the settings that ranks compare
checkpoint   saving and resuming: complete or absent, verified when read; the model to use
saver        saves in a thread
"""

from fastgpu.run.checkpoint import Stateful
from fastgpu.run.record import describe_model, identify_job
from fastgpu.run.run import Run, saved_canonical_ranks

__all__ = ["Run", "Stateful", "describe_model", "identify_job", "saved_canonical_ranks"]
