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


def test_a_summary_and_a_page(tmp_path):
    done = run(write_run(tmp_path / "a"))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"  data/wait_pct +3.008\n", done.stdout)
    assert (tmp_path / "a" / "report.html").exists()


def test_runs_are_compared_and_folders_without_points_are_left_out(tmp_path):
    runs = [write_run(tmp_path / "x" / "a"), write_run(tmp_path / "y" / "a")]
    (tmp_path / "empty").mkdir()
    done = run("--compare", *runs, tmp_path / "empty")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 3
    assert all(str(folder) in done.stdout for folder in runs)
    assert not (runs[0] / "report.html").exists()
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
    (tmp_path / "metrics.jsonl").mkdir()
    (write_run(tmp_path / "a") / "report.html").mkdir()
    for folder, message in (
        ("nowhere", "nowhere has no points in metrics.jsonl; name the folder of a run, such as runs/first"),
        (tmp_path, f"[Errno 21] Is a directory: '{tmp_path}/metrics.jsonl'"),
        (tmp_path / "a", f"[Errno 21] Is a directory: '{tmp_path}/a/report.html'"),
    ):
        done = run(folder)
        assert (done.returncode, done.stderr) == (2, f"error: {message}\n")


def test_it_starts_without_torch():
    code = "import sys, report; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
