"""Write the file tree into docs/code.md of the project, between its two `tree` marks. With --print, only print it.

A Python file is described by the first sentence of its docstring, a folder of fastgpu/ by that of its __init__.py.
Files that only some projects have stand between the Jinja conditions under which the hook keeps them.
"""

import ast
import re
import sys
from typing import NamedTuple

from template import PROJECT, condition_of, project_files

BEGIN = "{# tree:begin, made by `make fix` #}\n"
END = "\n{#- tree:end #}"
DESCRIPTIONS = {
    "config.yaml": "The one file to edit. `python train.py --help` explains every key.",
    "configs/": "Recipes. Each one says how to get its data.",
    "data/": "The rows of the first run.",
    "data/digits.h5": "Optical Recognition of Handwritten Digits (E. Alpaydin and C. Kaynak, UCI, CC BY 4.0).",
    "data/interactions-train.h5": "Users and items made up by a known law.",
    "data/interactions-val.h5": "The same, for validation.",
    "docs/": "Pages for the users of this project.",
    "launch/": "One torchrun on each node, by Slurm or Kubernetes; delete what you do not use.",
    "tests/": "Tests of your config, data, workload and one short run.",
}
"""Entries that have no docstring. Everything else that is not Python is left out: tools find it by its name."""


class Entry(NamedTuple):
    """One line of the tree."""

    path: str
    depth: int
    """Number of folders above the name that are shown."""
    condition: str
    """The Jinja expression under which a project has the file; empty if every project has it."""

    @property
    def name(self) -> str:
        """The last part of the path, with a slash if it is a folder."""
        is_folder = self.path.endswith("/")
        return self.path.rstrip("/").rpartition("/")[2] + "/" * is_folder


def entries() -> list[Entry]:
    """The lines of the tree: the described entries and all Python files except the tests."""
    files = project_files()
    folders = {f"{name.partition('/')[0]}/" for name in files if "/" in name}
    scripts = sorted((name for name in files if re.fullmatch(r"\w+\.py", name)), key=lambda name: name != "train.py")
    listed = [Entry(path, 0, condition_of(path)) for path in ["config.yaml", *scripts]]
    for folder in ("configs/", "workloads/", "fastgpu/", "data/", "docs/", "launch/", "tests/"):
        if folder not in folders:
            continue
        listed.append(Entry(folder, 0, condition_of(folder)))
        if folder in ("workloads/", "fastgpu/"):
            listed += entries_below(folder, files)
        described = sorted(path for path in DESCRIPTIONS if path.startswith(folder) and path != folder)
        listed += [Entry(path, 1, condition_of(path)) for path in described]
    return listed


def entries_below(folder: str, files: list[str]) -> list[Entry]:
    """The modules of a package, then its sub-packages with their modules."""
    depth = folder.count("/")
    inside = [name for name in files if name.startswith(folder)]
    modules = [name for name in inside if re.fullmatch(r"[a-z]\w*\.py", name.removeprefix(folder))]
    packages = sorted({folder + name.removeprefix(folder).partition("/")[0] + "/" for name in inside})
    listed = [Entry(path, depth, condition_of(path)) for path in modules]
    for package in packages:
        if f"{package}__init__.py" in inside:
            listed.append(Entry(package, depth, condition_of(package)))
            listed += entries_below(package, files)
    return listed


def describe(path: str) -> str:
    """One sentence about a file or folder."""
    if path in DESCRIPTIONS:
        return DESCRIPTIONS[path]
    file = PROJECT / path
    if path.endswith("/"):
        file /= "__init__.py"
    docstring = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8")))
    if not docstring:
        sys.exit(f"error: {file} has no docstring; write one whose first sentence says what the file is for")
    paragraph = " ".join(docstring.partition("\n\n")[0].split())
    sentence = re.match(r".*?[.?!](?= |$)", paragraph)
    if sentence:
        return sentence[0]
    return docstring.splitlines()[0].rstrip(":")


def make_tree() -> str:
    """The tree as a fenced block of Markdown with Jinja conditions."""
    listed = entries()
    width = max(2 * entry.depth + len(entry.name) for entry in listed) + 2
    lines = ["```"]
    condition = ""
    for entry in listed:
        if entry.condition != condition:
            if condition:
                lines.append("{%- endif %}")
            if entry.condition:
                lines.append(f"{{%- if {entry.condition} %}}")
            condition = entry.condition
        name = "  " * entry.depth + entry.name
        lines.append(f"{name:{width}}{describe(entry.path)}")
    if condition:
        lines.append("{%- endif %}")
    return "\n".join([*lines, "```"])


def main() -> None:
    """Print the tree, or write it into docs/code.md."""
    if "--print" in sys.argv:
        print(make_tree())
        return
    path = PROJECT / "docs/code.md"
    text = path.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        sys.exit(f"error: {path} has no marks {BEGIN.strip()} and {END.strip()}; write them where the tree belongs")
    path.write_text(before + begin + make_tree() + end + after, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
