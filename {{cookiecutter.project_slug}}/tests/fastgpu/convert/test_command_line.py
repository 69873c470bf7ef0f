"""A project for one kind of data does without the files of the other kind."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT

FILES = {
    "images": [
        "fastgpu/convert/commands_images.py",
        "fastgpu/convert/image_files.py",
        "fastgpu/convert/cifar_celeba.py",
        "fastgpu/convert/synthetic_images.py",
    ],
    "recsys": [
        "fastgpu/convert/commands_recsys.py",
        "fastgpu/convert/movielens.py",
        "fastgpu/convert/interactions.py",
        "fastgpu/convert/synthetic_interactions.py",
        "fastgpu/training/ranking.py",
    ],
}
COMMANDS = {"images": {"images", "cifar10", "celeba", "synthetic"}, "recsys": {"movielens", "synthetic"}}
COMMON = {"arrays", "repack", "info", "verify"}
OWN_KINDS = [kind for kind, files in FILES.items() if (ROOT / files[0]).exists()]


def run_python(folder: Path, code: str, *arguments: str) -> str:
    """The output of Python code in a folder. Fails if the code does."""
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def listed(help_text: str) -> set[str]:
    """The commands in the output of --help."""
    lines = help_text.partition("COMMAND\n")[2].partition("\n\n")[0].splitlines()
    return {line.split()[0] for line in lines if line.startswith("    ") and line[4] != " "}


def test_help_lists_the_commands_that_the_project_has(convert):
    result = convert("--help")
    assert result.returncode == 0
    assert listed(result.stdout) == COMMON.union(*(COMMANDS[kind] for kind in OWN_KINDS))
    for kind in OWN_KINDS:
        for command in COMMANDS[kind]:
            assert f"python convert.py {command} " in result.stdout
            assert convert(command, "--help").returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", OWN_KINDS)
def test_one_kind_of_data_needs_no_files_of_the_other(kind, tmp_path):
    shutil.copytree(ROOT / "fastgpu", tmp_path / "fastgpu", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "convert.py", tmp_path)
    for other in FILES.keys() - {kind}:
        for file in FILES[other]:
            (tmp_path / file).unlink(missing_ok=True)
    code = "import sys, convert; sys.exit(convert.main(sys.argv[1:]))"
    help_text = run_python(tmp_path, code, "--help")
    assert listed(help_text) == COMMON | COMMANDS[kind]
    for other in FILES.keys() - {kind}:
        for command in COMMANDS[other] - COMMANDS[kind]:
            assert f"convert.py {command} " not in help_text
    assert ("--held-out" in run_python(tmp_path, code, "arrays", "--help")) == (kind == "recsys")

    code = "import sys, convert; convert.main(sys.argv[1:]); print('imported Pillow:', 'PIL' in sys.modules)"
    output = run_python(tmp_path, code, "synthetic", "x.h5", "--rows", "200", "--split", "0.9")
    assert "180 rows, order random, seed 0, in x-train.h5" in output
    assert kind == "images" or "imported Pillow: False" in output
