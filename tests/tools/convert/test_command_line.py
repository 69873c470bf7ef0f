"""The commands that convert.py has are those of its room and of each folder in it."""

import subprocess
import sys
from typing import get_args

from harness import ROOT

from fastgpu.convert.reader import OnError
from fastgpu.convert.writer import Compression

SHARED = {"arrays", "repack", "dataset", "info", "check"}


def listed(help_text: str) -> set[str]:
    """The commands in the output of --help."""
    lines = help_text.partition("COMMAND\n")[2].partition("\n\n")[0].splitlines()
    return {line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "}


def test_help_lists_every_command_with_an_example(convert):
    result = convert("--help")
    assert result.returncode == 0
    commands = listed(result.stdout)
    assert commands >= SHARED
    for command in commands:
        assert f"python convert.py {command} " in result.stdout
        assert convert(command, "--help").returncode == 0


def test_help_and_mistakes_do_not_wait_for_torch():
    code = (
        "import sys, convert; convert.parse(['info', 'x']); sys.exit(bool({'torch', 'h5py', 'numpy'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_flags_allow_what_the_code_knows(convert):
    for command in listed(convert("--help").stdout):
        text = convert(command, "--help").stdout
        for flag, kind in (("--compression", Compression), ("--on-error", OnError)):
            assert f"{flag} {{" not in text or f"{flag} {{{','.join(get_args(kind))}}}" in text
    assert "--compression {" in convert("arrays", "--help").stdout


def test_where_flags_belong_is_told(convert):
    result = convert("arrays", "x=x.npy", "y=y.npy", "--split", "0.9", "out.h5")
    assert result.returncode == 2
    assert "unrecognized arguments: out.h5; put flags before SOURCE or behind TARGET" in result.stderr
