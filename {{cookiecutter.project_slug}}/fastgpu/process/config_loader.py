"""Reads YAML files and words such as `optim.lr=0.1` into one checked `Config`."""

import json
import os
import re
import sys
from argparse import SUPPRESS
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from math import inf
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fastgpu.process.commands import Parser
from fastgpu.process.config import Config, Section, expand_home
from fastgpu.process.launch import SharedError, check_alone, read_launch, say
from fastgpu.process.project import project_folder

__all__ = ["load_config", "read_options"]

SectionT = TypeVar("SectionT", bound=Section)
COMMAND_LINE = "command line"
MAX_TEXT = 1 << 20
"""Maximum letters of a config file, whose parsing then takes seconds."""
MAX_NODES = 100_000
"""Maximum keys and values of a file, with its aliases written out: a few may stand for millions."""
MAX_BYTES = 3500
"""Maximum bytes of a key or value: a path has at most 4,095 bytes, a number that Python reads 4,300 figures."""
HELP = """\
docs/config.md explains every key; those of the section model come from the
class Options of the workload, in workloads/."""
WISHES = {
    "model_type": "a section with keys below it",
    "string_type": "text",
    "int_type": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "literal_error": "{expected}",
    "finite_number": "a finite number",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "string_too_short": "text of {min_length} or more letters",
    "string_too_long": "text of at most {max_length} letters",
    "too_short": "at least {min_length} entries long",
    "too_long": "at most {max_length} entries long",
}
"""{type of a mistake that pydantic finds: what the value should be}. Of other types, its own words are shown."""


def load_config(argv: list[str]) -> Config:
    """Read `[--config FILE]... [section.key=value]...`; later ones win. The default file is config.yaml.

    Raises SharedError with one line for each mistake: file and line, key, value, what is allowed, and the nearest key.
    """
    files, words = _read_words(argv)
    recorded = _find_recorded(words)
    if recorded:
        files.insert(0, str(recorded))
        run = recorded.parent
        words |= {"run.resume": "auto", "run.folder": json.dumps(str(run.parent)), "run.name": json.dumps(run.name)}
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files or ["config.yaml"]:
        cure = "" if files else f"; start it in {project_folder()}, or name a file (--config)"
        _merge(tree, _read_file(path, origins, cure))
    _add_words(tree, words, origins)
    config = _check(Config, tree, origins)
    config._origins.update(origins)
    config._words.update(words)
    if not config.run.check:  # launch/node.sh checks on each node, before it starts torchrun
        check_alone()
    if recorded and read_launch().rank == 0:
        code = f"workload={config.workload} data.dataset={config.data.dataset}"
        say(f"{recorded} is resumed; the code that will be imported: {code}")
    return config


