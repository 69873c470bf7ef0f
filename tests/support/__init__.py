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

# Scripts of the template, and the check of a workload that projects ship, are not in packages.
sys.path += [str(PROJECT), str(ROOT / "tools"), str(ROOT / "bench"), str(PROJECT / "tests")]
