"""The tutorial of a project does what it says: its blocks are run in order, and what it shows is what is printed.

A block in the language `bash` is run. A block whose first line names a file, such as `# workloads/mynet.py`, is that
file. A block in the language `console` is a part of what the block before has printed: three dots stand for lines and
ends of lines that it leaves out, and numbers may differ. A block below `<!-- not run: reason -->` is skipped.
"""

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from template import FOLDER, PROJECT, ROOT
from test_readme import fenced_blocks

NOT_RUN = {"needs the network", "needs GPUs", "serves until it is stopped"}
"""The reasons for which a block is not run."""
TRANSLATIONS = [
    ("README.md", "docs/ko/README.md"),
    (f"{FOLDER}/docs/tutorial.md", f"{FOLDER}/docs/ko/tutorial.md"),
]


class Block(NamedTuple):
    """A fenced block of a page."""

    language: str
    text: str
    reason: str
    """Why it is not run; empty if it is."""
    line: int

    @property
    def target(self) -> str:
        """The file that the block is, if its first line names one."""
        named = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", self.text)
        return named[1] if named else ""


def read_blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    pattern = r"(?ms)^(?:<!-- not run: ([^>]+?) -->\n)?```(\w*)\n(.*?)^```$"
    return [
        Block(match[2], match[3], match[1] or "", page.count("\n", 0, match.start(3)))
        for match in re.finditer(pattern, page)
    ]


def normalised(line: str) -> str:
    """A line in which every number is 0 and every run of spaces one space, without the note on an equal value.

    Whether two epochs have equal values depends on the last digits, and these on the CPU.
    """
    decides = "(which stays the best one|but the loss is lower: this one is the best now)"
    line = re.sub(rf"; \S+ equals that of epoch \d+, {decides}", "", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*(?:e[+-]?\d+)?", "0", line)).strip()


def missing_lines(shown: str, printed: str) -> list[str]:
    """The lines of a console block that the command did not print, or not in this order."""
    remaining = [normalised(line) for line in re.split(r"[\n\r]", printed)]
    missing = []
    for line in shown.splitlines():
        start, dots, _ = normalised(line).partition("...")
        fits = (lambda text, start=start: text.startswith(start.strip())) if dots else start.__eq__
        found = next((number for number, text in enumerate(remaining) if fits(text)), None)
        if found is None:
            missing.append(line)
        else:
            remaining = remaining[found + (1 if start else 0) :]
    return missing


def run_block(project: Path, block: Block) -> str:
    """Run the commands of a block as a person types them, in the environment of these tests. Returns their output."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-eu", "-o", "pipefail", "-c", block.text],
        cwd=project,
        env=os.environ | {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, f"line {block.line}: {block.text}{done.stdout}"
    return done.stdout


def follow(project: Path, blocks: list[Block]) -> None:
    """Do what a page says, in its order."""
    printed = ""
    for block in blocks:
        if block.reason:
            continue
        if block.target:
            (project / block.target).write_text(block.text)
        elif block.language == "bash":
            printed = run_block(project, block)
        elif block.language == "console":
            missing = missing_lines(block.text, printed)
            assert not missing, f"line {block.line}: not printed: {missing}\n{printed}"


def blocks_of(project: Path) -> list[Block]:
    """The blocks of the tutorial of a project."""
    return read_blocks((project / "docs/tutorial.md").read_text())


@pytest.mark.slow
def test_every_step_of_the_tutorial_works(own_copy):
    project = own_copy("images")
    follow(project, blocks_of(project))


@pytest.mark.slow
def test_the_steps_that_only_users_and_items_have_work(own_copy, baked):
    project = own_copy("recsys")
    known = {block.text for block in blocks_of(baked("images"))}
    blocks = blocks_of(project)
    own = []
    for block, following in itertools.pairwise([*blocks, None]):
        prints_for_own = following and following.language == "console" and following.text not in known
        if block.text not in known or prints_for_own:
            own.append(block)
    assert {block.language for block in own} == {"bash", "console", "python"}
    follow(project, own)


def test_blocks_that_are_not_run_say_why():
    blocks = read_blocks((PROJECT / "docs/tutorial.md").read_text())
    assert {block.reason for block in blocks} - {""} <= NOT_RUN
    assert [block.line for block in blocks if block.language not in ("bash", "console") and not block.target] == []


def test_output_is_compared_line_by_line_without_numbers():
    printed = "epoch 1/5 loss 0.31, 2,048 rows/s\ndone: epoch 5, runs/20261122-034307\n"
    assert missing_lines("epoch 2/5 loss 1.5, 7 rows/s\n...\ndone: ...\n", printed) == []
    assert missing_lines("done: ...\nepoch 2/5 loss 1.5, 7 rows/s\n", printed) == ["epoch 2/5 loss 1.5, 7 rows/s"]
    assert missing_lines("epoch 1/5 top1 0.31, 2,048 rows/s\n", printed) != []
    equal = "epoch 2/5 val/top1 100; val/top1 equals that of epoch 1, which stays the best one, 00:01 left"
    assert missing_lines("epoch 2/5 val/top1 98.6, 00:03 left\n", equal) == []


@pytest.mark.parametrize(("original", "translation"), TRANSLATIONS)
def test_a_translation_has_the_same_commands(original, translation):
    blocks = [fenced_blocks((ROOT / name).read_text()) for name in (original, translation)]
    assert blocks[0] == blocks[1]
