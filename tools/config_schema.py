"""Print config.schema.json, by which an editor checks and completes config.yaml.

The section `model` is checked by the settings of the chosen workload if the template ships that workload. A workload of
the user's own may have any settings there; training checks them.
"""

import itertools
import json
from typing import Any

from template import WORKLOADS

import workloads
from fastgpu.process.config import Config


def make_schema() -> dict[str, Any]:
    """The JSON schema of `Config`, with one rule for each shipped workload."""
    schema = Config.model_json_schema()
    schema["allOf"] = []
    for name in itertools.chain(*WORKLOADS.values()):
        schema["$defs"][name] = workloads.find_options(name).model_json_schema()
        is_chosen = {"properties": {"workload": {"const": name}}, "required": ["workload"]}
        has_its_settings = {"properties": {"model": {"$ref": f"#/$defs/{name}"}}}
        schema["allOf"].append({"if": is_chosen, "then": has_its_settings})
    return schema


if __name__ == "__main__":
    print(json.dumps(make_schema(), indent=2))
