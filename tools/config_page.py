"""Print docs/config.md: every key of config.yaml with its default, the allowed values and its meaning."""

import itertools
from collections.abc import Mapping

from template import WORKLOADS

import workloads
from fastgpu.process.config_loader import keys

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
TABLE_HEAD = """\
| key | default | allowed | meaning |
|---|---|---|---|"""


def print_table(described: Mapping[str, tuple[str, str, str]]) -> None:
    """Print one line for each key."""
    print(TABLE_HEAD)
    for key, (default, allowed, description) in described.items():
        cells = [f"`{key}`", "required" if default == "(required)" else f"`{default}`", allowed, description]
        escaped = [" ".join(cell.split()).replace("|", r"\|") for cell in cells]
        print(f"| {' | '.join(escaped)} |")


if __name__ == "__main__":
    print(HEAD)
    print_table(keys())
    for workload in itertools.chain(*WORKLOADS.values()):
        print(WORKLOAD_HEAD.format(name=workload))
        print_table(keys(workloads.find_options(workload), "model."))
