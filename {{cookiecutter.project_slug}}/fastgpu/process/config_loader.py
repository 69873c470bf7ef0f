"""From text to Config."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from fastgpu.process.config import Config, Section
from fastgpu.process.launch import UserError


def load_config(argv: list[str]) -> Config:
    """`[--config FILE]... [section.key=value]...` -> Config; later ones win. Without --config: config.yaml.

    Raises UserError with a line for each thing that is wrong: file and line, key, value, what is allowed, nearest key.
    """
    paths, overrides = _split(argv)
    tree: dict[str, Any] = {}
    source: dict[str, str] = {}  # dotted key -> who set it last
    for path in paths or ["config.yaml"]:
        _merge(tree, _read_yaml(path, source))
    for override in overrides:
        key, _, text = override.partition("=")
        branch: Any = _parse(text, f"command line: {key}", key, source)
        for name in reversed(key.split(".")):
            branch = {name: branch}
        _merge(tree, branch)
        source[key] = "command line"
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n       ".join(_explain(error, source))) from None


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    paths, overrides, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            print(describe())
            raise SystemExit(0)
        if word == "--config" and rest:
            paths.append(rest.pop(0))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        else:
            raise UserError(f'command line: "{word}" is not understood: use --config FILE, section.key=value or --help')
    return paths, overrides


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: `1e-3` is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def _read_yaml(path: str, source: dict[str, str]) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; start in the project's folder or name the file with --config"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; name a YAML file") from None
    tree = _parse(text, path, "", source)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds {tree!r}; allowed are sections such as `data:` with keys below them")
    return tree


def _parse(text: str, where: str, prefix: str, source: dict[str, str]) -> Any:
    """The value of a YAML text. Refuses a key that stands twice; notes the line of each key in `source`."""

    def walk(node: yaml.Node, path: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        seen: dict[str, int] = {}
        for key, value in node.value:
            dotted, line = f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1
            if key.value in seen:
                raise UserError(f"{where}:{line}: {dotted} stands twice, first in line {seen[key.value]}: keep one")
            seen[key.value] = line
            source[dotted] = f"{where}:{line}"
            walk(value, dotted)

    try:
        node = yaml.compose(text, _Loader)
        if node is not None:
            walk(node, prefix)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: is not YAML: {getattr(error, 'problem', None) or error}") from None


def _merge(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Key by key; the value of a key is replaced as a whole, `data.fields` too, or one could not leave a field out."""
    for key, value in layer.items():
        if key in _sections() and isinstance(value, dict) and isinstance(tree.get(key), dict):
            tree[key] |= value
        else:
            tree[key] = value


def _explain(error: ValidationError, source: dict[str, str]) -> list[str]:
    """One line a key; the branches of a union (`int or "auto"`) become one line."""
    wrong: dict[str, tuple[str, Any, list[str]]] = {}
    for item in error.errors(include_url=False):
        key = _field_of(item["loc"])
        if item["type"] == "extra_forbidden":
            key = ".".join(str(part) for part in item["loc"])
        _, _, allowed = wrong.setdefault(key, (item["type"], item["input"], []))
        allowed.append(re.sub(r"^\w+ should ", "", item["msg"]))
    lines = []
    for key, (kind, value, allowed) in wrong.items():
        where = source.get(key) or next((s for k, s in source.items() if k.startswith(f"{key}.")), "config")
        if kind == "extra_forbidden":
            close = difflib.get_close_matches(key, keys(), 1, 0.75) or _same_ending(key)
            hint = f"did you mean {close[0]}?" if close else f"allowed are: {', '.join(_siblings(key))}"
            lines.append(f"{where}: unknown key {key} ({hint})")
        else:
            choices = re.findall(r"'([^']+)'", " ".join(allowed))
            close = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
            hint = f' (did you mean "{close[0]}"?)' if close else ""
            should = "hold keys of its own" if key in _sections() else " or ".join(dict.fromkeys(allowed))
            lines.append(f"{where}: {key} is {json.dumps(value, default=str)}; it should {should}{hint}")
    return lines


def _field_of(loc: tuple[int | str, ...]) -> str:
    """The dotted key inside a pydantic location, which also names list positions and union branches."""
    model, names = Config, []
    for part in loc:
        if not (isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields):
            break
        names.append(str(part))
        model = model.model_fields[str(part)].annotation  # type: ignore[assignment]
    return ".".join(names)


def _sections() -> dict[str, type[Section]]:
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Section)}


def keys() -> list[str]:
    """Every dotted key there is."""
    sections = _sections()
    return [
        dotted
        for name in Config.model_fields
        for dotted in ([f"{name}.{key}" for key in sections[name].model_fields] if name in sections else [name])
    ]


def _siblings(key: str) -> list[str]:
    section = key.rpartition(".")[0]
    return [k for k in keys() if section and k.rpartition(".")[0] == section] or list(Config.model_fields)


def _same_ending(key: str) -> list[str]:
    return [k for k in keys() if k.rpartition(".")[2] == key.rpartition(".")[2]]


def flat(config: Config) -> dict[str, Any]:
    """Config -> {dotted key: value}."""
    return {
        key: getattr(getattr(config, section), name) if section else getattr(config, name)
        for key in keys()
        for section, _, name in [key.rpartition(".")]
    }


def describe() -> str:
    """The text of --help: every key, its default and its meaning."""
    lines = ["usage: train.py [--config FILE]... [section.key=value]...", "", "Keys and their defaults:"]
    sections, defaults = _sections(), flat(Config())
    for key in keys():
        section, _, name = key.rpartition(".")
        doc = (sections[section] if section else Config).model_fields[name].description
        lines.append(f"  {key}={json.dumps(defaults[key])}\n      {doc}")
    return "\n".join(lines)
