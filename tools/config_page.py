"""Print the page docs/config.md of a project: every key of config.yaml with its default, allowed values and meaning.

Workloads that only some projects have stand between the Jinja conditions under which the hook keeps them.
"""

import json
from typing import Any

from template import PROJECT, condition_of

import workloads
from fastgpu.process.config import Config

HEAD = """# Configuration

For those who edit `config.yaml`: every key with its default value. `python train.py --help` prints the same, and
the keys of your own workload, too.

Of several `--config` files, later ones win over earlier ones, and `section.key=value` on the command line wins over all
files. An unknown key or a value that is not allowed is an error.
"""
WORKLOAD_HEAD = """## Workload `{name}`

The section `model` with `workload: {name}`: the class `Options` in `workloads/{name}.py`.
"""
TABLE_HEAD = """
| key | default | allowed | meaning |
|---|---|---|---|"""
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "pattern": "matching"}


def describe_allowed(field: dict[str, Any]) -> str:
    """The allowed values of a field of a JSON schema, in words."""
    if "anyOf" in field:
        return " or ".join(describe_allowed(branch) for branch in field["anyOf"])
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return f"list of {describe_allowed(field['items'])}"
    kind = "mapping" if field["type"] == "object" else field["type"]
    bounds = [f"{sign} `{field[name]}`" for name, sign in BOUNDS.items() if name in field]
    return " ".join([kind, *bounds])


def print_row(key: str, field: dict[str, Any]) -> None:
    """Print one line of a table."""
    default = f"`{json.dumps(field['default'])}`" if "default" in field else "required"
    cells = [f"`{key}`", default, describe_allowed(field), field["description"]]
    escaped = [" ".join(cell.split()).replace("|", r"\|") for cell in cells]
    print(f"| {' | '.join(escaped)} |")


def main() -> None:
    """Print the page."""
    schema = Config.model_json_schema()
    print(HEAD + TABLE_HEAD)
    for name, field in schema["properties"].items():
        section = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2])
        if section is None:
            print_row(name, field)
            continue
        for key, key_field in section["properties"].items():
            print_row(f"{name}.{key}", key_field)
    for path in sorted(PROJECT.glob("workloads/[a-z]*.py")):
        condition = condition_of(f"workloads/{path.name}")
        print(f"{{%- if {condition} %}}\n" if condition else "")
        print(WORKLOAD_HEAD.format(name=path.stem) + TABLE_HEAD)
        for key, field in workloads.find_options(path.stem).model_json_schema()["properties"].items():
            print_row(f"model.{key}", field)
        if condition:
            print("{%- endif %}")


if __name__ == "__main__":
    main()
