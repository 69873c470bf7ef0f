"""Print docs/config.schema.json of a project: what an editor needs to complete, explain and check the keys of a config.

The first line of each config names it. The section `model` stays open, since each workload has settings of its own. No
key is required, since a config may be one of several `--config` files.
"""

import json
from typing import Any

import facts  # noqa: F401  (it finds the project)

from fastgpu.process.config import Config


def tidied(schema: Any) -> Any:
    """The part of a JSON schema that editors use, with each text on one line."""
    if isinstance(schema, list):
        return [tidied(each) for each in schema]
    if not isinstance(schema, dict):
        return " ".join(schema.split()) if isinstance(schema, str) else schema
    return {
        name: part if name in ("default", "enum", "const", "pattern") else tidied(part)
        for name, part in schema.items()
        if not (name == "required" or (name == "title" and isinstance(part, str)))
    }


def main() -> None:
    """Print the schema."""
    draft = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    print(json.dumps(draft | tidied(Config.model_json_schema()), indent=1))


if __name__ == "__main__":
    main()
