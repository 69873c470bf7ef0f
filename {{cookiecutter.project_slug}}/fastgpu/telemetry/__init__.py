"""What a run measures, and how it is shown.

clock       rows per second, and the time that the device waits for rows
monitor     GPUs, CPUs, memory and disks during the run, read by a thread
log         where scalars go: metrics.jsonl, TensorBoard, Weights & Biases, the progress bar
"""
