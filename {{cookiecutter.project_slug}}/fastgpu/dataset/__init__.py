"""Your own torch Dataset as a source of rows.

draws.py    the random numbers that the items draw
items.py    the items of the Dataset, as columns of rows
source.py   the Dataset as a source of rows: its fields, and how its items are read
workers.py  the worker processes that read the items
"""
