"""The parts of predict.py. docs/python.md shows how your own programs use them."""
