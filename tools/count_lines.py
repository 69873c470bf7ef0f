"""Print the size of a project for images, room by room, beside the size that it should have. Nothing fails.

Lines are those of Python files, blank ones and comments included.
"""

import ast
import statistics
import tokenize
from collections import Counter
from io import StringIO

from template import LEAF_ROOMS, PROJECT, project_files, removed_files

from fastgpu.process.config import Config, Section

TARGETS = {
    "process": 760,
    "rows": 680,
    "images": 330,
    "storage": 880,
    "dataset": 220,
    "feed": 600,
    "training": 230,
    "telemetry": 360,
    "run": 480,
    "yours": 600,
    "imagefiles": 170,
    "convert": 1_300,
    "diagnose": 880,
    "predict": 420,
    "report": 245,
    "tests": 450,
}
"""{room: its lines}. docs/design.md says why they are so few."""
OTHER_TARGETS = {"without tools": 4_900, "with tools": 7_700, "files": 105}


def room_of(path: str) -> str:
    """The room that a Python file of the project belongs to. Scripts belong to the room of their name."""
    folder, _, rest = path.partition("/")
    if folder == "fastgpu" and "/" in rest:
        return rest.partition("/")[0]
    if folder == "tests" or folder.removesuffix(".py") in LEAF_ROOMS:
        return folder.removesuffix(".py")
    return "yours" if folder in ("train.py", "workloads") else "elsewhere"


def docstring_lines(source: str) -> set[int]:
    """The numbers of the lines that docstrings cover, those below a field included."""
    numbers: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return numbers


def code_lengths(source: str) -> list[int]:
    """The lengths of the lines that hold code, without indentation."""
    silent = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(StringIO(source).readline)
    numbers = {token.start[0] for token in tokens if token.type not in silent} - docstring_lines(source)
    lines = source.splitlines()
    return [len(lines[number - 1].strip()) for number in numbers]


def count_keys(section: type[Section]) -> int:
    """The keys of a section of the config, and of the sections inside it."""
    inside = [field.annotation for field in section.model_fields.values()]
    return sum(count_keys(kind) if isinstance(kind, type) and issubclass(kind, Section) else 1 for kind in inside)


def main() -> None:
    """Print a table of rooms, and what is counted over all of them."""
    names = sorted(set(project_files()) - removed_files("images"))
    sources = {name: (PROJECT / name).read_text(encoding="utf-8") for name in names if name.endswith(".py")}
    lines: Counter[str] = Counter()
    for name, source in sources.items():
        lines[room_of(name)] += len(source.splitlines())
    print(f"{'':22}{'lines':>8}{'target':>8}")
    for room in sorted(lines, key=lambda room: [*TARGETS, room].index(room)):
        target = f"{TARGETS[room]:8,}" if room in TARGETS else ""
        print(f"{room:22}{lines[room]:8,}{target}")
    with_tools = lines.total() - lines["tests"]
    modules = [name for name in sources if not name.startswith("tests/")]
    of_tools = removed_files("images", tools="none")
    counted = {
        "without tools": sum(len(sources[name].splitlines()) for name in modules if name not in of_tools),
        "with tools": with_tools,
        "files": len(names),
    }
    print()
    for what, number in counted.items():
        print(f"{what:22}{number:8,}{OTHER_TARGETS[what]:8,}")
    documented = sum(len(docstring_lines(sources[name])) for name in modules)
    lengths = [length for name in modules for length in code_lengths(sources[name])]
    print(f"{'modules':22}{len(modules):8,}")
    print(f"{'keys of the config':22}{count_keys(Config):8,}")
    print(f"{'length of a code line':22}{statistics.mean(lengths):8.1f}")
    print(f"{'docstrings':22}{100 * documented / with_tools:7.1f}%")


if __name__ == "__main__":
    main()
