"""A torch Dataset of your own as a source of rows.

items.py    the items of the Dataset, as columns of rows
classes.py  what the Dataset says about its classes
source.py   the source: its fields
workers.py  the processes that read it
"""
