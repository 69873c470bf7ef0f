"""What a run did, from the files in its folder: its values (results.py), and where its time went (ledger.py)."""
