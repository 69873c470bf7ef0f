"""--help of all scripts, as a terminal of 80 columns shows it."""

import re
import sys

import pytest

from fastgpu.convert.command import commands
from support import PROJECT
from support.ranks import printed_by

PAGES = ["train.py", "predict.py", "diagnose.py", "report.py", "convert.py"]
PAGES += [f"convert.py {name}" for name in commands()]


@pytest.mark.parametrize("page", PAGES)
def test_help_fits_80_columns_and_shows_a_whole_command(page: str):
    shown = printed_by([sys.executable, *page.split(), "--help"], PROJECT, COLUMNS="80")
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "%%" not in shown
    assert re.search(rf"(?m)^ *python {page}\b", shown)
