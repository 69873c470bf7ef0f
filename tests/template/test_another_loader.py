"""The loader of docs/code.md: a plain DataLoader in the loop of train.py."""

import sys

import pytest

from support.projects import use_torch_loader
from support.ranks import printed_by
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


@pytest.mark.slow
def test_torch_loader_trains_resumes_and_is_diagnosed(own_copy):
    """The words and the code of the page: two ranks learn, and do the same after SIGKILL."""
    project = own_copy("both")
    (project / "digits.py").write_text(DIGITS)
    use_torch_loader(project)
    assert same_after_a_kill(project, "last-00000[3-9]", *WORDS, "run.checkpoint_every_steps=5", "train.epochs=4")
    assert [point["val/top1_pct"] for point in metrics_of(project / "runs/whole") if "val/top1_pct" in point][-1] > 80
    printed = printed_by([sys.executable, "diagnose.py", *WORDS, "--seconds=0.05"], project)
    assert "TorchLoader as the loader" in printed
    assert "supply" in printed
