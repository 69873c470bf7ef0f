"""Rules for the template's own code. They bind its authors, not its users, so a project does not carry them."""

import ast
import graphlib
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest
from template import LEAF_ROOMS, PROJECT, ROOT, project_files, tracked

import workloads
from fastgpu.process.config import Config
from fastgpu.process.config_loader import keys

SOURCES = [name for name in project_files() if name.endswith(".py") and not name.startswith("tests/")]
"""The project's Python files without its tests, relative to its folder."""
each_source = pytest.mark.parametrize("name", SOURCES)
SCRIPTS = {name.removesuffix(".py") for name in SOURCES if "/" not in name}
MAX_TYPE_IGNORES = 11
"""Comments of the kind `type: ignore` in the project. Lower this number when one goes."""
SEE_CONFIG = ("fastgpu/feed/sizes.py", "fastgpu/process/config", "fastgpu/diagnose/", "workloads/__init__.py")
"""Modules that see the whole config: those that define it or build a part by it, and the diagnosis."""
READS_ENVIRONMENT = {"fastgpu/process/launch.py"}
USES_PICKLE = {"fastgpu/dataset/source.py"}  # names an error that worker processes cause
WITHOUT_DOCSTRING = {"train.build", "train.train"}  # the story of the program: comments tell it, section by section


def parse(name: str) -> ast.Module:
    return ast.parse((PROJECT / name).read_text(), filename=name)


# ---------------------------------------------------------------------------------------------- rooms


def room_of(module: str) -> str:
    """The room that a module of the project belongs to: a folder of fastgpu/, `workloads`, or a script."""
    parts = module.split(".")
    if parts[0] == "fastgpu" and len(parts) > 1:
        return parts[1]
    return parts[0]


def imported_modules(tree: ast.Module) -> set[str]:
    """The modules of the project that a file imports anywhere in its code."""
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"line {node.lineno}: use an absolute import"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {module for module in modules if module.split(".")[0] in {"fastgpu", "workloads", *SCRIPTS}}


def rooms() -> dict[str, set[str]]:
    """{room: other rooms that it imports from}."""
    graph: dict[str, set[str]] = {}
    for name in SOURCES:
        room = room_of(name.removesuffix(".py").replace("/", "."))
        imported = {room_of(module) for module in imported_modules(parse(name))}
        graph[room] = graph.get(room, set()) | imported - {room}
    return graph


def test_rooms_import_from_lower_rooms_only_and_leaves_are_imported_by_their_scripts():
    graph = rooms()
    list(graphlib.TopologicalSorter(graph).static_order())  # raises CycleError, which names the circle
    for leaf in LEAF_ROOMS:
        assert not [room for room, imported in graph.items() if leaf in imported]


def test_the_config_is_read_without_torch():
    code = "import sys, fastgpu.process.config_loader, fastgpu.process.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=False).returncode == 0


# ---------------------------------------------------------------------------------------------- what a module may do


def uses(tree: ast.Module, names: set[str]) -> set[str]:
    """Those of the names that the code imports, reads or calls, as a name or as an attribute."""
    used = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used.add(node.id)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            used |= {alias.name.split(".")[0] for alias in node.names}
            used.add((getattr(node, "module", None) or "").split(".")[0])
    return used & names


@each_source
def test_a_module_does_what_it_may(name):
    """The whole config is seen and the environment is read in few places, and nothing is unpickled."""
    tree = parse(name)
    if "/" in name and not name.startswith(SEE_CONFIG):
        assert not uses(tree, {"Config", "load_config"})
    if name not in READS_ENVIRONMENT:
        assert not uses(tree, {"environ", "environb", "getenv"})
    if name not in USES_PICKLE:
        assert not uses(tree, {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"})
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("weights_only", "allow_pickle"):
            assert ast.unparse(node.value) == str(node.arg == "weights_only")
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "yaml.load":
            assert "_YamlLoader" in [ast.unparse(argument) for argument in node.args]
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
            assert "weights_only" in [keyword.arg for keyword in node.keywords]


# ---------------------------------------------------------------------------------------------- how it reads


@each_source
def test_public_names_have_docstrings(name):
    tree = parse(name)
    module = Path(name).stem
    assert ast.get_docstring(tree), name
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    public = [node for node in (*functions, *classes) if not node.name.startswith("_")]
    missing = {f"{module}.{node.name}" for node in public if not ast.get_docstring(node)}
    assert missing <= WITHOUT_DOCSTRING


def test_code_is_formatted_and_typed_without_exceptions():
    comments = {name: comments_of(name) for name in tracked() if name.endswith(".py")}
    for name, texts in comments.items():
        assert not [text for text in texts if re.search(r"fmt: *(skip|off)", text)], name
    inside = [text for name in SOURCES for text in comments[f"{PROJECT.name}/{name}"]]
    assert sum("type: ignore" in text for text in inside) <= MAX_TYPE_IGNORES


def comments_of(name: str) -> list[str]:
    """The comments of a Python file."""
    tokens = tokenize.generate_tokens(io.StringIO((ROOT / name).read_text()).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


# ---------------------------------------------------------------------------------------------- keys named in text

KNOWN_KEYS = {"workload", *keys()}
OPTIONS = [workloads.load(path.stem).Options for path in sorted(PROJECT.glob("workloads/[a-z]*.py"))]
KNOWN_KEYS |= {key for options in OPTIONS for key in keys(options, "model.")}
FILE_SUFFIX = re.compile("py|h5|hdf5|yaml|yml|json|jsonl|html|npy|npz|txt|md|pt|pt2|onnx|safetensors|png|csv")
HISTORY = ("docs/given-up.md", "CHANGELOG.md", "bench/results/", "tests/goldens/")
"""These name keys of before, and wrong ones."""
NOT_KEYS = {"model.freeze", "model.freez", "train.build"}
"""Keys of the workloads that docs/tutorial.md writes, a misspelt one, and a function."""


def texts_of(name: str) -> list[str]:
    """What a file says to people: a document or config file as a whole, of code the strings and comments."""
    path = ROOT / name
    if path.suffix in (".md", ".yaml", ".yml", ".sh"):
        return [path.read_text()]
    if path.suffix != ".py":
        return []
    strings = [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [*strings, *comments_of(name)]


def keys_named_in(text: str) -> set[str]:
    """Words like `data.tier`. Tags (`data/tier`), file names, attributes (`cfg.data.tier`) and calls are none."""
    words = re.findall(rf"(?<![\w./-])((?:{'|'.join(Config.model_fields)})\.[a-z][a-z0-9_]*)(?![\w(/-]|\.\w)", text)
    return {word for word in words if not FILE_SUFFIX.fullmatch(word.partition(".")[2])}


def test_keys_named_in_text_exist():
    unknown = {}
    for name in tracked():
        if name.startswith(HISTORY) or Path(name).name.startswith("test_"):  # tests set wrong keys on purpose
            continue
        named = {key for text in texts_of(name) for key in keys_named_in(text)}
        wrong = named - KNOWN_KEYS - NOT_KEYS
        if wrong:
            unknown[name] = sorted(wrong)
    assert unknown == {}


def test_the_search_for_keys_finds_them():
    assert keys_named_in("`data.tier`, data.bach_rows=3; optim.lr.") == {"data.tier", "data.bach_rows", "optim.lr"}
    assert keys_named_in("data/h5.train, log.py, data.h5, cfg.data.x, log.close()") == set()
