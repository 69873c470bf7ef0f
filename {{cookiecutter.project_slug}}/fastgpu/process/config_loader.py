"""Reads YAML files and words such as `optim.lr=0.1` into one checked `Config`."""

import json
import re
from argparse import ArgumentParser
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fastgpu.process.config import Config, Section
from fastgpu.process.launch import SharedError, read_launch, say

SectionT = TypeVar("SectionT", bound=Section)
COMMAND_LINE = "command line"
PROJECT = Path(__file__).parents[2]
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
        run = Path(words["run.resume"])
        recorded = sorted(run.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
        if not recorded:
            parser.error(f"run.resume is {run}, which is no run with a config.yaml")
        args.config.insert(0, recorded[-1])  # a run that was resumed has a config-2.yaml, too
        words |= {"run.resume": "auto", "run.folder": json.dumps(str(run.parent)), "run.name": json.dumps(run.name)}
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in args.config or ["config.yaml"]:
        try:
            layer = _parse(Path(path).read_text(encoding="utf-8"), path, origins) or {}
        except (OSError, UnicodeDecodeError) as error:
            cure = "" if args.config else f"; start it in {PROJECT}, or name a file (--config)"
            parser.error(f"{path} cannot be read ({error}){cure}")
        if not isinstance(layer, dict):
            raise SharedError(f"{path}: holds {layer!r}; allowed are sections such as `data:` with keys below them")
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
    if recorded and read_launch().rank == 0:
        code = f"workload={config.workload} data.dataset={config.data.dataset}"
        say(f"{recorded[-1]} names the code that will be imported: {code}")
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


class _YamlLoader(yaml.SafeLoader):
    """YAML as people expect it: `1e-3` is a number, as in YAML 1.2."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def _parse(text: str, place: str, origins: dict[str, str], prefix: str = "") -> Any:
    """The value of a YAML text. Raises SharedError if it is no YAML or a key occurs twice.

    The place of each key, such as config.yaml:12, is added to `origins`.
    """
    lines: dict[str, int] = {}
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        for key, at in _keys_in(node, prefix):
            if key in lines:
                raise yaml.MarkedYAMLError(problem=f"{key} stands twice, first in line {lines[key]}", problem_mark=at)
            lines[key] = at.line + 1
        origins |= {key: f"{place}:{line}" for key, line in lines.items()}
        return loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError, LookupError, RecursionError) as error:  # such as a date in month 13
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        is_text = prefix and isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
        cure = f"""; if it is text, such as a glob, quote it twice: {prefix}='"{text}"'""" if is_text else ""
        raise SharedError(f"{place}{line}: {problem}{cure}") from None


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
            lines[key] = f"{key} is {json.dumps(item['input'], default=str)}; it should {wish}"
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
