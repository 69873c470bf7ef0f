"""A short form of fuzz.py: no damaged file may do harm."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
FUZZ = Path(__file__).parent / "fuzz.py"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, dict[str, int]]:
    """{kind: {outcome: number of files}}. Every kind occurs."""
    command = [sys.executable, str(FUZZ), "--files", "60", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "damaged files" in done.stdout, done.stderr
    lines = done.stdout.split("\n\n")[1].splitlines()
    header, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0]: dict(zip(header[1:], map(int, row[1:]), strict=True)) for row in rows}


def test_no_wrong_rows_no_crash_no_hang_and_nothing_left(outcomes):
    for kind, numbers in outcomes.items():
        for outcome in ("wrong rows", "crash", "hang", "memory", "leftovers"):
            assert numbers[outcome] == 0, (kind, outcome)
    assert outcomes["all"]["refused"] > outcomes["all"]["accepted"] > 0


def test_every_refusal_is_a_message(outcomes):
    for kind, numbers in outcomes.items():
        assert numbers["exception"] == numbers["endless message"] == 0, kind
