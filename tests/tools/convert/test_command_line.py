"""The command line of convert.py: what it lists, what it takes, and how fast it answers."""

import subprocess
import sys
from argparse import ArgumentTypeError
from typing import get_args

import pytest
from convert import shares, size
from harness import ROOT

from fastgpu.convert.writer import Compression
from fastgpu.images.parts import Resize

COMMANDS = {"arrays", "dataset", "repack", "info", "check", "images", "pixels", "events"}


def test_help_lists_every_command_and_its_flags(convert):
    shown = convert("--help").stdout
    for command in COMMANDS:
        assert f"\n    {command} " in shown
        convert(command, "--help")
    assert f"--compression {{{','.join(get_args(Compression))}}}" in convert("arrays --help").stdout
    assert f"--resize {{{','.join(get_args(Resize))}}}" in convert("images --help").stdout


def test_help_and_mistakes_do_not_wait_for_torch():
    code = (
        "import sys, convert; convert.parse(['info', 'x']); sys.exit(bool({'torch', 'h5py', 'numpy'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_shares_and_sizes():
    assert [shares(text) for text in ("0.75", "0.8,0.1,0.1")] == [(0.75, 0.25), (0.8, 0.1, 0.1)]
    assert [size(text) for text in ("64", "218x178")] == [(64, 64), (218, 178)]
    wrong = [(shares, each) for each in ("0", "1", "-0.5", "half", "0.5,0.6", "0.5,0.5,0", "0.4,0.2,0.2,0.2", "nan")]
    for parse, text in [*wrong, *((size, each) for each in ("", "x", "0x3", "-1", "1.5", "3x32x32"))]:
        with pytest.raises((ArgumentTypeError, ValueError)):  # argparse makes a message of each
            parse(text)
