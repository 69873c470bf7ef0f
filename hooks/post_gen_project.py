"""Leave out what was not asked for and what an in-place run of the template left; say what to do next. Idempotent."""

import json
import re
import shutil
import tempfile
from pathlib import Path

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

WORKLOADS = {
    "images": [
        "workloads/images.py",
        "configs/celeba.yaml",
        "configs/cifar10.yaml",
        "configs/csv-images.yaml",
        "data/digits.h5",
        "tests/test_images.py",
        "tests/test_train.py",
    ],
    "recsys": [
        "workloads/recsys.py",
        "configs/recsys.yaml",
        "data/interactions-train.h5",
        "data/interactions-val.h5",
        "tests/test_recsys.py",
    ],
}
UNWANTED = [
    ("launch", answers["cluster_launch_files"]),
    (".github", answers["ci_workflow"]),
    *((name, answers["workload"] in (workload, "both")) for workload, names in WORKLOADS.items() for name in names),
]
LEFTOVERS = [
    ".venv",
    "runs",
    "build",
    "*.egg-info",
    ".hypothesis",
    ".coverage",
    "**/__pycache__",
    "**/*.py[co]",
    "**/.*_cache",
    "**/.DS_Store",
]


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)


for name, wanted in UNWANTED:
    if not wanted:
        remove(Path(name))
if answers["workload"] == "recsys":  # what `python train.py` then takes
    shutil.copyfile("configs/recsys.yaml", "config.yaml")
for pattern in LEFTOVERS:
    for path in list(Path().glob(pattern)):
        remove(path)

# `cruft update` and `cruft diff` bake old and new projects in temporary folders, where nothing is to be done next.
# Only cruft sets _commit; `cruft create` bakes in a folder of the user's choice.
parent = Path.cwd().parent
in_scratch = parent.parent == Path(tempfile.gettempdir()).resolve() and re.fullmatch("tmp[a-z0-9_]{8}", parent.name)
if not ("_commit" in answers and in_scratch):
    print(f"""
Next:
  cd {answers["project_slug"]}
  python3 -m venv .venv && .venv/bin/pip install -c constraints.txt -e ".[dev]"
  .venv/bin/python train.py
""")
