"""What a run did, from the files in its folder: a table, a page, and how runs differ. Used by report.py only.

Nothing else imports this room: delete `fastgpu/report` and `report.py` if you do not need it.

    results.py   what a run did: its values, its best metric, what differs between runs
    page.py      report.html
"""
