"""`make pins`: write constraints.txt of a project again, the exact versions that fit together on Python 3.11 and Linux.

python tools/pins.py [--upgrade]

Versions that still fit stay; with --upgrade, the newest ones take their place. torch and torchvision stay in any case:
they move together, by hand, after `make compat` and a run on a GPU. Torch's CUDA libraries are not pinned, since torch
names their versions itself, and neither are the packages of timm and wandb.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from cookiecutter.main import cookiecutter
from facts import PROJECT, ROOT

EXTRAS = ("dev", "convert", "codecs", "cloud", "export")
ALSO = ("torchvision", "setuptools")
"""timm needs the first one. The second one builds the project."""
OF_TORCH = re.compile(r"nvidia-(?!ml-py)|triton|cuda-")


def compile_pins(folder: Path, pins: Path, upgrade: bool) -> list[str]:
    """The lines `name==version` of all that an install brings. pins: a constraints.txt, whose versions are preferred.

    folder: an empty one. Raises CalledProcessError.
    """
    answers = {"project_slug": "project", "workload": "both", "engine": "copy"}
    project = Path(cookiecutter(str(ROOT), no_input=True, output_dir=str(folder), extra_context=answers))
    held = [line for line in pins.read_text().splitlines() if re.match("torch(vision)?==", line)]
    (folder / "held.txt").write_text("\n".join(held))
    (folder / "also.in").write_text("\n".join(ALSO))
    (folder / "pins.txt").write_text(pins.read_text())
    uv = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--quiet", "--python-version=3.11"]
    options = ["--no-header", "--no-annotate", "--constraint=held.txt", "--output-file=pins.txt"]
    options += [f"--extra={name}" for name in EXTRAS]
    options += ["--upgrade"] if upgrade else []
    subprocess.run([*uv, *options, f"{project.name}/pyproject.toml", "also.in"], cwd=folder, check=True)
    lines = (folder / "pins.txt").read_text().splitlines()
    return [line for line in lines if re.match(r"[\w.-]+==", line) and not OF_TORCH.match(line)]


def main() -> None:
    pins = PROJECT / "constraints.txt"
    head = [line for line in pins.read_text().splitlines() if line.startswith("#")]
    with tempfile.TemporaryDirectory() as folder:
        lines = compile_pins(Path(folder), pins, "--upgrade" in sys.argv[1:])
    pins.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
