import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fastgpu.convert.command import parse, run
from fastgpu.process.launch import exit_with_message


@pytest.fixture
def convert(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """convert("images photos out.h5") is that command in tmp_path, in this process. Returns what it prints, `out` and
    `err`. It ends with the exit code `code`."""
    monkeypatch.chdir(tmp_path)

    def convert(*arguments: str | Path, code: int = 0) -> Any:
        capsys.readouterr()
        try:
            with exit_with_message(OSError):
                found = run(parse(shlex.split(" ".join(map(str, arguments)))))
        except SystemExit as error:
            found = error.code
        printed = capsys.readouterr()
        assert found == code, printed.err
        return printed

    return convert
