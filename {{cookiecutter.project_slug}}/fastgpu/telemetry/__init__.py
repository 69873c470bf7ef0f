"""What a run measures, and how it is shown.

clock       rows per second, and the time that the device waits for rows
monitor     GPUs, CPUs and memory of the machine
tensorboard where scalars go: metrics.jsonl, TensorBoard, Weights & Biases, the progress bar
"""

from fastgpu.telemetry.clock import Clock
from fastgpu.telemetry.monitor import Monitor
from fastgpu.telemetry.tensorboard import TensorBoard

__all__ = ["Clock", "Monitor", "TensorBoard"]
