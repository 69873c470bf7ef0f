"""The tutorial of a project does what it says: its blocks are run in order, and what it shows is what is printed.

A block in the language `bash` is run. A block whose first line names a file, such as `# workloads/mynet.py`, is that
file. A block in the language `console` is a part of what the block before has printed: three dots stand for lines and
ends of lines that it leaves out, and numbers may differ. A block below `<!-- not run: reason -->` is skipped.
"""

import itertools
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from harness import run_to_end
from template import FOLDER, PROJECT, ROOT

NOT_RUN = {"", "needs the network", "needs GPUs", "serves until it is stopped"}
"""The reasons for which a block is not run."""
TRANSLATIONS = [
    ("README.md", "docs/ko/README.md"),
    (f"{FOLDER}/docs/tutorial.md", f"{FOLDER}/docs/ko/tutorial.md"),
]


class Block(NamedTuple):
    """A fenced block of a page. reason: why it is not run; empty if it is."""

    reason: str
    language: str
    text: str

    @property
    def target(self) -> str:
        """The file that the block is, if its first line names one."""
        named = re.match(r"# ([\w./-]+\.(?:py|yaml))\n", self.text)
        return named[1] if named else ""


def read_blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order."""
    pattern = r"(?ms)^(?:<!-- not run: ([^>]+?) -->\n)?```(\w*)\n(.*?)^```$"
    return [Block(*found) for found in re.findall(pattern, page.read_text())]


def normalised(line: str) -> str:
    """A line in which every number is 0 and every run of spaces one space, without the note on an equal value.

    Whether two epochs have equal values depends on the last digits, and these on the CPU.
    """
    line = re.sub(r"; \S+ equals that of epoch \d+, (which stays the best one|but the loss is .* best now)", "", line)
    return re.sub(r"\s+", " ", re.sub(r"\d[\d,.]*(?:e[+-]?\d+)?", "0", line)).strip()


def missing_lines(shown: str, printed: str) -> list[str]:
    """The lines of a console block that the command did not print, or not in this order."""
    remaining = iter([normalised(line) for line in re.split(r"[\n\r]", printed)])
    missing = []
    for line in shown.splitlines():
        start, dots, _ = normalised(line).partition("...")
        fits = (lambda text, start=start: text.startswith(start.strip())) if dots else start.__eq__
        if (start or not dots) and not any(map(fits, remaining)):
            missing.append(line)
    return missing


def follow(project: Path, blocks: list[Block]) -> None:
    """Do what a page says, in its order, as a person types it, in the environment of these tests."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {"PATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    for block in blocks:
        if block.reason:
            continue
        if block.target:
            (project / block.target).write_text(block.text)
        elif block.language == "bash":
            done = run_to_end(["bash", "-euc", f"exec 2>&1; {block.text}"], project, **environment)
            assert done.returncode == 0, block.text + done.stdout
        elif block.language == "console":
            assert not missing_lines(block.text, done.stdout), done.stdout


@pytest.mark.slow
def test_every_step_of_the_tutorial_works(own_copy):
    project = own_copy("images")
    follow(project, read_blocks(project / "docs/tutorial.md"))


@pytest.mark.slow
def test_the_steps_that_only_users_and_items_have_work(own_copy, baked):
    known = read_blocks(baked("images") / "docs/tutorial.md")
    project = own_copy("recsys")
    blocks = [*read_blocks(project / "docs/tutorial.md"), Block("", "", "")]
    own = [
        block
        for block, following in itertools.pairwise(blocks)
        if block not in known or (following.language == "console" and following not in known)
    ]
    assert {block.language for block in own} == {"bash", "console", "python"}
    follow(project, own)


def test_blocks_that_are_not_run_say_why():
    blocks = read_blocks(PROJECT / "docs/tutorial.md")
    assert {block.reason for block in blocks} <= NOT_RUN
    assert all(block.target or block.language in ("bash", "console") for block in blocks)


def test_output_is_compared_line_by_line_without_numbers():
    printed = "epoch 1/5 loss 0.31, 2,048 rows/s\ndone: epoch 5, runs/20261122-034307\n"
    assert missing_lines("epoch 2/5 loss 1.5, 7 rows/s\n...\ndone: ...\n", printed) == []
    assert missing_lines("done: ...\nepoch 2/5 loss 1.5, 7 rows/s\n", printed) == ["epoch 2/5 loss 1.5, 7 rows/s"]
    assert missing_lines("epoch 1/5 top1 0.31, 2,048 rows/s\n", printed) != []


@pytest.mark.parametrize(("original", "translation"), TRANSLATIONS)
def test_a_translation_has_the_same_commands(original, translation):
    assert [block.text for block in read_blocks(ROOT / original)] == [
        block.text for block in read_blocks(ROOT / translation)
    ]
