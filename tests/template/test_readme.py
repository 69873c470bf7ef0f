"""What the documents show exists: the trees of files, the commands and the links."""

import functools
import itertools
import re
import sys
from pathlib import Path

import pytest
from harness import run_to_end
from template import FOLDER, PROJECT, ROOT, WORKLOAD_ANSWERS, project_files, tracked

DOCUMENTS = [name for name in tracked() if name.endswith(".md") and not name.startswith("bench/results/")]


@pytest.mark.parametrize("answer", WORKLOAD_ANSWERS)
def test_the_tree_in_a_project_is_the_tree_on_disk(baked, answer):
    project = baked(answer)
    section = (project / "docs/code.md").read_text().split("## What is where\n")[1]
    shown = set(re.findall(r"(?<![\w/])\w+(?:/|\.py|\.yaml)", section.split("```")[1]))
    assert {name for name in shown if not any(project.rglob(name.rstrip("/")))} == set()
    folders = {f"{path.name}/" for path in project.iterdir() if path.is_dir() and not path.name.startswith(".")}
    rooms = {f"{path.parent.name}/" for path in project.glob("fastgpu/*/__init__.py")}
    assert {path.name for path in project.glob("*.py")} | folders | rooms <= shown


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    exist = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    assert set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", text)) <= exist
    assert set(re.findall(r"(?m)^# make ([a-z-]+)", makefile)) == exist - {"clean"}


@functools.cache
def convert_commands(project: Path) -> set[str]:
    """The sub-commands of convert.py."""
    shown = run_to_end([sys.executable, "convert.py", "--help"], project).stdout
    return set(re.findall(r"(?m)^    (\w+)(?: |$)", shown.split("COMMAND\n")[-1]))


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere_and_commands_for_users_name_what_exists(name):
    text = (ROOT / name).read_text()
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        target = (ROOT / name).parent / link if link else ROOT / name
        assert target.exists(), link
        headings = re.findall(r"(?m)^#+ (.+)$", target.read_text()) if anchor else [""]
        anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
        assert anchor in anchors, f"{link}#{anchor}"
    blocks = re.findall(r"(?ms)^```(?:bash|sh)\n(.*?)^```$", re.sub(r"{%.*?%}", "", text))
    exist = {*project_files(), *re.findall(r"(?m)^```\w+\n# ([\w./-]+)$", text)}  # or are made on the page
    for command in "\n".join(blocks).replace("\\\n", " ").splitlines() if name.startswith(FOLDER) else []:
        words = command.split(" #")[0].split()
        assert {word for word in words if re.fullmatch(r"\w+\.py|configs/\S+", word)} <= exist, command
        for word, after in itertools.pairwise(words):
            assert word != "convert.py" or after in convert_commands(PROJECT), command
