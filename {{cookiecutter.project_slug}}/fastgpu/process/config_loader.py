"""From YAML files and `section.key=value` words to one checked `Config`. An error names file, line, key and cure."""

import difflib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from fastgpu.process.config import SECTIONS, Config, Section
from fastgpu.process.launch import UserError

OptionsT = TypeVar("OptionsT", bound=Section)
FindOptions = Callable[[str], type[Section]]
"""Name of a workload -> the class of its settings."""
MAX_SHOWN = 200
"""Length of a value in a message."""
TORCHRUN_FLAGS = ("nproc-per-node", "nnodes", "node-rank", "standalone", "rdzv-", "max-restarts", "master-")


def load_config(argv: list[str], find_options: FindOptions | None = None) -> Config:
    """Read `[--config FILE]... [section.key=value]...`; later ones win. Without --config, config.yaml is read.

    find_options: used by --help, to list the settings of the workload as well. Raises UserError with one line for each
    mistake: file and line, key, value, what is allowed, and the nearest key.
    """
    if {"-h", "--help"} & set(argv):
        print(_help(argv, find_options))
        raise SystemExit(0)
    tree, origins = _read(argv)
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n       ".join(_explain(error, origins, Config, ""))) from None
    config.origins.update(origins)
    return config


def read_options(config: Config, options: type[OptionsT]) -> OptionsT:
    """The section `model`, checked by the class that the workload declares its settings with. Raises UserError."""
    try:
        return options.model_validate(config.model)
    except ValidationError as error:
        lines = _explain(error, config.origins, options, "model.")
        raise UserError("\n       ".join(lines)) from None


def keys(root: type[Section] = Config, prefix: str = "") -> dict[str, tuple[str, str]]:
    """{dotted key: (default as JSON, or "(required)"; description)} of every key."""
    described: dict[str, tuple[str, str]] = {}
    for name, field in root.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            described |= keys(kind, f"{prefix}{name}.")
        elif name not in SECTIONS or prefix:
            default = "(required)"
            if not field.is_required():
                default = json.dumps(field.get_default(call_default_factory=True), default=str)
            described[prefix + name] = (default, field.description or "")
    return described


# ---------------------------------------------------------------------------------------------- reading


