"""A torch Dataset of your own as a source of rows.

draws.py    the random numbers that the items draw
items.py    the items of the Dataset, as columns of rows
source.py   the source: its fields
workers.py  the processes that read it
"""
