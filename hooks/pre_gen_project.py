"""Refuse answers that would make a broken project: all of them at once, each with its cure. Standard library only."""

import json
import keyword
import re
import sys

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

# pip would take a project of such a name for one of the packages that it installs, with its extras.
DEPENDENCIES = {
    "h5py",
    "hdf5plugin",
    "imagecodecs",
    "mypy",
    "numpy",
    "nvidia_ml_py",
    "obstore",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "pillow",
    "polars",
    "psutil",
    "pydantic",
    "pytest",
    "pyyaml",
    "ruff",
    "safetensors",
    "scipy",
    "simplejpeg",
    "tensorboard",
    "timm",
    "torch",
    "tqdm",
    "types_psutil",
    "types_pyyaml",
    "types_tqdm",
    "wandb",
}
# Its folder would stand for such a package where Python is started beside it.
IMPORTED = {"apex", "fastgpu", "pil", "torchvision", "workloads", "yaml"}


def mistakes() -> list[str]:
    """One message for each answer that cannot be used."""
    found = []
    slug = answers["project_slug"]
    cure = 'use lower-case letters, digits and "_", such as "cat_finder"'
    if not re.fullmatch(r"[a-z]([a-z0-9_]{0,48}[a-z0-9])?", slug):
        found.append(f"project_slug is {slug!r}: {cure}, at most 50 characters, a letter first, no _ last")
    elif keyword.iskeyword(slug) or keyword.issoftkeyword(slug):
        found.append(f"project_slug is {slug!r}, a word of the Python language: {cure}")
    elif slug in DEPENDENCIES | IMPORTED:
        found.append(
            f"project_slug is {slug!r}, a package that the project imports: add a word, such as {slug}_project"
        )
    for name in ("project_name", "author"):
        answer = answers[name]
        if not answer.strip():
            found.append(f"{name} is empty: write a word or two")
        elif not answer.isprintable():
            found.append(f"{name} is {answer!r}: write one line without control characters")
    return found


if __name__ == "__main__":
    errors = mistakes()
    for error in errors:
        print(f"error: {error}", file=sys.stderr)
    sys.exit(bool(errors))
