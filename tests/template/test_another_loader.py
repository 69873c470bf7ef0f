"""The loader of docs/code.md: a plain DataLoader in the loop of train.py."""

import sys
from pathlib import Path

import pytest

from support.projects import use_torch_loader
from support.ranks import printed_by, train_command
from support.runs import metrics_of, same_after_a_kill

DIGITS = """
import h5py
from torch.utils.data import Dataset


class Digits(Dataset):
    def __init__(self, path):
        file, _, group = path.partition("::")
        with h5py.File(file) as opened:
            self.images, self.labels = opened[group]["images"][:], opened[group]["labels"][:]
        self.attributes = {"n_classes": 10}

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index], int(self.labels[index])
"""
WORDS = ["data.dataset=digits:Digits", "dist.device=cpu", "loader.num_workers=1"]
LONG = "train.epochs=4"


def accuracy(run: Path) -> float:
    """Of the last validation of a run, in percent."""
    return [point["val/top1_pct"] for point in metrics_of(run) if "val/top1_pct" in point][-1]


@pytest.mark.slow
def test_torch_loader_trains_resumes_and_is_diagnosed(own_copy):
    """The words and the code of the page: it has the accuracy of our own loader, also after SIGKILL on two ranks."""
    project = own_copy("both")
    (project / "digits.py").write_text(DIGITS)
    printed_by(train_command(*WORDS, LONG, "run.name=ours", root=project), project)

    use_torch_loader(project)
    printed_by(train_command(*WORDS, LONG, "run.name=alone", root=project), project)
    assert accuracy(project / "runs/alone") > accuracy(project / "runs/ours") - 4 > 80
    short = ("run.checkpoint_every_steps=5", "train.epochs=2", "model.width=4")
    assert same_after_a_kill(project, "last-00000[3-9]", *WORDS, *short)

    printed = printed_by([sys.executable, "diagnose.py", *WORDS, LONG, "--seconds=0.05"], project)
    assert "TorchLoader as the loader" in printed
    assert "supply" in printed
