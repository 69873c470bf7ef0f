"""The commands of convert.py. No other program needs this room: it can be deleted with its script and tests."""
