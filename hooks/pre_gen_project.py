"""Refuse answers that would make a broken project: all of them at once, each with its cure. Standard library only."""

import json
import keyword
import re
import sys

answers = json.loads(r"""{{ cookiecutter | tojson }}""")

# pip would take a project of such a name for one of the packages that it installs, and remove that or itself. Besides
# the tools of an environment, these are the packages of pyproject.toml and constraints.txt, which a test compares.
DEPENDENCIES = """
absl_py annotated_types ast_serialize fastgpu_engine filelock flatbuffers fsspec grpcio h5py hdf5plugin imagecodecs
iniconfig jinja2 librt markdown markupsafe ml_dtypes mpmath mypy mypy_extensions networkx numpy nvidia_ml_py obstore
onnx onnx_ir onnxruntime onnxscript packaging pathspec pillow pip pluggy polars polars_runtime_32 protobuf psutil
pydantic pydantic_core pygments pytest pyyaml ruff safetensors scipy setuptools simplejpeg sympy tensorboard
tensorboard_data_server timm torch torchvision tqdm types_psutil types_pyyaml types_tqdm typing_extensions
typing_inspection wandb werkzeug wheel
"""
# Its folder would stand for such a module where Python is started beside it: modules of these packages that are called
# otherwise, optional packages, and modules of the project.
IMPORTED = """
absl apex convert cv2 diagnose fastgpu functorch google grpc isympy mypyc pil pkg_resources predict py pynvml report
tests torchgen train workloads yaml
"""


def mistakes() -> list[str]:
    """One message for each answer that cannot be used."""
    found = []
    slug = answers["project_slug"]
    cure = 'use lower-case letters, digits and "_", such as "cat_finder"'
    if not re.fullmatch(r"[a-z]([a-z0-9_]{0,48}[a-z0-9])?", slug):
        found.append(f"project_slug is {slug!r}: {cure}, at most 50 characters, a letter first, no _ last")
    elif keyword.iskeyword(slug) or keyword.issoftkeyword(slug):
        found.append(f"project_slug is {slug!r}, a word of the Python language: {cure}")
    elif slug in {*DEPENDENCIES.split(), *IMPORTED.split(), *sys.stdlib_module_names}:
        found.append(f"project_slug is {slug!r}, a package that the project needs: add a word, such as {slug}_project")
    for name in ("project_name", "description", "author"):
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
