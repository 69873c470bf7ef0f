"""Reads YAML files and words such as `optim.lr=0.1` into one checked `Config`."""

import json
import os
import re
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, NoReturn, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fastgpu.process.config import Config, Section, expand_home
from fastgpu.process.launch import SharedError, check_alone, read_launch, say
from fastgpu.process.project import project_folder

SectionT = TypeVar("SectionT", bound=Section)
COMMAND_LINE = "command line"
MAX_TEXT = 1 << 20
"""Letters of a file. To read so many takes seconds; of more files than fit, a pattern names all."""
MAX_NODES = 100_000
"""Keys and values of a file, with each alias counted as what it stands for: a few aliases may stand for millions."""
MAX_BYTES = 3500
"""Bytes of a key or value: a path may have 4,095 bytes, and Python reads no number of more than 4,300 figures."""
HELP = "docs/config.md explains every key, and the class Options in workloads/ those of the section model."


class _Parser(ArgumentParser):
    """The command line, whose mistakes are SharedErrors."""

    def error(self, message: str) -> NoReturn:
        usage = "[--config FILE]... [section.key=value]..., after the flags of torchrun"
        raise SharedError(f"{COMMAND_LINE}: {message}; usage: {usage}")


def load_config(argv: list[str]) -> Config:
    """Read `[--config FILE]... [section.key=value]...`; later ones win. The default file is config.yaml.

    Raises SharedError with one line for each mistake: file and line, key, value, what is allowed, and the nearest key.
    """
    parser = _Parser(prog="train.py", epilog=HELP, allow_abbrev=False)
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="default: config.yaml")
    parser.add_argument("--local-rank", type=int, help=SUPPRESS)  # python -m torch.distributed.launch adds it
    parser.add_argument("words", metavar="section.key=value", nargs="*")
    args = parser.parse_intermixed_args(argv)
    words: dict[str, str] = {}
    for word in args.words:
        key, equals, value = word.partition("=")
        if not equals or key in words:
            parser.error(f"{key} {'is given twice' if equals else 'has no value'}")
        words[key] = value
    recorded: list[Path] = []
    if words.get("run.resume", "auto") not in ("auto", "never", ""):
        run = Path(expand_home(words["run.resume"]))
        recorded = sorted(run.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
        if not recorded:
            parser.error(f"run.resume is {run}, which is no run with a config.yaml")
        args.config.insert(0, recorded[-1])  # a run that was resumed has a config-2.yaml, too
        words |= {"run.resume": "auto", "run.folder": json.dumps(str(run.parent)), "run.name": json.dumps(run.name)}
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in args.config or ["config.yaml"]:
        try:
            with Path(expand_home(str(path))).open(encoding="utf-8") as file:
                text = file.read(MAX_TEXT + 1)
        except (OSError, ValueError) as error:  # ValueError: it is no text, or its name has a zero byte
            cure = "" if args.config else f"; start it in {project_folder()}, or name a file (--config)"
            parser.error(f"{path} cannot be read ({error}){cure}")
        layer = _parse(text, path, origins) or {}
        if not isinstance(layer, dict):
            allowed = "allowed are sections such as `data:` with keys below them"
            raise SharedError(f"{path}: holds {layer!r:.200}; {allowed}")
        _merge(tree, layer)
    for key, text in words.items():
        section, _, name = key.partition(".")
        value = _as_asked(keys().get(key), text, _parse(text, f"{COMMAND_LINE}: {key}", origins, key))
        if name:
            _merge(tree, {section: {name: value}})
        else:  # such as model={}, which leaves out what the files have
            tree[section] = value
        origins[key] = COMMAND_LINE
        origins.setdefault(section, COMMAND_LINE)
    config = _check(Config, tree, origins)
    config._origins.update(origins)
    config._words.update(words)
    if not config.run.check:  # launch/node.sh checks on each node, before it starts torchrun
        check_alone()
    if recorded and read_launch().rank == 0:
        code = f"workload={config.workload} data.dataset={config.data.dataset}"
        say(f"{recorded[-1]} is resumed; the code that will be imported: {code}")
    return config


def read_options(config: Config, options: type[SectionT]) -> SectionT:
    """The section `model`, checked by the class of the workload. Raises SharedError."""
    texts = {name: config._words.get(f"model.{name}") for name in config.model}
    fields = options.model_fields
    others = [name for name in config.model if name not in fields and texts[name] is None]
    if others and config._origins.get("workload") == COMMAND_LINE:
        cure = "write 'model={}' beside it, or a file of its own (--config)"
        raise SharedError(f"workload={config.workload} has no model.{', model.'.join(others)} of the file; {cure}")
    values = {name: _as_asked(fields.get(name), texts[name], value) for name, value in config.model.items()}
    return _check(options, values, config._origins, "model")


def keys(root: type[Section] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """{dotted key: its field} of every key but those of `model`, which the workload declares."""
    fields: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= keys(kind, f"{prefix}{name}.")
        elif root is not Config or name != "model":
            fields[prefix + name] = field
    return fields


def _merge(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Merge key by key. A value is replaced as a whole, so that data.fields can lose a field."""
    for section, values in layer.items():
        old = tree.get(section)
        tree[section] = old | values if isinstance(old, dict) and isinstance(values, dict) else values


class YamlLoader(yaml.SafeLoader):
    """A loader of YAML that stays quick whatever the text is. All errors are those of yaml, or a RecursionError."""

    def __init__(self, text: str):
        if len(text) > MAX_TEXT:
            raise yaml.YAMLError(f"has more than {MAX_TEXT:,} letters; name files by a pattern, such as photos-*.h5")
        super().__init__(text)

    def get_single_node(self) -> yaml.Node | None:
        """The tree of the text, in which aliases of a value share its node."""
        node: yaml.Node | None = super().get_single_node()
        if node and _count_nodes(node, {}) > MAX_NODES:
            raise yaml.YAMLError(f"stands for more than {MAX_NODES:,} keys and values; write fewer, and fewer aliases")
        return node


def _count_nodes(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """The nodes of a tree, if each alias were written out: endless if a node holds itself."""
    if node not in known:
        known[node] = inf
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (each if isinstance(each, tuple) else (each,) for each in below)
        known[node] = 1 + sum(_count_nodes(each, known) for pair in pairs for each in pair)
    return known[node]


class _ConfigLoader(YamlLoader):
    """YAML as people expect it: `1e-3` is a number, as in YAML 1.2. Whatever it reads can be part of a path."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text: str = super().construct_scalar(node)
        try:
            encoded = os.fsencode(text)
        except UnicodeEncodeError:  # half a pair of surrogates
            encoded = b"\0"
        if len(encoded) > MAX_BYTES or b"\0" in encoded:
            problem = f"{text[:50]!r} is not allowed: use at most {MAX_BYTES:,} bytes of UTF-8, none of them zero"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return text


_ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)$"), list("-+.0123456789")
)
NAMES = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp", "value")}
"""Tags of what can be a name, too, such as `on`, 2024, 1e3, 2024-11-27 and =."""


def _parse(text: str, place: str, origins: dict[str, str], prefix: str = "") -> Any:
    """The value of a YAML text. Raises SharedError if it is no YAML or a key occurs twice.

    prefix: the key of which it is the value. The place of each key, such as config.yaml:12, is added to `origins`.
    """
    lines: dict[str, int] = {}
    try:
        loader = _ConfigLoader(text)
        node = loader.get_single_node()
        for key, at in _keys_in(node, prefix):
            if key in lines:
                raise yaml.MarkedYAMLError(problem=f"{key} stands twice, first in line {lines[key]}", problem_mark=at)
            lines[key] = at.line + 1
        origins |= {key: f"{place}:{line}" for key, line in lines.items()}
        field = keys().get(prefix)
        _read_names(loader, node, field.annotation if field else None if prefix else Config)
        return loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # a date in month 13
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        if not isinstance(error, yaml.YAMLError | ValueError):
            is_deep = isinstance(error, RecursionError)
            problem = "is nested too deeply" if is_deep else "a value does not fit the !!tag before it"
        is_text = prefix and isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
        cure = f"""; if it is text, such as a glob, quote it twice: {prefix}='"{text}"'""" if is_text else ""
        raise SharedError(f"{place}{line}: {problem}{cure}") from None


def _read_names(loader: yaml.SafeLoader, node: yaml.Node | None, kind: Any) -> None:
    """Make text of what YAML takes for a number or a boolean where the config asks for text, or it is a key.

    kind: the type that is asked for.
    """
    for each in get_args(kind) if isinstance(kind, UnionType) else (kind,):
        origin, inner = get_origin(each), get_args(each)
        if each is str and isinstance(node, yaml.ScalarNode) and node.tag in NAMES:
            node.tag = "tag:yaml.org,2002:str"
        elif origin is list and isinstance(node, yaml.SequenceNode):
            for item in node.value:
                _read_names(loader, item, inner[0])
        elif isinstance(node, yaml.MappingNode) and (origin is dict or hasattr(each, "model_fields")):
            loader.flatten_mapping(node)  # merge keys
            for key, value in node.value:
                _read_names(loader, key, str)
                field = None if origin else each.model_fields.get(str(key.value))
                _read_names(loader, value, inner[1] if origin else field and field.annotation)


def _as_asked(field: FieldInfo | None, text: str | None, value: Any) -> Any:
    """The value of a word, or its text if YAML sees another type where text is asked for, as in run.name=20241127."""
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return value if text is None or str not in kinds or type(value) in (*kinds, list, dict) else text


def _keys_in(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Mark]]:
    """(dotted key, its place in the text) of mappings in mappings."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        dotted = f"{prefix}.{key.value}".lstrip(".")
        yield dotted, key.start_mark
        yield from _keys_in(value, dotted)


def _check(kind: type[SectionT], values: dict[str, Any], origins: dict[str, str], *section: str) -> SectionT:
    """The values as a section. Raises SharedError with one line for each wrong key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        items = error.errors(include_url=False)
    known = Config.model_fields | keys() | (keys(kind, "model.") if section else {})
    lines: dict[str, str] = {}
    for item in items:
        # In `loc`, branches of a union or places in a list follow the two names of the key.
        key = ".".join([*section, *map(str, item["loc"])][:2])
        # pydantic writes "Input should be 'never' or 'auto'", for each branch of a union.
        wish = item["msg"].partition(" should ")[2].partition(" or instance of ")[0] or item["msg"]
        if item["type"] == "missing":
            lines[key] = f"{key} is missing; set it in the file or on the command line"
        elif item["type"] == "extra_forbidden":
            lines[key] = f"unknown key {key} ({_near(key, known)})"
        elif key not in lines:
            given = json.dumps(item["input"], default=str, skipkeys=True)
            shown = given if len(given) <= 200 else f"{given[:200]}..."
            is_name = item["type"] == "string_type" and isinstance(item["input"], bool | int | float)
            lines[key] = f"{key} is {shown}; it should {wish}" + ", in quotes" * is_name
        elif wish not in lines[key]:
            lines[key] += f" or {wish}"
    raise SharedError("\n       ".join(f"{origins.get(key, 'config')}: {line}" for key, line in lines.items()))


def _near(key: str, known: Iterable[str]) -> str:
    """The key that an unknown key was meant to be, or else the keys of its section."""
    section, _, name = key.rpartition(".")
    close = [each for each in known if each.rpartition(".")[2] == name]  # in another section
    close = close or get_close_matches(key, known, 1, 0.75)
    siblings = [each for each in known if each.rpartition(".")[0] == section]
    return f"did you mean {close[0]}?" if close else f"allowed are: {', '.join(siblings) or 'none'}"
