"""--help of the scripts beside train.py, as a terminal of 80 columns shows it."""

import runpy
import sys

import pytest

from fastgpu.convert.command import commands
from support import PROJECT

PAGES = ["predict.py", "diagnose.py", "report.py", "convert.py", *(f"convert.py {name}" for name in commands())]


@pytest.mark.parametrize("page", PAGES)
def test_help_fits_80_columns_and_shows_a_whole_command(
    page: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    script, *command = page.split()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [script, *command, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(PROJECT / script), run_name="__main__")
    shown = capsys.readouterr().out
    assert not ended.value.code
    assert [line for line in shown.splitlines() if len(line) > 80] == []
    assert "%%" not in shown
    assert f"  python {page} " in shown.replace("\n", "\n  ")
