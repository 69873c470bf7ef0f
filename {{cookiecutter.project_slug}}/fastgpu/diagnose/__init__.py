"""The parts of diagnose.py. No other program needs this room: it can be deleted with its script and tests."""
