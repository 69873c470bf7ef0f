"""The engine does not know the project that uses it: a room of fastgpu/ imports only from the rooms above it in the
list of docs/code.md, never from a workload or a script, and it does not look for files around its own folder.
"""

import ast
import re

import pytest

from support import PROJECT
from tools.facts import LEAF_ROOMS, project_files

SOURCES = {name: (PROJECT / name).read_text() for name in project_files() if re.match(r"(?!tests/|docs/).*\.py$", name)}
"""{file of the project: what it holds}, without its tests and examples."""
SCRIPTS = sorted((name.removesuffix(".py") for name in SOURCES if "/" not in name), key="train".__ne__)


def read_order() -> list[str]:
    """The engine's rooms in the order of docs/code.md, then what a project has beside the engine."""
    listed = (PROJECT / "docs/code.md").read_text().split("- `fastgpu/`")[1].split("\n- ")[0]
    rooms = [f"fastgpu.{room}" for room in re.findall(r"`(\w+)/`", listed)]
    return ["fastgpu", *rooms, "workloads", *SCRIPTS]


def place_of(name: str) -> str:
    """Where a file or a module belongs: `fastgpu.feed`, `workloads`, `train`, or a library."""
    words = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".").split(".")
    return ".".join(words[: 2 if words[0] == "fastgpu" else 1])


def text_at_start(node: ast.expr) -> str:
    """The text of a string, or that before the first value of an f-string."""
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else ""


def imports_of(tree: ast.AST) -> set[str]:
    """The full names of all that a module imports, functions and `import_module` and `find_spec` included."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "find_spec"):
            found |= {text_at_start(argument) for argument in node.args}
    return found


def looks_around(tree: ast.AST) -> set[str]:
    """Words by which a module finds its own folder, or changes where others are found."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return (names | attributes) & {"__file__", "__path__", "__spec__", "sys.path", "fastgpu.__file__"}


def mistakes_in(name: str, source: str, order: list[str]) -> set[str]:
    """What a file of the project imports from below its own place, and how a file of the engine looks upward."""
    tree = ast.parse(source)
    below = order[order.index(place_of(name)) + 1 :]
    found = {place for place in map(place_of, imports_of(tree)) if place in below}
    return found | looks_around(tree) if name.startswith("fastgpu/") else found


ASKED_FOR = {
    "fastgpu/dataset/source.py": {"sys.path"},  # data.dataset may name a class of the current folder
    "fastgpu/predict/model.py": {"sys.path", "workloads"},  # a model is built by the workload of its project
}
"""{file of the engine: what it takes from a project, because its user names it}. Nothing else looks upward."""


def test_imports_go_to_the_rooms_above():
    order = read_order()
    assert {*order} == {*map(place_of, SOURCES)}
    found = {name: mistakes_in(name, source, order) for name, source in SOURCES.items()}
    assert {name: mistakes for name, mistakes in found.items() if mistakes} == ASKED_FOR


def test_imports_of_tools_are_by_their_scripts_only():
    tools = {f"fastgpu.{room}" for room in LEAF_ROOMS}
    for name, source in SOURCES.items():
        room = place_of(name).removeprefix("fastgpu.")  # diagnose.py and fastgpu/diagnose have one name
        assert {*map(place_of, imports_of(ast.parse(source)))} & tools <= {f"fastgpu.{room}"}, name


@pytest.mark.parametrize(
    ("name", "planted", "found"),
    [
        ("fastgpu/feed/planted.py", "import train", "train"),
        ("fastgpu/predict/planted.py", "def load():\n    from workloads import images", "workloads"),
        ("fastgpu/diagnose/planted.py", "module = importlib.import_module(f'workloads.{name}')", "workloads"),
        ("fastgpu/rows/planted.py", "from fastgpu.storage.store import open_store", "fastgpu.storage"),
        ("fastgpu/run/planted.py", "from fastgpu import telemetry, predict", "fastgpu.predict"),
        ("fastgpu/process/planted.py", "find_spec('fastgpu.images.decode')", "fastgpu.images"),
        ("fastgpu/storage/planted.py", "PROJECT = Path(__file__).parents[2]", "__file__"),
        ("fastgpu/dataset/planted.py", "sys.path.append(folder)", "sys.path"),
        ("workloads/planted.py", "from train import build", "train"),
    ],
)
def test_imports_upward_are_found(name, planted, found):
    assert mistakes_in(name, planted, read_order()) == {found}
