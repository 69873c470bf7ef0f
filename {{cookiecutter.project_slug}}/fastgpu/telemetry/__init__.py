"""Measurements of a run, and where they are logged.

clock       rows per second, and the time that the device waits for rows
monitor     counters of the machine: GPUs, CPUs, memory, disks
tensorboard the outputs of scalars: metrics.jsonl, TensorBoard, Weights & Biases, the progress bar
"""

from fastgpu.telemetry.clock import Clock
from fastgpu.telemetry.monitor import Monitor
from fastgpu.telemetry.tensorboard import TensorBoard

__all__ = ["Clock", "Monitor", "TensorBoard"]
