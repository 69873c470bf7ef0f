"""A short form of images.py: memory stays flat, and no damaged image crashes anything or goes unnamed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
IMAGES = Path(__file__).parent / "images.py"


@pytest.fixture(scope="module")
def tables() -> list[dict[str, list[str]]]:
    """{first cell: the other cells} of the two tables that it prints."""
    command = [sys.executable, str(IMAGES), "--images", "1500", "--damaged", "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Crashes: 0." in done.stdout
    blocks = [part for part in done.stdout.split("\n\n") if part.startswith("|")]
    lines = [[[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()] for block in blocks]
    return [{row[0]: row[1:] for row in rows} for rows in lines]


def test_memory_is_flat(tables):
    first, _, last = (float(cell.replace(",", "")) for cell in tables[0]["memory, MiB"])
    assert last < 1.25 * first


def test_what_has_no_pixels_is_named_and_both_agree(tables):
    for damage, (n_files, by_convert, by_training) in tables[1].items():
        if damage in ("truncated", "decompression bomb", "noise behind a header", "zeros"):
            assert n_files == by_convert == by_training == "5"
