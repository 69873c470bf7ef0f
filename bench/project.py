"""Importing this module puts the generated project's folder on sys.path: `fastgpu` and `workloads` run in place."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "{{cookiecutter.project_slug}}"))
