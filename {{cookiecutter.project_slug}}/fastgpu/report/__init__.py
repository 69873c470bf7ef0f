"""What a run did, from the files in its folder: its values (results.py), and report.html (page.py). Only report.py
imports this room: delete both if you do not need them."""
