"""A torch Dataset of your own as a source of rows.

source.py   the source: its fields, and the names of its classes
items.py    the items of the Dataset, as rows of fixed types and shapes
workers.py  processes that read them, batch by batch
"""
