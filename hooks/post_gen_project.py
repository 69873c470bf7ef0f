"""Delete the files that were not asked for and what a run in place has left, then say what to do next.

Running this script twice does the same as running it once. It uses the standard library only.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

# Files that belong to one workload alone.
ONLY_FOR = {
    "images": [
        "workloads/images.py",
        "workloads/segmentation.py",
        "configs/celeba.yaml",
        "configs/cifar10.yaml",
        "configs/csv-images.yaml",
        "configs/imagenet.yaml",
        "configs/segmentation.yaml",
        "data/digits.h5",
        "fastgpu/convert/array_images.py",
        "fastgpu/convert/commands_images.py",
        "fastgpu/convert/image_files.py",
        "fastgpu/convert/pixel_csv.py",
        "fastgpu/convert/tables.py",
        "fastgpu/predict/image_inputs.py",
        "fastgpu/images/__init__.py",
        "fastgpu/images/decoded.py",
        "fastgpu/images/encoded.py",
        "fastgpu/images/files.py",
        "fastgpu/training/augment.py",
    ],
    "recsys": [
        "workloads/recsys.py",
        "configs/recsys.yaml",
        "data/interactions-train.h5",
        "data/interactions-val.h5",
        "fastgpu/convert/commands_recsys.py",
        "fastgpu/convert/interactions.py",
        "fastgpu/convert/movielens.py",
        "fastgpu/training/ranking.py",
    ],
}
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
    """Delete a file or a folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


for workload, names in ONLY_FOR.items():
    if answers["workload"] not in (workload, "both"):
        for name in names:
            remove(Path(name))
recsys_config = Path("config.recsys.yaml")
if answers["workload"] == "recsys" and recsys_config.exists():
    recsys_config.replace("config.yaml")
remove(recsys_config)
for pattern in LEFTOVERS:
    for path in list(Path().glob(pattern)):
        remove(path)
for names in ONLY_FOR.values():
    for folder in {Path(name).parent for name in names}:
        if folder.is_dir() and not folder.is_symlink() and not any(folder.iterdir()):
            folder.rmdir()

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
