"""Print docs/config.md: every key of config.yaml with its default, the allowed values and its meaning."""

import itertools
import json
from typing import Any

from template import WORKLOADS

import workloads
from fastgpu.process.config import Config

HEAD = """# Configuration

For those who edit `config.yaml`: every key, as `python train.py --help` prints it. This page is made by `make fix` from
`fastgpu/process/config.py` and the `Options` of the workloads; do not edit it.

Of several `--config` files, later ones win over earlier ones, and `section.key=value` on the command line wins over all
files. An unknown key or a value that is not allowed is an error.
"""
WORKLOAD_HEAD = """
## Workload `{name}`

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
    for workload in itertools.chain(*WORKLOADS.values()):
        print(WORKLOAD_HEAD.format(name=workload) + TABLE_HEAD)
        for key, field in workloads.find_options(workload).model_json_schema()["properties"].items():
            print_row(f"model.{key}", field)


if __name__ == "__main__":
    main()
