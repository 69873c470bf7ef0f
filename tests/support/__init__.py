"""Helpers that tests share. Modules of tests import from here and from the project, never from each other.

`rows` has rows that carry their own numbers, `images` has image files, `runs` has training runs and parts of them,
`ranks` has processes, and `projects` has baked projects, pages and examples.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
"""The repository."""
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
"""The project in place."""

# Where names come from that tests import:
# - `fastgpu`, `workloads`, and scripts such as `train`: the project;
# - `tools.NAME`: tools/ of the repository;
# - `contenders`, `data`, `order`, `peers`, `publish`, `tables`, `timeline`, `windows`, `worker`: bench/, whose modules
#   are scripts that import each other by these names;
# - `contract`: tests/ of the project, the check of a workload that projects ship.
sys.path += [str(PROJECT), str(ROOT), str(ROOT / "bench"), str(PROJECT / "tests")]
