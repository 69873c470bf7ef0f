"""From YAML files and `section.key=value` words to one checked `Config`. An error names file, line, key and cure."""

import json
import re
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from fastgpu.process.config import SECTIONS, Config, Section
from fastgpu.process.launch import UserError

OptionsT = TypeVar("OptionsT", bound=Section)
COMMAND_LINE = "command line"
USAGE = """usage: train.py [--config FILE]... [section.key=value]...
docs/config.md explains every key, and the class Options in workloads/ those of the section model."""


def load_config(argv: list[str]) -> Config:
    """Read `[--config FILE]... [section.key=value]...`; later ones win. Without --config, config.yaml is read.

    Raises UserError with one line for each mistake: file and line, key, value, what is allowed, and the nearest key.
    """
    if {"-h", "--help"} & set(argv):
        print(USAGE)
        raise SystemExit(0)
    paths, words = _split(argv)
    resume = words.get("run.resume", "never")
    if resume not in ("never", "auto", ""):
        run = Path(resume)
        recorded = sorted(run.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
        if not recorded:
            raise UserError(
                f"{COMMAND_LINE}: run.resume is {run}, which is no run with a config.yaml; use its folder, or auto"
            )
        paths.insert(0, str(recorded[-1]))  # a run that was resumed has a config-2.yaml, too
        words |= {"run.resume": "auto", "run.folder": json.dumps(str(run.parent)), "run.name": json.dumps(run.name)}
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in paths or ["config.yaml"]:
        _merge(tree, _read_file(path, origins))
    for key, text in words.items():
        section, _, name = key.partition(".")
        value = _parse(text, f"{COMMAND_LINE}: {key}", key, origins)
        _merge(tree, {section: {name: value} if name else value})
        origins |= {section: origins.get(section, COMMAND_LINE), key: COMMAND_LINE}
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise _explain(error, origins, [*keys()]) from None
    config.origins.update(origins)
    return config


def read_options(config: Config, options: type[OptionsT]) -> OptionsT:
    """The section `model`, checked by the class that the workload declares its settings with. Raises UserError."""
    try:
        return options.model_validate(config.model)
    except ValidationError as error:
        raise _explain(error, config.origins, [*keys(), *keys(options, "model.")], "model") from None


def keys(root: type[Section] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """{dotted key: its field} of every key. Those of the section `model` are fields of the workload's `Options`."""
    fields: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= keys(kind, f"{prefix}{name}.")
        elif name not in SECTIONS or prefix:
            fields[prefix + name] = field
    return fields


# ---------------------------------------------------------------------------------------------- reading


def _split(argv: list[str]) -> tuple[list[str], dict[str, str]]:
    """The paths after --config, and {key: value}."""
    paths: list[str] = []
    values: dict[str, str] = {}
    words = iter(argv)
    for word in words:
        key, equals, value = word.partition("=")
        if key == "--config":
            paths.append(value if equals else next(words, ""))
        elif key in values:
            raise UserError(f"{COMMAND_LINE}: {key} is given twice: keep one")
        elif equals and not key.startswith("-"):
            values[key] = value
        else:
            raise UserError(
                f'{COMMAND_LINE}: "{word}" is not understood: use --config FILE or section.key=value; flags of '
                "torchrun go before train.py"
            )
    return paths, values


def _merge(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Merge key by key. The value of a key is replaced as a whole, so that data.fields can lose a field."""
    for section, values in layer.items():
        old = tree.get(section)
        tree[section] = old | values if isinstance(old, dict) and isinstance(values, dict) else values


def _read_file(path: str, origins: dict[str, str]) -> dict[str, Any]:
    """The sections of a YAML file."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path}: cannot be read ({error}); start in the project's folder or name a YAML file with --config"
        ) from None
    tree = _parse(text, path, "", origins) or {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds {tree!r}; allowed are sections such as `data:` with keys below them")
    return tree


class _YamlLoader(yaml.SafeLoader):
    """YAML as people expect it: `1e-3` is a number, as in YAML 1.2."""


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def _parse(text: str, origin: str, prefix: str, origins: dict[str, str]) -> Any:
    """The value of a YAML text. Refuses a key that occurs twice; records the line of each key in `origins`."""

    def walk(node: yaml.Node, path: str) -> None:
        for element in node.value if isinstance(node, yaml.SequenceNode) else ():
            walk(element, path)
        seen: dict[str, int] = {}
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            line = key.start_mark.line + 1
            dotted = f"{path}.{key.value}".lstrip(".")
            if dotted in seen:
                raise UserError(f"{origin}:{line}: {dotted} stands twice, first in line {seen[dotted]}: keep one")
            seen[dotted] = line
            origins[dotted] = f"{origin}:{line}"
            walk(value, dotted)

    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        walk(node, prefix)
        return loader.construct_document(node)
    except UserError:
        raise
    except (yaml.YAMLError, ValueError) as error:  # ValueError: such as a date in month 13
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{origin}{line}: is not YAML: {problem}") from None


# ---------------------------------------------------------------------------------------------- messages


def _explain(error: ValidationError, origins: dict[str, str], known: list[str], section: str = "") -> UserError:
    """One line for each wrong key; the branches of a union (`int or "auto"`) become one line."""
    lines: dict[str, str] = {}
    allowed: dict[str, list[str]] = {}
    for item in error.errors(include_url=False):
        place = [section, *map(str, item["loc"])] if section else [*map(str, item["loc"])]
        key = ".".join(place[:2])  # branches of a union, or positions in a list, may follow
        origin = origins.get(key, "config")
        if item["type"] == "missing":
            lines[key] = f"{origin}: {key} is missing; set it in the file or on the command line"
        elif item["type"] == "extra_forbidden":
            lines[key] = f"{origin}: unknown key {key} ({_near(key, [*SECTIONS, *known])})"
        else:
            allowed.setdefault(key, []).append(re.sub(r"^\w+ should ", "", item["msg"]))
            wishes = " or ".join(dict.fromkeys(allowed[key]))
            close = get_close_matches(str(item["input"]), re.findall(r"'([^']+)'", wishes), 1)
            hint = f' (did you mean "{close[0]}"?)' if close else ""
            value = json.dumps(item["input"], default=str)
            lines[key] = f"{origin}: {key} is {value}; it should {wishes}{hint}"
    return UserError("\n       ".join(lines.values()))


def _near(key: str, known: list[str]) -> str:
    """What an unknown key should have been."""
    section, _, name = key.rpartition(".")
    close = [each for each in known if each.rpartition(".")[2] == name]  # in another section
    close = close or get_close_matches(key, known, 1, 0.75)
    if close:
        return f"did you mean {close[0]}?"
    siblings = [each for each in known if each.rpartition(".")[0] == section]
    return f"allowed are: {', '.join(siblings) or 'none'}"
