"""A short form of images.py: memory stays flat, and no damaged image crashes anything or goes unnamed."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.nightly
@pytest.mark.slow
def test_memory_is_flat_and_what_has_no_pixels_is_named():
    command = [sys.executable, str(Path(__file__).with_name("images.py")), "--images", "1500", "--damaged", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
