"""A report about a run from the files in its folder: its values (results.py), and its wall time (ledger.py)."""
