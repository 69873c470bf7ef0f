"""Print the page docs/config.md of a project: every key of config.yaml with its default, allowed values and meaning.

Workloads that only some projects have stand between the Jinja conditions under which the hook keeps them.
"""

from collections.abc import Mapping

from template import PROJECT, condition_of

import workloads
from fastgpu.process.config_loader import keys

HEAD = """# Configuration

For those who edit `config.yaml`: every key with its default value. `python train.py --help` prints the same, and
the keys of your own workload, too.

Of several `--config` files, later ones win over earlier ones, and `section.key=value` on the command line wins over all
files. An unknown key or a value that is not allowed is an error.
"""
WORKLOAD_HEAD = """## Workload `{name}`

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
    for path in sorted(PROJECT.glob("workloads/[a-z]*.py")):
        condition = condition_of(f"workloads/{path.name}")
        print(f"{{%- if {condition} %}}\n" if condition else "")
        print(WORKLOAD_HEAD.format(name=path.stem))
        print_table(keys(workloads.find_options(path.stem), "model."))
        if condition:
            print("{%- endif %}")
