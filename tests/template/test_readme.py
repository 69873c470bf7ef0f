"""What the documents show exists: the trees of files, the commands and the links."""

import itertools
import re
import subprocess
import sys

import pytest
from template import PROJECT, ROOT, WORKLOAD_ANSWERS, project_files, tracked

DOCUMENTS = [name for name in tracked() if name.endswith(".md") and not name.startswith("bench/results/")]
OF_A_PROJECT = [name for name in DOCUMENTS if name.startswith(PROJECT.name)]


def fenced_blocks(text: str) -> list[str]:
    """The contents of the ``` blocks of a page."""
    return re.findall(r"(?ms)^```\w*\n(.*?)^```$", text)


def paths_in_tree(tree: str) -> set[str]:
    """The paths of a tree whose lines are indented by two spaces for each folder above the name."""
    paths = set()
    folders: list[str] = []
    for line in tree.splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.findall(r"(?:^ *|, )([\w.]+/?)", line)
        folders = [*folders[:depth], names[0]]
        paths |= {"".join([*folders[:depth], name]) for name in names if name.endswith(("/", ".py", ".yaml"))}
    return paths


@pytest.mark.parametrize("answer", WORKLOAD_ANSWERS)
def test_the_tree_in_a_project_is_the_tree_on_disk(baked, answer):
    project = baked(answer)
    section = (project / "docs/code.md").read_text().split("## What is where\n")[1]
    shown = paths_in_tree(fenced_blocks(section)[0])
    assert {path for path in shown if not (project / path).exists()} == set()
    folders = {f"{path.name}/" for path in project.iterdir() if path.is_dir() and not path.name.startswith(".")}
    rooms = {f"fastgpu/{path.parent.name}/" for path in project.glob("fastgpu/*/__init__.py")}
    scripts = {path.name for path in project.glob("*.py")}
    assert scripts | folders | rooms <= shown


# ---------------------------------------------------------------------------------------------- commands and links


def commands_in(name: str) -> list[str]:
    """The shell commands that a page shows, one for each line, without comments."""
    page = re.sub(r"{%.*?%}", "", (ROOT / name).read_text())
    blocks = re.findall(r"(?ms)^```(?:bash|sh)\n(.*?)^```$", page)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.split(" #")[0].strip() for line in joined.splitlines() if line.strip()]


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    targets = set(re.findall(r"(?m)(?:^|`)make ([a-z-]+)", text))
    assert {"demo", "test", "check", "fix"} <= targets
    assert {target for target in targets if f"\n{target}:" not in makefile} == set()
    described = set(re.findall(r"(?m)^# make ([a-z-]+)", makefile))
    assert described == set(re.findall(r"(?m)^([a-z-]+):", makefile)) - {"clean"}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", (ROOT / name).read_text()):
        target = (ROOT / name).parent / link if link else ROOT / name
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"(?m)^#+ (.+)$", target.read_text())
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, f"{link}#{anchor}"


@pytest.fixture(scope="session")
def convert_commands() -> set[str]:
    """The sub-commands of convert.py."""
    done = subprocess.run(
        [sys.executable, "convert.py", "--help"], cwd=PROJECT, capture_output=True, text=True, check=True
    )
    listed = done.stdout.split("COMMAND\n")[-1]
    return set(re.findall(r"(?m)^    (\w+)(?: |$)", listed))


@pytest.mark.parametrize("name", OF_A_PROJECT)
def test_commands_for_users_name_scripts_recipes_and_sub_commands_that_exist(name, convert_commands):
    made_on_the_page = set(re.findall(r"(?m)^```\w+\n# ([\w./-]+)$", (ROOT / name).read_text()))
    known = {*project_files(), *made_on_the_page}
    for command in commands_in(name):
        words = command.split()
        scripts = [word for word in words if re.fullmatch(r"\w+\.py", word)]
        assert set(scripts) <= known, command
        recipes = [after for word, after in itertools.pairwise(words) if word == "--config"]
        shipped = [path for path in recipes if path.startswith("configs/")]
        assert set(shipped) <= known, command
        if "python convert.py" in command:
            assert words[words.index("convert.py") + 1] in convert_commands, command
