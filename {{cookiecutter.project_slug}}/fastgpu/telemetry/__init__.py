"""What a run leaves behind: measurements, logs, reports and checkpoints."""
