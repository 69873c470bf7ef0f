"""Command lines made of dataclasses."""

from argparse import ArgumentTypeError
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from fastgpu.process.commands import argument, flag, parse, parse_command, parse_known
from fastgpu.process.launch import SharedError


def even(text: str) -> int:
    """An even number."""
    if int(text) % 2:
        raise ArgumentTypeError(f"{text} should be even")
    return int(text)


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is written."""

    target: Path = argument("file to write")
    force: bool = flag("replace it", default=False)


@dataclass(frozen=True, kw_only=True)
class Copy(Target):
    """Copy files."""

    sources: tuple[str, ...] = argument("files to read", default=())
    how: Literal["fast", "slow"] = flag("speed", default="fast")
    share: float | None = flag("100 %% of it", metavar="{0.5,50%}")
    block_rows: int = flag("rows", "-b", "--block", type=even, default=2)


def copy(line: str) -> Copy:
    """The command of one line."""
    return parse(Copy, line.split(), program="copy.py")


def test_parse_gives_each_field_its_type():
    expected = Copy(target=Path("x"), force=True, sources=("a", "b"), how="slow", share=0.5, block_rows=4)
    assert copy("a --force b x --how slow --share 0.5 -b 4") == expected  # the target is inherited, so it comes last
    assert copy("x") == Copy(target=Path("x"), force=False, sources=(), how="fast", share=None, block_rows=2)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("", "the following arguments are required: TARGET"),
        ("x --how x", r"--how: invalid choice: 'x' \(choose from"),
        ("x --share x", "--share: invalid float value: 'x'"),
        ("x -b 3", "-b/--block: 3 should be even"),
        ("x --forc", "unrecognized arguments: --forc"),
    ],
)
def test_parse_says_a_mistake_in_one_line(line: str, text: str):
    with pytest.raises(SharedError, match=rf"^{text}.*; python copy.py --help lists what it takes$"):
        copy(line)


def test_parse_known_returns_the_other_words():
    assert parse_known(Target, ["x", "a.b=1", "--config", "c"], program="x.py") == (
        Target(target=Path("x"), force=False),
        ["a.b=1", "--config", "c"],
    )


def test_parse_command_chooses_the_dataclass(capsys: pytest.CaptureFixture[str]):
    kinds = {"copy": Copy, "touch": Target}
    assert parse_command(kinds, ["touch", "x"], program="files.py", text="") == Target(target=Path("x"), force=False)
    with pytest.raises(SharedError, match=r"; python files.py copy --help lists"):
        parse_command(kinds, ["copy", "x", "--no"], program="files.py", text="")
    with pytest.raises(SystemExit, match="0"):
        parse_command(kinds, ["copy", "--help"], program="files.py", text="")
    shown = capsys.readouterr().out
    assert "100 % of it" in shown
    assert shown.count("[--share {0.5,50%}]") == 1