def _read_words(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The config files that a command line names, and its words, {key: text}. Raises SharedError."""
    parser = Parser(prog="train.py", description=sys.modules["__main__"].__doc__, epilog=HELP)
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="default: config.yaml")
    parser.add_argument("--local-rank", type=int, help=SUPPRESS)  # python -m torch.distributed.launch adds it
    parser.add_argument("words", metavar="section.key=value", nargs="*", help="any key of the config")
    args, flags = parser.parse_known_intermixed_args(argv)
    if flags:
        word = _as_word(flags[0], argv)
        hint = "keys are words, such as optim.lr=0.1, and flags of torchrun come before train.py"
        parser.error(f"unknown flag {flags[0]}: {f'write {word}' if word else hint}")
    words: dict[str, str] = {}
    for word in args.words:
        key, equals, text = word.partition("=")
        if not equals:
            raise SharedError(f"{COMMAND_LINE}: {word} has no value; write section.key=value")
        if key in words:
            raise SharedError(f"{COMMAND_LINE}: {key} is given twice; give it once")
        words[key] = text
    return args.config, words


def _as_word(flag: str, argv: Sequence[str]) -> str:
    """The word `optim.lr=0.1` for `--lr 0.1` or `--lr=0.1`, as other programs take it. Empty: no key has that name."""
    name, _, value = flag.lstrip("-").partition("=")
    key_of = {key.rpartition(".")[2]: key for key in keys()}
    close = get_close_matches(name.replace("-", "_"), key_of, 1, 0.75)
    next_word = argv[argv.index(flag) + 1 :][:1]
    value = value or "".join(word for word in next_word if "=" not in word)
    return f"{key_of[close[0]]}={value or '...'}" if close else ""


def _find_recorded(words: Mapping[str, str]) -> Path | None:
    """The newest config of the run that `run.resume` names. None: it names no run. Raises SharedError."""
    if (named := words.get("run.resume", "auto")) in ("auto", "never", ""):
        return None
    run = Path(expand_home(named))
    recorded = sorted(run.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
    if not recorded:
        raise SharedError(f"{COMMAND_LINE}: run.resume is {run}, which is no run with a config.yaml; name another one")
    return recorded[-1]  # a run that was resumed has a config-2.yaml, too


def _read_file(path: str, origins: dict[str, str], cure: str) -> dict[str, Any]:
    """The tree of a config file. The place of each key is added to `origins`. Raises SharedError, with this cure."""
    try:
        with Path(expand_home(path)).open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except (OSError, ValueError) as error:  # ValueError: it is no text, or its name has a zero byte
        raise SharedError(f"{path} cannot be read ({error}){cure}") from None
    tree = _parse(text, path, origins) or {}
    if not isinstance(tree, dict):
        allowed = "allowed are sections such as `data:` with keys below them"
        raise SharedError(f"{path}: holds {tree!r:.200}; {allowed}")
    return tree


def _add_words(tree: dict[str, Any], words: Mapping[str, str], origins: dict[str, str]) -> None:
    """Merge the values of words, {key: text}, into a tree. Raises SharedError for what is no YAML."""
    for key, text in words.items():
        section, _, name = key.partition(".")
        value = _as_asked(keys().get(key), text, _parse(text, f"{COMMAND_LINE}: {key}", origins, key))
        if name:
            _merge(tree, {section: {name: value}})
        else:  # such as model={}, which leaves out what the files have
            tree[section] = value
        origins[key] = COMMAND_LINE
        origins.setdefault(section, COMMAND_LINE)


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
"""Tags of values that can be names, too: `on`, 2024, 1e3, 2024-11-27, =."""


def _parse(text: str, place: str, origins: dict[str, str], prefix: str = "") -> Any:
    """The value of a YAML text. Raises SharedError if it is no YAML or a key occurs twice.

    prefix: the key that has this value. The place of each key, such as config.yaml:12, is added to `origins`.
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
    """Make text of numbers and booleans of YAML that are keys, or stand where the config asks for text.

    kind: the type that the config asks for.
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
        mistakes = error.errors(include_url=False)
    known = Config.model_fields | keys() | (keys(kind, "model.") if section else {})
    mistakes_of: dict[str, list[ErrorDetails]] = {}
    for mistake in mistakes:
        # In `loc`, branches of a union or places in a list follow the two names of the key.
        key = ".".join([*section, *map(str, mistake["loc"])][:2])
        mistakes_of.setdefault(key, []).append(mistake)
    lines = []
    for key, found in mistakes_of.items():
        value: Any = values
        for name in found[0]["loc"][: 2 - len(section)]:
            value = value.get(name)
        text = f"unknown key {key} ({_near(key, known)})" if found[0]["type"] == "extra_forbidden" else ""
        lines.append(f"{origins.get(key, 'config')}: {text or _describe(key, value, found)}")
    raise SharedError("\n       ".join(lines))


def _describe(key: str, value: Any, mistakes: list[ErrorDetails]) -> str:
    """What is wrong with a value. mistakes: those that pydantic found in it, for each type that the key may have."""
    # A mistake inside of the value: it has the right type, and those of other types do not matter.
    depth = max(len(mistake["loc"]) for mistake in mistakes)
    mistakes = [mistake for mistake in mistakes if len(mistake["loc"]) == depth]
    if mistakes[0]["type"] == "missing":
        return f"{key} is missing; set it in the file or on the command line"
    wrong = mistakes[0]["input"]
    given = json.dumps(wrong, default=str, skipkeys=True)
    shown = given if len(given) <= 200 else f"{given[:200]}..."
    wishes = [_wish(mistake) for mistake in mistakes if mistake["type"] in WISHES and mistake["input"] is wrong]
    if not wishes:  # a function that checks the value raised a ValueError, for example
        return f"{key} is {shown}; {mistakes[0].get('ctx', {}).get('error', mistakes[0]['msg'])}"
    listed = " or ".join(filter(None, (", ".join(wishes[:-1]), wishes[-1])))
    return f"{key} {'is' if wrong is value else 'has'} {shown}; it should be {listed}"


def _wish(mistake: ErrorDetails) -> str:
    """What a value should be, by one of its mistakes."""
    if mistake["type"] == "string_type" and isinstance(mistake["input"], bool | int | float):
        return "text in quotes"
    limits = {}
    for name, limit in mistake.get("ctx", {}).items():
        whole = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        limits[name] = f"{whole:,}" if isinstance(whole, int | float) else whole
    return WISHES[mistake["type"]].format(**limits)


def _near(key: str, known: Iterable[str]) -> str:
    """The key that an unknown key was meant to be, or else the keys of its section."""
    section, _, name = key.rpartition(".")
    close = [each for each in known if each.rpartition(".")[2] == name]  # in another section
    close = close or get_close_matches(key, known, 1, 0.75)
    siblings = [each for each in known if each.rpartition(".")[0] == section]
    return f"did you mean {close[0]}?" if close else f"allowed are: {', '.join(siblings) or 'none'}"
