"""Reads YAML files and words such as `optim.lr=0.1` into one checked `Config`."""

import json
import sys
from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from fastgpu.process.commands import Parser
from fastgpu.process.config import Config, Section, expand_home
from fastgpu.process.launch import SharedError, check_alone, read_launch, say, warn
from fastgpu.process.project import project_folder
from fastgpu.process.yaml_text import MAX_TEXT, read_yaml

__all__ = ["load_config", "read_options"]

SectionT = TypeVar("SectionT", bound=Section)
COMMAND_LINE = "command line"
HELP = """\
docs/config.md explains every key; the keys of the section model come from the
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
"""{type of a pydantic error: what the value should be}. For other types, the message shows pydantic's own words."""


def load_config(argv: list[str], *, program: str = "train.py") -> Config:
    """Read `[--config FILE]... [section.key=value]...`; later ones win. The default file is config.yaml.

    program: the name of the program in messages. Raises SharedError with one line for each mistake: file and line, key,
    value, allowed values, and the nearest key.
    """
    files, words = _read_words(argv, program)
    recorded = _find_recorded(words)
    if recorded:
        files.insert(0, str(recorded))
        run = recorded.parent
        words |= {"run.resume": "auto", "run.folder": json.dumps(str(run.parent)), "run.name": json.dumps(run.name)}
    tree: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for path in files or ["config.yaml"]:
        cure = "" if files else f"; start it in {project_folder()}, or name a file (--config)"
        layer, places = _read_file(path, cure)
        _merge(tree, layer)
        origins |= places
    _add_words(tree, words, origins)
    config = _check(Config, tree, origins)
    config._origins.update(origins)
    config._words.update(words)
    if not config.run.check:  # launch/node.sh checks on each node, before it starts torchrun
        check_alone()
    if config.train.steps and (place := origins.get("train.epochs")):
        warn(f"{place}: train.epochs has no effect: train.steps={config.train.steps} ends the run")
    if recorded and read_launch().rank == 0:
        code = f"workload={config.workload} data.dataset={config.data.dataset}"
        say(f"{recorded} is resumed; the code that will be imported: {code}")
    return config


def _read_words(argv: list[str], program: str) -> tuple[list[str], dict[str, str]]:
    """The config files and the words, {key: text}, of a command line. Raises SharedError."""
    parser = Parser(prog=program, description=sys.modules["__main__"].__doc__, epilog=HELP)
    parser.add_argument("--config", metavar="FILE", action="append", default=[], help="default: config.yaml")
    parser.add_argument("--local-rank", type=int, help=SUPPRESS)  # python -m torch.distributed.launch adds it
    parser.add_argument("words", metavar="section.key=value", nargs="*", help="any key of the config")
    args, flags = parser.parse_known_intermixed_args(argv)
    if flags:
        word = _as_word(flags[0], argv)
        hint = f"keys are words, such as optim.lr=0.1, and flags of torchrun come before {program}"
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
    """The word `optim.lr=0.1` for `--lr 0.1` or `--lr=0.1`, the style of other programs. Empty: no key is similar."""
    name, _, value = flag.lstrip("-").partition("=")
    key_of = {key.rpartition(".")[2]: key for key in keys()}
    close = get_close_matches(name.replace("-", "_"), key_of, 1, 0.75)
    next_word = argv[argv.index(flag) + 1 :][:1]
    value = value or "".join(word for word in next_word if "=" not in word and not word.startswith("--"))
    return f"{key_of[close[0]]}={value or '...'}" if close else ""


def _find_recorded(words: Mapping[str, str]) -> Path | None:
    """The newest config of the run that `run.resume` names. None: `run.resume` names no run. Raises SharedError."""
    if (named := words.get("run.resume", "auto")) in ("auto", "never", ""):
        return None
    run = Path(expand_home(named))
    recorded = sorted(run.glob("config*.yaml"), key=lambda path: (len(path.name), path.name))
    if not recorded:
        raise SharedError(f"{COMMAND_LINE}: run.resume is {run}, which is no run with a config.yaml; name another one")
    return recorded[-1]  # a resumed run also has config-2.yaml


