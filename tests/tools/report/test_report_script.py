"""The command `python report.py`."""

import csv
import os
import re
import signal
import subprocess
import sys

from harness import ROOT
from written_run import write_run


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "report.py", *map(str, arguments)]
    options = {"stdout": subprocess.PIPE} | options
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, check=False, **options)


def test_a_summary_and_a_page_then_runs_in_one_line_each_without_folders_that_have_no_points(tmp_path):
    runs = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a")]
    (tmp_path / "empty").mkdir()
    compared = run("--compare", *runs, tmp_path / "empty")
    assert not (runs[0] / "report.html").exists()
    shown = run(runs[0])
    assert (runs[0] / "report.html").exists()
    assert re.search(r"  data/wait_pct +3.008\n", shown.stdout)
    assert {(done.returncode, done.stderr) for done in (compared, shown)} == {(0, "")}
    assert len(compared.stdout.splitlines()) == 3
    assert all(str(folder) in compared.stdout for folder in runs)
    head, first, _ = csv.reader(run("--csv", *runs).stdout.splitlines())
    assert dict(zip(head, first, strict=True))["train/trained_rows_per_s"] == "24752.928"  # a number for a program


def test_a_reader_that_has_seen_enough_ends_it_without_a_message(tmp_path):
    """As `report.py --compare a b | head` does."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    done = run("--compare", write_run(tmp_path / "a"), stdout=write_end)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_what_cannot_be_read_or_written_is_one_line(tmp_path):
    (write_run(tmp_path / "a") / "report.html").mkdir()
    for folder, message in (
        ("nowhere", "nowhere has no points in metrics.jsonl; name the folder of a run, such as runs/first"),
        (tmp_path / "a", f"[Errno 21] Is a directory: '{tmp_path}/a/report.html'"),
    ):
        done = run(folder)
        assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_it_starts_without_torch():
    code = "import sys, report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
