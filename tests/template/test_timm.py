"""A network of timm trains. timm needs torchvision, which does not import beside the CPU build of torch that is pinned
here, so the test installs them, gigabytes, in an environment of their own."""

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from harness import run_to_end
from template import PROJECT

PACKAGES = ["torch==2.14.1", "torchvision==0.29.1", "timm"]


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """A Python with these packages, and all others of this one."""
    folder = tmp_path_factory.mktemp("timm")
    venv.create(folder, with_pip=True)
    subprocess.run([folder / "bin/pip", "install", "-q", *PACKAGES], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])  # behind its own
    return folder / "bin/python"


def run(python: Path, folder: Path, script: str, *words: str) -> str:
    done = run_to_end([str(python), str(PROJECT / script), *words], folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the packages are those of Linux")
def test_a_network_of_timm_trains_is_resumed_and_predicted_from(python, tmp_path):
    (tmp_path / "data").symlink_to(PROJECT / "data")
    (tmp_path / "config.yaml").write_text((PROJECT / "config.yaml").read_text())
    words = ("run.name=a", "model.timm=resnet18", "dist.device=cpu", "data.batch_size=256")
    assert "epoch 1/1" in run(python, tmp_path, "train.py", *words, "train.epochs=1")
    assert "epoch 2/2" in run(python, tmp_path, "train.py", "run.resume=runs/a", "train.epochs=2")
    shown = run(python, tmp_path, "predict.py", "runs/a", "--evaluate", "data/digits.h5::/val", "--device", "cpu")
    assert shown.startswith("top1_pct ")
