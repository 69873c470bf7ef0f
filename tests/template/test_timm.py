"""A network of timm trains. timm needs torchvision, which does not import beside the CPU build of torch that is pinned
here, so the test installs them, gigabytes, in an environment of their own."""

import subprocess
import sys
import sysconfig
import venv

import pytest
from harness import run_to_end
from template import PROJECT

PACKAGES = ["torch==2.14.1", "torchvision==0.29.1", "timm"]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="the packages are those of Linux")
def test_a_network_of_timm_trains_is_resumed_and_predicted_from(tmp_path):
    venv.create(tmp_path / "venv", with_pip=True)
    subprocess.run([tmp_path / "venv/bin/pip", "install", "-q", *PACKAGES], check=True)
    (site,) = tmp_path.glob("venv/lib/python*/site-packages")
    (site / "others.pth").write_text(sysconfig.get_paths()["purelib"])  # behind its own

    def run(script: str, *words: str) -> str:
        done = run_to_end([str(tmp_path / "venv/bin/python"), str(PROJECT / script), *words], tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "data").symlink_to(PROJECT / "data")
    (tmp_path / "config.yaml").symlink_to(PROJECT / "config.yaml")
    words = ("run.name=a", "model.timm=resnet18", "dist.device=cpu", "data.batch_size=256")
    assert "epoch 1/1" in run("train.py", *words, "train.epochs=1")
    assert "epoch 2/2" in run("train.py", "run.resume=runs/a", "train.epochs=2")
    shown = run("predict.py", "runs/a", "--evaluate", "data/digits.h5::/val", "--device", "cpu")
    assert shown.startswith("top1_pct ")
