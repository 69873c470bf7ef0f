"""Print the page docs/config.md of a project: every key of config.yaml with its default, allowed values and meaning.

Each section has a heading, so that pages can link it. Workloads that only some projects have are between the
comments with which the hook keeps or removes them. Workloads with the same settings have one section.
"""

import json
from typing import Any

from facts import KEEP, PROJECT

import workloads
from fastgpu.process.config import Config, Section
from fastgpu.process.config_loader import keys

HEAD = """# Configuration

For anyone who edits `config.yaml`: every key with its default value.

Of several `--config` files, later ones win over earlier ones, and `section.key=value` on the command line wins over all
files. A word is read as YAML, but where text is expected it stays text (`run.name=20241127`). An unknown key or a
value that is not allowed is an error. To add a key of your own, add a field to the class
`Options` of your workload, as `workloads/minimal.py` does.

Editors with a YAML language server, such as VS Code with the extension YAML, complete and explain the keys: the first
line of a config names [config.schema.json](config.schema.json). In it, the section `model` is open.
"""
WORKLOAD_HEAD = """## {title}

The section `model` with {workloads}: the class `Options` in `{module}.py`.
"""
TABLE_HEAD = """\
| key | default | allowed | meaning |
|---|---|---|---|"""


BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "pattern": "matching"}
"""{word of JSON schema: what the page says}"""


def describe_allowed(field: dict[str, Any]) -> str:
    """The allowed values of a field of a JSON schema, in words."""
    if "anyOf" in field:
        return " or ".join(map(describe_allowed, field["anyOf"]))
    values = field.get("enum", [field["const"]] if "const" in field else [])
    if values:
        return ", ".join(f"`{value}`" for value in values)
    kind = field.get("type", "any value")
    if kind == "array":
        return f"list of {describe_allowed(field.get('items', {}))}"
    bounds = [f"{sign} `{field[name]}`" for name, sign in BOUNDS.items() if name in field]
    return " ".join(["mapping" if kind == "object" else kind, *bounds])


def allowed_values(root: type[Section], prefix: str = "") -> dict[str, str]:
    """{dotted key: allowed values as Markdown}"""
    allowed: dict[str, str] = {}
    properties = root.model_json_schema()["properties"] if root.model_fields else {}
    for name, field in root.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            allowed |= allowed_values(kind, f"{prefix}{name}.")
        else:
            allowed[prefix + name] = describe_allowed(properties[name])
    return allowed


def print_table(root: type[Section], prefix: str = "", *, only_plain: bool = False) -> None:
    """Print one line for each key. only_plain: without the sections below."""
    print(TABLE_HEAD)
    allowed_of = allowed_values(root, prefix)
    for key, field in keys(root, prefix).items():
        if only_plain and "." in key:
            continue
        default = json.dumps(field.get_default(call_default_factory=True), default=str)
        shown = "required" if field.is_required() else f"`{default}`"
        cells = [f"`{key}`", shown, allowed_of[key], field.description or ""]
        escaped = [" ".join(cell.split()).replace("|", r"\|") for cell in cells]
        print(f"| {' | '.join(escaped)} |")


def main() -> None:
    """Print the page."""
    print(HEAD)
    print_table(Config, only_plain=True)
    print()
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            print(f"## `{name}`\n\n{' '.join((section.__doc__ or '').split())}\n")
            print_table(section, f"{name}.")
            print()
    names_of: dict[type[Section], list[str]] = {}
    for path in sorted(PROJECT.glob("workloads/[a-z]*.py")):
        names_of.setdefault(workloads.load(path.stem).Options, []).append(path.stem)
    for options, names in names_of.items():
        answers = KEEP.get(f"workloads/{names[0]}.py", {}).get("workload", [])
        if answers:
            print(f"<!-- only: {answers[0]} -->")
        title = f"Workload{'s' * (len(names) > 1)} {' and '.join(f'`{name}`' for name in names)}"
        named = " or ".join(f"`workload: {name}`" for name in names)
        print(WORKLOAD_HEAD.format(title=title, workloads=named, module=options.__module__.replace(".", "/")))
        print_table(options, "model.")
        print("\n<!-- end -->" if answers else "")


if __name__ == "__main__":
    main()
