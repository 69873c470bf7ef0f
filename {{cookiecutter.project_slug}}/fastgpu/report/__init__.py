"""What a run did, from the files in its folder: its values (results.py), and report.html (page.py).

Only report.py imports this room: delete `fastgpu/report` and `report.py` if you do not need it.
"""
