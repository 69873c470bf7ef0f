"""convert.py in this process: its output and its exit code."""

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import convert as convert_script
import pytest


class Result(NamedTuple):
    """What a command printed."""

    stdout: str
    stderr: str


@pytest.fixture
def convert(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Result]:
    """convert("images photos out.h5") -> Result. The command runs in tmp_path and ends with the exit code `code`."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, code: int = 0) -> Result:
        capsys.readouterr()
        words = [word for each in arguments for word in (shlex.split(each) if isinstance(each, str) else [str(each)])]
        try:
            found = convert_script.main(convert_script.parse(words))
        except SystemExit as error:
            found = error.code
        output = capsys.readouterr()
        assert found == code, output.err
        return Result(output.out, output.err)

    return run
