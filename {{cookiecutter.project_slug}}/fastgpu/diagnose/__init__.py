"""Finds out which part of the training loop is the slowest, and which setting would help. Used by diagnose.py only.

command.py     the command line
program.py     measures, concludes and prints
bench.py       builds the training of a config with the functions of train.py, to measure its parts
ceilings.py    measures how fast each part of the loop is without the others
verdict.py     concludes from the measurements which part is the bottleneck, and which change would help
result.py      the table, and the numbers as JSON
"""