def _read_file(path: str, cure: str) -> tuple[dict[str, Any], dict[str, str]]:
    """The tree of a config file, and the place of each key. cure: the end of the message if it cannot be read.

    Raises SharedError.
    """
    try:
        with Path(expand_home(path)).open(encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except FileNotFoundError:
        names = [each.name for each in Path(expand_home(path)).parent.glob("*.yaml")]
        near = get_close_matches(Path(path).name, names, 1, 0.75)
        cure = f"; did you mean {Path(path).with_name(near[0])}?" if near else cure
        raise SharedError(f"{path} does not exist (looked in {Path.cwd()}){cure}") from None
    except (OSError, ValueError) as error:  # ValueError: the file is no text, or its name has a zero byte
        raise SharedError(f"{path} cannot be read ({error}){cure}") from None
    tree, places = read_yaml(text, path, Config)
    if not isinstance(tree or {}, dict):
        allowed = "allowed are sections such as `data:` with keys below them"
        raise SharedError(f"{path}: holds {tree!r:.200}; {allowed}")
    return tree or {}, places


def _add_words(tree: dict[str, Any], words: Mapping[str, str], origins: dict[str, str]) -> None:
    """Merge the values of words, {key: text}, into a tree. Raises SharedError for a word that is not YAML."""
    for key, text in words.items():
        section, _, name = key.partition(".")
        field = keys().get(key)
        value, places = read_yaml(text, f"{COMMAND_LINE}: {key}", field and field.annotation, key)
        value = _as_asked(field, text, value)
        origins |= places
        if name:
            _merge(tree, {section: {name: value}})
        else:  # a whole section, such as model={}, which replaces the section of the files
            tree[section] = value
        origins[key] = COMMAND_LINE
        origins.setdefault(section, COMMAND_LINE)


def read_options(config: Config, options: type[SectionT]) -> SectionT:
    """The section `model`, checked by the class `Options` of the workload. Raises SharedError."""
    texts = {name: config._words.get(f"model.{name}") for name in config.model}
    fields = options.model_fields
    others = [name for name in config.model if name not in fields and texts[name] is None]
    if others and config._origins.get("workload") == COMMAND_LINE:
        cure = "add 'model={}' to the command, or name a file for this workload (--config)"
        raise SharedError(f"workload={config.workload} has no model.{', model.'.join(others)} of the file; {cure}")
    values = {name: _as_asked(fields.get(name), texts[name], value) for name, value in config.model.items()}
    return _check(options, values, config._origins, "model")


def keys(root: type[Section] = Config, prefix: str = "") -> dict[str, FieldInfo]:
    """{dotted key: field} for every key outside `model`, whose keys the workload declares."""
    fields: dict[str, FieldInfo] = {}
    for name, field in root.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            fields |= keys(kind, f"{prefix}{name}.")
        elif root is not Config or name != "model":
            fields[prefix + name] = field
    return fields


def _merge(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Merge a layer into a tree, key by key. A value replaces the old value, so data.fields can lose a field."""
    for section, values in layer.items():
        old = tree.get(section)
        tree[section] = old | values if isinstance(old, dict) and isinstance(values, dict) else values


def _as_asked(field: FieldInfo | None, text: str | None, value: Any) -> Any:
    """The value of a word; its text where the field is text and YAML reads another type, as in run.name=20241127."""
    kinds = (field.annotation, *get_args(field.annotation)) if field else ()
    return value if text is None or str not in kinds or type(value) in (*kinds, list, dict) else text


def _check(kind: type[SectionT], values: dict[str, Any], origins: dict[str, str], *section: str) -> SectionT:
    """Validate the values of a section. Raises SharedError with one line for each wrong key."""
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        mistakes = error.errors(include_url=False)
    known = Config.model_fields | keys() | (keys(kind, "model.") if section else {})
    mistakes_of: dict[str, list[ErrorDetails]] = {}
    for mistake in mistakes:
        # In `loc`, the two names of the key come first, then branches of a union or places in a list.
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
    """The mistake in a value, in words. mistakes: pydantic's errors, of each type that the key may have."""
    # An error inside the value means that the value has the right type; errors for other types do not matter.
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
    *others, last = dict.fromkeys(wishes)
    listed = " or ".join(filter(None, (", ".join(others), last)))
    # YAML takes `{day:x.h5}` for a key `day:x.h5` without a value.
    has_colon = any(":" in str(name) for name in mistakes[0]["loc"])
    cure = "; write a space after the colon" if wrong is None and has_colon else ""
    return f"{key} {'is' if wrong is value else 'has'} {shown}; it should be {listed}{cure}"


def _wish(mistake: ErrorDetails) -> str:
    """What a value should be, according to one pydantic error."""
    if mistake["type"] == "string_type" and isinstance(mistake["input"], bool | int | float):
        return "text in quotes"
    limits = {}
    for name, limit in mistake.get("ctx", {}).items():
        whole = int(limit) if isinstance(limit, float) and limit.is_integer() else limit
        limits[name] = f"{whole:,}" if isinstance(whole, int | float) else whole
    return WISHES[mistake["type"]].format(**limits)


def _near(key: str, known: Iterable[str]) -> str:
    """A hint for an unknown key: the most similar key, or else the keys of its section."""
    section, _, name = key.rpartition(".")
    close = [each for each in known if each.rpartition(".")[2] == name]  # in another section
    close = close or get_close_matches(key, known, 1, 0.75)
    siblings = [each for each in known if each.rpartition(".")[0] == section]
    return f"did you mean {close[0]}?" if close else f"allowed are: {', '.join(siblings) or 'none'}"
