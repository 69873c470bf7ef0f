"""A torch Dataset of your own as a source of rows.

items.py    the items of the Dataset, as columns of rows
source.py   the source: its fields
workers.py  the processes that read it
"""
