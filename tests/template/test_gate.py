"""Code of the pages and the examples passes the gate that a project ships."""

import shutil
import subprocess

import pytest

from support import ROOT
from support.projects import read_blocks, run_in, use_torch_loader


@pytest.mark.slow
def test_gate_of_pages_and_examples(own_copy):
    project = own_copy("both")
    for page in ("tutorial.md", "code.md"):
        for block in read_blocks(project / "docs" / page):
            if block.language == "python" and block.target:
                (project / block.target).write_text(block.text)
    cells = [block.text for block in read_blocks(project / "docs/python.md") if block.language == "python"]
    (project / "page.py").write_text("# ruff: noqa: E402\n" + "\n".join(cells))  # a notebook imports in its cells, too
    for example in (ROOT / "docs/examples").glob("*.py"):
        is_dataset = example.stem == "published"
        shutil.copyfile(example, project / ("" if is_dataset else "workloads") / example.name)
    mypy = ("mypy", "--ignore-missing-imports")  # torchvision is not installed here
    for command in (("ruff", "check"), ("ruff", "format", "--check"), mypy):
        run_in(project, "-m", *command)

    # Two that change train.py, each in its own way.
    program = (project / "train.py").read_text()
    subprocess.run(["git", "apply", ROOT / "docs/examples/gan.diff"], cwd=project, check=True)
    run_in(project, "-m", *mypy)
    (project / "train.py").write_text(program)
    use_torch_loader(project)
    for command in (("ruff", "check", "--fix"), mypy):  # two imports of train.py are no longer used
        run_in(project, "-m", *command)
