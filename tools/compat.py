"""`make compat`: test a baked project with other versions than those of constraints.txt on Python 3.11.

python tools/compat.py [CASE ...]

Each case gets an environment of its own, made by uv: the fast tests of the project pass in it, and an epoch of digits
trains and predicts. The environments are deleted afterwards; with torch for CUDA, one has 5 GB.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cookiecutter.main import cookiecutter

ROOT = Path(__file__).parents[1]
CASES = {
    # name: (version of Python, which versions uv takes)
    "python-3.12": ("3.12", ["--constraint", "constraints.txt"]),
    "python-3.13": ("3.13", ["--constraint", "constraints.txt"]),
    "lowest": ("3.11", ["--resolution", "lowest-direct"]),
    "newest": ("3.13", ["--resolution", "highest"]),
}
PROGRAMS = [
    ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"],
    ["train.py", "train.epochs=1", "run.name=a"],
    ["predict.py", "runs/a", "data/digits.h5::/val", "-o", "predictions.csv"],
]
PACKAGES = ("torch", "numpy", "h5py", "pydantic", "tensorboard", "pytest")
VERSIONS = """
import importlib.metadata, platform, sys
print("Python", platform.python_version(), *(f"{name} {importlib.metadata.version(name)}" for name in sys.argv[1:]))
"""


def run_case(name: str, folder: Path) -> str:
    """Test a case in an empty folder. Returns its versions. Raises CalledProcessError if something fails."""
    version, options = CASES[name]
    answers = {"project_slug": "project", "workload": "both", "engine": "copy", "launch": "both"}
    project = Path(cookiecutter(str(ROOT), no_input=True, output_dir=str(folder), extra_context=answers))
    tools = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    uv = shutil.which("uv", path=tools) or "uv"
    environment = folder / "venv"
    # The cache of uv would keep gigabytes; where one is named, it is used.
    settings = {"UV_CACHE_DIR": str(folder.parent / "cache")} | os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}

    def run(*command: str | Path) -> None:
        subprocess.run([*map(str, command)], cwd=project, env=settings, check=True)

    run(uv, "venv", "-q", "--python", version, environment)
    python = environment / "bin/python"
    run(uv, "pip", "install", "-q", "--python", python, *options, "-e", ".[dev,convert]")
    for words in PROGRAMS:
        run(python, *words)
    return subprocess.check_output([python, "-c", VERSIONS, *PACKAGES], text=True).strip()


def main(names: list[str]) -> int:
    """Returns the exit code: 1 if a case fails."""
    lines = []
    for name in names or CASES:
        t0 = time.monotonic()
        print(f"== {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="compat-") as parent:
            folder = Path(parent, name)
            folder.mkdir()
            try:
                found = run_case(name, folder)
            except subprocess.CalledProcessError as error:
                found = f"FAILED: {error}"
        lines.append(f"{name}: {found} ({time.monotonic() - t0:.0f} s)")
    print("\n".join(lines))
    return int(any("FAILED" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
