"""train.compile=true: it trains what eager mode trains, and resumes."""

import shutil
import signal

import pytest
import torch
import train as script

from support import PROJECT
from support.runs import at_call, same_weights, signalled, train, weights_of

CONFIG = """
workload: images
data: {train: "digits.h5::/train", val: "digits.h5::/val", fields: {images: images, labels: labels}, batch_size: 64}
model: {width: 4, blocks: 1}
optim: {name: sgd, lr: 0.01}
train: {epochs: 1, precision: fp32}
dist: {device: cpu}
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # torch warns of its own parts while it traces
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiled_training(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    (tmp_path / "config.yaml").write_text(CONFIG)
    (tmp_path / "digits.h5").symlink_to(PROJECT / "data/digits.h5")
    train("run.name=eager")
    compiled = ("train.compile=true",)
    train("run.name=whole", *compiled)
    with monkeypatch.context() as patch:
        patch.setattr(script, "train_step", at_call(9, script.train_step, signalled(signal.SIGTERM)))
        assert train("run.name=stopped", *compiled) == 128 + signal.SIGTERM
    assert train("run.resume=runs/stopped", *compiled) == 0
    runs = tmp_path / "runs"
    assert same_weights(runs / "whole", runs / "stopped")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"], "nothing was compiled"
    torch.testing.assert_close(weights_of(runs / "whole"), weights_of(runs / "eager"), rtol=1e-3, atol=1e-4)
