"""Leave out what was not asked for and what an in-place run of the template left; say what to do next. Idempotent."""

import json
import shutil
from pathlib import Path

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

UNWANTED = [
    ("launch", answers["cluster_launch_files"]),
    (".github", answers["ci_workflow"]),
]
LEFTOVERS = [
    ".venv", "runs", "build", "*.egg-info", ".hypothesis", ".coverage",
    "**/__pycache__", "**/*.py[co]", "**/.*_cache", "**/.DS_Store",
]  # fmt: skip


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


for name, wanted in UNWANTED:
    if not wanted:
        remove(Path(name))
for pattern in LEFTOVERS:
    for path in list(Path().glob(pattern)):
        remove(path)

print(f"""
Next:
  cd {answers["project_slug"]}
  python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[dev]"
  .venv/bin/python train.py
""")
