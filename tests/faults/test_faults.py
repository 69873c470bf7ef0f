"""Short forms of fuzz.py and images.py."""

import subprocess
import sys
from pathlib import Path

import pytest


def run(script: str, *words: str) -> str:
    command = [sys.executable, str(Path(__file__).with_name(script)), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.nightly
@pytest.mark.slow
def test_every_damaged_file_is_refused_in_one_message_or_read_rightly():
    printed = run("fuzz.py", "--files", "60")
    assert all(f" {outcome} " in printed for outcome in ("refused", "accepted"))


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_is_flat():
    run("images.py", "--images", "4000")
