"""The generated project runs in place: importing this module makes fastgpu importable."""

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}"

sys.path.insert(0, str(FOLDER))
