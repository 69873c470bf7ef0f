"""Command lines: a dataclass for each command. Its fields are the arguments of the command.

    @dataclass(frozen=True, kw_only=True)
    class Report:
        \"\"\"What a run did.\"\"\"

        runs: tuple[Path, ...] = argument("folder of a run")
        csv: bool = flag("print CSV", default=False)

`parse(Report, argv)` returns a Report. This module does not import torch, so --help and mistakes are shown immediately.
"""

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, field, fields
from inspect import get_annotations, getdoc
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from fastgpu.process.launch import SharedError

T = TypeVar("T")


class Parser(ArgumentParser):
    """An ArgumentParser that raises SharedError, with a message of one line, and keeps the lines of descriptions."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=RawDescriptionHelpFormatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise SharedError with the message and a hint at --help."""
        raise SharedError(f"{message.removeprefix('argument ')}; python {self.prog} --help lists what it takes")


def argument(text: str, *, default: Any = MISSING, **options: Any) -> Any:
    """A positional argument. A tuple takes all remaining words, and needs at least one if it has no default.

    text: the help text, in which a `%` is doubled. options: of `ArgumentParser.add_argument`, such as metavar, or type:
    a function that converts a word, or raises ArgumentTypeError.
    """
    return field(default=default, metadata={"names": None, "help": text, **options})


def flag(text: str, *names: str, default: Any = None, **options: Any) -> Any:
    """An option `--name VALUE`, or `--name` for a boolean field with the default False. See `argument`.

    names: names of the option, such as -o and --output, that replace the name of the field.
    """
    return field(default=default, metadata={"names": names, "help": text, **options})


def parse(kind: type[T], argv: Sequence[str], *, program: str) -> T:
    """The command line as an instance of the dataclass `kind`. Raises SharedError for a mistake.

    program: the name of the program in messages. --help shows the docstring of the dataclass.
    """
    return _make(kind, _parser_of(kind, program).parse_intermixed_args(argv))


def parse_known(kind: type[T], argv: Sequence[str], *, program: str) -> tuple[T, list[str]]:
    """Like `parse`, and also return the words that are no arguments of the dataclass."""
    given, others = _parser_of(kind, program).parse_known_intermixed_args(argv)
    return _make(kind, given), others


def parse_command(kinds: Mapping[str, type[T]], argv: Sequence[str], *, program: str, text: str) -> T:
    """Like `parse`, for a program with several commands: the first word names the command. kinds: {name: dataclass}.

    --help shows the docstring lines that begin with `python` and the program as examples.
    """
    docs = {name: (getdoc(kind) or "").splitlines() for name, kind in kinds.items()}
    width = max(map(len, kinds))
    listed = [f"  {name:<{width}}  {lines[0]}" for name, lines in docs.items()]
    examples = [f"  {line}" for lines in docs.values() for line in lines if line.startswith(f"python {program} ")]
    parser = Parser(
        prog=program,
        usage="%(prog)s COMMAND ...",
        description="\n".join([text, "", "commands:", *listed]),
        epilog="\n".join(["examples:", *examples]),
    )
    parser.add_argument("command", metavar="COMMAND", choices=[*kinds], help=f"{program} COMMAND --help explains it")
    name = parser.parse_args(argv[:1]).command
    return parse(kinds[name], argv[1:], program=f"{program} {name}")


def _parser_of(kind: type, program: str) -> Parser:
    """A parser with an argument for each field of a dataclass: first its own fields, then the fields of its base."""
    parser = Parser(prog=program, description=getdoc(kind))
    types = get_type_hints(kind)
    field_of = {each.name: each for each in fields(kind)}
    for name in dict.fromkeys(name for base in kind.__mro__ for name in get_annotations(base)):
        default = field_of[name].default
        options = dict(field_of[name].metadata)
        names = options.pop("names")
        is_required = default is MISSING
        if not is_required:
            options["default"] = list(default) if isinstance(default, tuple) else default
        if "type" not in options:
            options = _options_of(types[name], is_required=is_required) | options
        if names is None:
            parser.add_argument(name, **{"metavar": name.upper()} | options)
        else:
            names = names or (f"--{name.replace('_', '-')}",)
            parser.add_argument(*names, dest=name, required=is_required, **options)
    # `parse_intermixed_args` formats the usage, so the % of a metavar would be an error.
    parser.usage = parser.format_usage().removeprefix("usage: ").rstrip().replace("%", "%%")
    return parser


def _make(kind: type[T], given: Namespace) -> T:
    values = {each.name: getattr(given, each.name) for each in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})


def _options_of(kind: Any, *, is_required: bool) -> dict[str, Any]:
    """Options of `add_argument` for a type: bool, str, int, float, Path, Literal, a tuple, or one of these or None."""
    if NoneType in get_args(kind):
        (kind,) = [each for each in get_args(kind) if each is not NoneType]
    if kind is bool:
        return {"action": "store_true"}
    if get_origin(kind) is Literal:
        return {"choices": get_args(kind)}
    if get_origin(kind) is tuple:
        return {"type": get_args(kind)[0], "nargs": "+" if is_required else "*"}
    return {"type": kind}
