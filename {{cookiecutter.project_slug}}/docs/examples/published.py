"""CIFAR-10 and CelebA through torchvision, as Datasets for `data.dataset` and `convert.py dataset`.

Put this file beside train.py, run `pip install -c constraints.txt torchvision`, without a GPU `pip install -c
constraints.txt torchvision --index-url https://download.pytorch.org/whl/cpu`, and name the split behind the folder:

python convert.py dataset published:Cifar10 cifar10/train data/cifar10-train.h5
python convert.py dataset published:CelebA celeba/valid data/celeba-val.h5
"""

from pathlib import Path

import numpy as np
from torch.utils.data import Dataset
from torchvision import datasets


class Cifar10(Dataset):
    """cifar10/train or cifar10/test. torchvision opens the pickles only if they have the published MD5."""

    def __init__(self, path: str):
        folder, split = Path(path).parent, Path(path).name
        self.rows = datasets.CIFAR10(folder, train={"train": True, "test": False}[split], download=True)
        self.class_names = self.rows.classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, object]:
        image, label = self.rows[row]
        return {"images": np.asarray(image).transpose(2, 0, 1), "labels": label}


class CelebA(Dataset):
    """celeba/train, celeba/valid or celeba/test: 40 attributes for each face. torchvision reads celeba/celeba."""

    def __init__(self, path: str):
        self.rows = datasets.CelebA(Path(path).parent, split=Path(path).name, target_type="attr")
        self.class_names = [name for name in self.rows.attr_names if name]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> dict[str, object]:
        image, attributes = self.rows[row]
        return {"images": np.asarray(image).transpose(2, 0, 1), "labels": attributes.numpy().astype(np.uint8)}