def _read(argv: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The merged tree of all files and words, and {dotted key: where it was set last}."""
    paths, overrides = _split(argv)
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    words = dict(override.partition("=")[::2] for override in overrides)
    run = words.get("run.resume", "never")
    if run not in ("never", "auto", ""):
        paths = [_recorded(run), *paths]
        overrides = [word for word in overrides if not word.startswith("run.resume=")]
        overrides += [
            "run.resume=auto",
            f"run.folder={json.dumps(str(Path(run).parent))}",
            f"run.name={Path(run).name}",
        ]
    for path in paths or ["config.yaml"]:
        _merge(tree, _read_yaml(path, origins))
    for override in overrides:
        key, _, text = override.partition("=")
        if origins.get(key) == "command line":
            raise UserError(f"command line: {key} is given twice: keep one")
        if any("\udc80" <= character <= "\udcff" for character in text):
            raise UserError(f"command line: {key} is {text!a}, which is not UTF-8; rename the file")
        branch: Any = _parse(text, f"command line: {key}", key, origins)
        for name in reversed(key.split(".")):
            branch = {name: branch}
        _merge(tree, branch)
        origins[key] = "command line"
    return tree, origins


def _recorded(run: str) -> str:
    """The newest config.yaml in the folder of a run: a resumed run adds config-2.yaml. Raises UserError for none."""
    paths = sorted(Path(run).glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise UserError(
            f"command line: run.resume is {run}, which is no run with a config.yaml; use its folder, or auto"
        )
    return str(paths[-1])


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """The paths after --config, and the overrides."""
    paths = []
    overrides = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if word == "--config" and words:
            paths.append(words.pop(0))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        elif word.lstrip("-").replace("_", "-").startswith(TORCHRUN_FLAGS):
            raise UserError(
                f"command line: {word} is a flag of torchrun, which goes before the script: torchrun --standalone "
                "--nproc-per-node=gpu train.py"
            )
        else:
            raise UserError(f'command line: "{word}" is not understood: use --config FILE, section.key=value or --help')
    return paths, overrides


class _YamlLoader(yaml.SafeLoader):
    """YAML as people expect it: `1e-3` is a number, as in YAML 1.2."""


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def _read_yaml(path: str, origins: dict[str, str]) -> dict[str, Any]:
    try:
        if Path(path).exists() and not Path(path).is_file():  # a device or a pipe may never end
            raise UserError(f"{path}: is not a file; name a YAML file")
        with Path(path).open(encoding="utf-8") as file:
            text = file.read()
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; start in the project's folder or name the file with --config"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; name a YAML file") from None
    tree = _parse(text, path, "", origins)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(
            f"{path}: holds {_shorten(repr(tree))}; allowed are sections such as `data:` with keys below them"
        )
    return tree


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
    except (
        yaml.YAMLError,
        ValueError,
        ArithmeticError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = " ".join(str(getattr(error, "problem", None) or error).split())
        raise UserError(f"{origin}{line}: is not YAML: {_shorten(problem)}") from None


def _merge(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Merge key by key. The value of a key is replaced as a whole, so that data.fields can lose a field."""
    for key, value in layer.items():
        if key in SECTIONS and isinstance(value, dict) and isinstance(tree.get(key), dict):
            tree[key] |= value
        else:
            tree[key] = value


# ---------------------------------------------------------------------------------------------- messages


def _explain(error: ValidationError, origins: dict[str, str], root: type[Section], prefix: str) -> list[str]:
    """One line for each wrong key; the branches of a union (`int or "auto"`) become one line."""
    wrong: dict[str, tuple[str, Any, list[str]]] = {}
    for item in error.errors(include_url=False):
        key = prefix + _field_of(item["loc"], root)
        if item["type"] in ("extra_forbidden", "missing"):
            key = prefix + ".".join(str(part) for part in item["loc"])
        _, _, allowed = wrong.setdefault(key, (item["type"], item["input"], []))
        allowed.append(re.sub(r"^\w+ should ", "", item["msg"]))
    known = list(dict.fromkeys([*keys(), *keys(root, prefix)]))  # root may be the whole config
    lines = []
    for key, (kind, value, allowed) in wrong.items():
        if kind == "missing":
            lines.append(f"config: {key} is missing; set it in the file or on the command line")
            continue
        origin = origins.get(key) or next((o for k, o in origins.items() if k.startswith(f"{key}.")), "config")
        if kind == "extra_forbidden":
            lines.append(f"{origin}: unknown key {key} ({_hint(key, known)})")
            continue
        choices = re.findall(r"'([^']+)'", " ".join(allowed))
        close = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
        hint = f' (did you mean "{close[0]}"?)' if close else ""
        if key == "data.val" and isinstance(value, (int, float)):
            hint = f" (did you mean {100 * value if value < 1 else value:g}%?)"
        should = "hold keys of its own" if key in SECTIONS else " or ".join(dict.fromkeys(allowed))
        lines.append(f"{origin}: {key} is {_shorten(json.dumps(value, default=str))}; it should {should}{hint}")
    return lines


def _hint(key: str, known: list[str]) -> str:
    """What an unknown key should have been."""
    section, _, name = key.rpartition(".")
    close = [known_key for known_key in known if known_key.rpartition(".")[2] == name]  # in another section
    close = close or difflib.get_close_matches(key, [*known, *SECTIONS], 1, 0.75)
    if close:
        return f"did you mean {close[0]}?"
    siblings = [known_key for known_key in known if section and known_key.rpartition(".")[0] == section]
    if section == "model" and not siblings:
        return "this workload has no settings"
    return f"allowed are: {', '.join(siblings or Config.model_fields)}"


def _field_of(loc: tuple[int | str, ...], root: type[Section]) -> str:
    """The dotted key in a pydantic location, which also contains list positions and branches of unions."""
    model: Any = root
    names = []
    for part in loc:
        if not (isinstance(model, type) and issubclass(model, Section) and part in model.model_fields):
            break
        names.append(str(part))
        model = model.model_fields[str(part)].annotation
    return ".".join(names)


def _help(argv: list[str], find_options: FindOptions | None) -> str:
    """The text of --help: every key with its default and its meaning."""
    lines = [
        "usage: train.py [--config FILE]... [section.key=value]...",
        "",
        "Keys and defaults:",
    ]
    described = keys()
    if find_options:
        tree, _ = _read([word for word in argv if word not in ("-h", "--help")])
        if "workload" in tree:
            described |= keys(find_options(str(tree["workload"])), "model.")
    for key, (default, description) in described.items():
        lines.append(f"  {key}={default}\n      {' '.join(description.split())}")
    return "\n".join(lines)
