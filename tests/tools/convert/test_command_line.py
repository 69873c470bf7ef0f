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


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("arrays x=x.npy y=y.npy --split 0.9 out.h5", "unrecognized arguments: out.h5"),
        ("images photos x.h5 --size 0", "0 should be HxW, such as 218x178, or one number for both"),
        ("images photos x.h5 --split 1.2", "1.2 should be a share, such as 0.9"),
        ("images photos x.h5 --keep-encoded --masks m", "--masks has no meaning for photos with these flags; drop it"),
        (
            "images photos x.h5 --keep-encoded --resize exact",
            "--resize has no meaning for photos with these flags; drop it",
        ),
        ("images photos x.h5 --keep-encoded --size 8x9", "--size should be one number, of the shorter side"),
        ("images photos x.h5 --binary-masks", "--binary-masks has no meaning for photos"),
        ("images photos x.h5 --split-by Usage", "--split-by has no meaning for photos with"),
        ("images x.csv x.h5 --masks m", "--masks has no meaning for x.csv with"),
        ("events x.csv x.h5 --columns who,what --above 3", "--columns, who,what, names no ratings; drop it"),
        ("events x.npz x.h5 --above 3", "--columns and --above are for a CSV"),
    ],
)
def test_mistakes_are_told_with_exit_code_2(tmp_path, convert, command, message):
    (tmp_path / "photos").mkdir()
    (tmp_path / "x.h5").touch()
    result = convert(command, code=2)
    assert message in result.stderr


def test_shares_are_of_train_val_and_perhaps_test():
    assert shares("0.75") == (0.75, 0.25)
    assert shares("0.8,0.1,0.1") == (0.8, 0.1, 0.1)
    for text in ("0", "1", "-0.5", "half", "0.5,0.6", "0.5,0.5,0", "0.4,0.2,0.2,0.2", "nan", ""):
        with pytest.raises((ArgumentTypeError, ValueError)):  # argparse makes a message of each
            shares(text)


def test_a_size_is_one_or_two_numbers():
    assert [size(text) for text in ("64", "218x178")] == [(64, 64), (218, 178)]
    for text in ("", "x", "0x3", "-1", "1.5", "3x32x32"):
        with pytest.raises((ArgumentTypeError, ValueError)):
            size(text)
