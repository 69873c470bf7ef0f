"""convert.py in this process: its output and its exit code."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import convert as convert_script
import pytest


class Result(NamedTuple):
    """What a command left behind."""

    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """convert("images", "photos", "out.h5") -> Result. The command runs in tmp_path."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path) -> Result:
        capsys.readouterr()
        try:
            code = convert_script.main(convert_script.parse([str(argument) for argument in arguments]))
        except SystemExit as error:
            code = error.code
        output = capsys.readouterr()
        return Result(code, output.out, output.err)

    return run
