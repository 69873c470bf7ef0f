"""A short form of fuzz.py: no damaged file may do harm."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
@pytest.mark.slow
def test_every_damaged_file_is_refused_in_one_message_or_read_rightly():
    command = [sys.executable, str(Path(__file__).with_name("fuzz.py")), "--files", "60", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f" {outcome} " in done.stdout for outcome in ("refused", "accepted"))
