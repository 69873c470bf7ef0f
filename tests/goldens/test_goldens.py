import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_rows_and_bytes_are_what_they_were():
    command = [sys.executable, str(Path(__file__).with_name("goldens.py")), "--only", "g1", "g2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert not done.returncode, done.stdout + done.stderr
