"""What a run measures, and how it is shown.

clock       rows per second, and the time that the device waits for rows
monitor     GPUs, CPUs, memory and disks during the run, read by a thread
tags        the table of all scalars: name, unit, title, chart
log         where scalars go: metrics.jsonl, TensorBoard, the progress bar
tensorboard TensorBoard's event files, and Weights & Biases
report      what a run did: values, verdict, and how runs differ
page        report.html and the page that compares runs
"""
