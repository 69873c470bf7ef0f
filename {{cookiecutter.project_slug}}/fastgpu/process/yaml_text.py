"""Reads YAML with the line of each key, in bounded time. Names such as `on` are text where the config expects text."""

import os
import re
from collections.abc import Iterator
from math import inf
from types import UnionType
from typing import Any, get_args, get_origin

import yaml

from fastgpu.process.launch import SharedError

MAX_TEXT = 1 << 20
"""Maximum number of characters of a config file: parsing that many takes seconds."""
MAX_NODES = 100_000
"""Maximum number of keys and values of a file, with its aliases expanded: few aliases may expand to millions."""
MAX_BYTES = 3500
"""Maximum bytes of a key or value: a path has at most 4,095 bytes, and Python reads numbers of up to 4,300 digits."""


class YamlLoader(yaml.SafeLoader):
    """A YAML loader with bounded time for any text. Its own checks raise yaml.YAMLError or RecursionError."""

    def __init__(self, text: str):
        if len(text) > MAX_TEXT:
            raise yaml.YAMLError(f"has more than {MAX_TEXT:,} letters; name files by a pattern, such as photos-*.h5")
        super().__init__(text)

    def get_single_node(self) -> yaml.Node | None:
        """The tree of the text, in which aliases of a value share its node."""
        node: yaml.Node | None = super().get_single_node()
        if node and _count_nodes(node, {}) > MAX_NODES:
            raise yaml.YAMLError(f"expands to more than {MAX_NODES:,} keys and values; write fewer, and fewer aliases")
        return node


def _count_nodes(node: yaml.Node, known: dict[yaml.Node, float]) -> float:
    """The number of nodes of a tree with all aliases expanded; infinite if a node contains itself."""
    if node not in known:
        known[node] = inf
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        pairs = (each if isinstance(each, tuple) else (each,) for each in below)
        known[node] = 1 + sum(_count_nodes(each, known) for pair in pairs for each in pair)
    return known[node]


class _ConfigLoader(YamlLoader):
    """YAML as people expect it: `1e-3` is a number, as in YAML 1.2. All text that it accepts is valid in a path."""

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> str:
        text: str = super().construct_scalar(node)
        try:
            encoded = os.fsencode(text)
        except UnicodeEncodeError:  # a lone surrogate
            encoded = b"\0"
        if len(encoded) > MAX_BYTES or b"\0" in encoded:
            problem = f"{text[:50]!r} is not allowed: use at most {MAX_BYTES:,} bytes of UTF-8, none of them zero"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return text


_ConfigLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)$"), list("-+.0123456789")
)
NAMES = {f"tag:yaml.org,2002:{kind}" for kind in ("bool", "int", "float", "timestamp", "value")}
"""Tags of values that may be meant as names: `on`, 2024, 1e3, 2024-11-27, =."""


def read_yaml(text: str, place: str, kind: Any, prefix: str = "") -> tuple[Any, dict[str, str]]:
    """The value of a YAML text, and the place of each key, such as {data.echo: config.yaml:12}.

    kind: the expected type. prefix: the key of this value. Raises SharedError if the text is no YAML or a key occurs
    twice.
    """
    lines: dict[str, int] = {}
    try:
        loader = _ConfigLoader(text)
        node = loader.get_single_node()
        for key, at in _keys_in(node, prefix):
            if key in lines:
                raise yaml.MarkedYAMLError(problem=f"{key} occurs twice, first in line {lines[key]}", problem_mark=at)
            lines[key] = at.line + 1
        _read_names(loader, node, kind)
        value = loader.construct_document(node) if node else None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError) as error:  # a date in month 13
        raise SharedError(_explain(error, text, place, prefix)) from None
    return value, {key: f"{place}:{line}" for key, line in lines.items()}


def _explain(error: Exception, text: str, place: str, prefix: str) -> str:
    """The message for an error in a text: its place, the problem and perhaps a cure."""
    mark = getattr(error, "problem_mark", None)
    line = f":{mark.line + 1}" if mark else ""
    problem = " ".join(str(getattr(error, "problem", None) or error).split())
    if not isinstance(error, yaml.YAMLError | ValueError):
        is_deep = isinstance(error, RecursionError)
        problem = "is nested too deeply" if is_deep else "a value does not fit the !!tag before it"
    is_text = prefix and isinstance(error, yaml.scanner.ScannerError | yaml.parser.ParserError)
    cure = f"""; if it is text, such as a glob, quote it twice: {prefix}='"{text}"'""" if is_text else ""
    return f"{place}{line}: {problem}{cure}"


def _read_names(loader: yaml.SafeLoader, node: yaml.Node | None, kind: Any) -> None:
    """Turn YAML's numbers and booleans into text where they are keys, or where the config expects text.

    kind: the type that the config expects.
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


def _keys_in(node: yaml.Node | None, prefix: str) -> Iterator[tuple[str, yaml.Mark]]:
    """(dotted key, its place in the text) of each key of nested mappings."""
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        dotted = f"{prefix}.{key.value}".lstrip(".")
        yield dotted, key.start_mark
        yield from _keys_in(value, dotted)
