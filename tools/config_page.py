"""Print docs/config.md: every key of config.yaml, its default, what is allowed and what it means, from the models."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "{{cookiecutter.project_slug}}"))

from fastgpu.process.config import Config

HEAD = """# Configuration

Made from the models in `fastgpu/config.py` by `make fix`; do not edit. Later `--config` files win over earlier ones
and `section.key=value` on the command line over all. What is not understood is an error.

| key | default | allowed | meaning |
|---|---|---|---|"""
BOUNDS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<", "pattern": "matching"}


def allowed(field: dict[str, Any]) -> str:
    """One field of a JSON schema in words."""
    if "anyOf" in field:
        return " or ".join(allowed(each) for each in field["anyOf"])
    if "enum" in field or "const" in field:
        return ", ".join(f"`{value}`" for value in field.get("enum", [field.get("const")]))
    if field["type"] == "array":
        return f"list of {allowed(field['items'])}"
    bounds = [f"{sign} `{field[name]}`" for name, sign in BOUNDS.items() if name in field]
    return " ".join([{"object": "mapping"}.get(field["type"], field["type"]), *bounds])


def main() -> None:
    schema = Config.model_json_schema()
    print(HEAD)
    for name, field in schema["properties"].items():
        section = schema["$defs"].get(field.get("$ref", "").rpartition("/")[2])
        rows = {f"{name}.{key}": each for key, each in section["properties"].items()} if section else {name: field}
        for key, each in rows.items():
            default = f"`{json.dumps(each['default'])}`"
            print(f"| `{key}` | {default} | {allowed(each)} | {each['description']} |")


if __name__ == "__main__":
    main()
