"""Delete the files that were not asked for and what a run in place has left, then say what to do next.

Running this script twice does the same as running it once. It uses the standard library only.
"""

import json
import re
import shutil
import tempfile
from pathlib import Path

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

# {path: {question: answers that keep it}}
KEEP = {
    "convert.py": {"tools": ["all"]},
    "diagnose.py": {"tools": ["all"]},
    "predict.py": {"tools": ["all"]},
    "report.py": {"tools": ["all"]},
    "fastgpu/convert": {"tools": ["all"]},
    "fastgpu/diagnose": {"tools": ["all"]},
    "fastgpu/predict": {"tools": ["all"]},
    "fastgpu/report": {"tools": ["all"]},
    "docs/data.md": {"tools": ["all"]},
    "docs/measuring.md": {"tools": ["all"]},
    "docs/troubleshooting.md": {"tools": ["all"]},
    "docs/why-is-my-gpu-idle.md": {"tools": ["all"]},
    "docs/tutorial.md": {"tools": ["all"], "workload": ["images", "recsys", "both"]},
    "docs/ko": {"tools": ["all"], "workload": ["images", "recsys", "both"]},
    "launch": {"launch": ["slurm", "kubernetes", "both"]},
    "launch/slurm.sh": {"launch": ["slurm", "both"]},
    "launch/kubernetes.yaml": {"launch": ["kubernetes", "both"]},
    "launch/Dockerfile": {"launch": ["kubernetes", "both"]},
    "launch/Dockerfile.dockerignore": {"launch": ["kubernetes", "both"]},
    "docs/clusters.md": {"launch": ["slurm", "kubernetes", "both"]},
    "configs": {"workload": ["images", "recsys", "both"]},
    "workloads/images.py": {"workload": ["images", "both"]},
    "configs/celeba.yaml": {"workload": ["images", "both"]},
    "configs/cifar10.yaml": {"workload": ["images", "both"]},
    "configs/csv-images.yaml": {"workload": ["images", "both"]},
    "configs/imagenet.yaml": {"workload": ["images", "both"]},
    "data/digits.h5": {"workload": ["images", "both", "own"]},
    "fastgpu/images": {"workload": ["images", "both"]},
    "fastgpu/convert/images": {"workload": ["images", "both"]},
    "fastgpu/predict/image_inputs.py": {"workload": ["images", "both"]},
    "workloads/recsys.py": {"workload": ["recsys", "both"]},
    "configs/recsys.yaml": {"workload": ["recsys", "both"]},
    "data/interactions-train.h5": {"workload": ["recsys", "both"]},
    "data/interactions-val.h5": {"workload": ["recsys", "both"]},
    "fastgpu/convert/recsys": {"workload": ["recsys", "both"]},
    "fastgpu/training/ranking.py": {"workload": ["recsys", "both"]},
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


for name, questions in KEEP.items():
    if any(answers[question] not in kept for question, kept in questions.items()):
        remove(Path(name))
config = Path(f"config.{answers['workload']}.yaml")
if config.exists():
    config.replace("config.yaml")
for path in list(Path().glob("config.*.yaml")):
    remove(path)
for pattern in LEFTOVERS:
    for path in list(Path().glob(pattern)):
        remove(path)
for folder in {Path(name).parent for name in KEEP}:
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
