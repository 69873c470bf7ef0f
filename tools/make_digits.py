"""Write data/digits.h5 of the generated project from scikit-learn's copy of the UCI digits.

    pip install scikit-learn && python tools/make_digits.py

1,797 handwritten digits, 8x8 pixels of 17 grey levels (Optical Recognition of Handwritten Digits, E. Alpaydin and
C. Kaynak, CC BY 4.0), a fifth of each class for validation. Both splits lie in seeded random order, so the file is the
same each time.
"""

from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}" / "data" / "digits.h5"
CHUNK_ROWS = 32  # small, so that so small a file still has enough blocks to shuffle and to share among ranks
SEED = 0


def main() -> None:
    digits = load_digits()
    images = (digits.images * 15.9375).astype(np.uint8)[:, None]  # 0..16 -> 0..255; (N, 1, 8, 8)
    labels = digits.target.astype(np.int64)
    order = np.random.RandomState(SEED).permutation(len(labels))
    by_class = [order[labels[order] == label] for label in range(10)]
    val = np.concatenate([rows[: len(rows) // 5] for rows in by_class])
    splits = {"train": order[~np.isin(order, val)], "val": order[np.isin(order, val)]}
    with h5py.File(TARGET, "w", libver="latest") as file:
        file.attrs["source"] = "UCI Optical Recognition of Handwritten Digits, doi:10.24432/C50P49, CC BY 4.0"
        for name, rows in splits.items():
            group = file.create_group(name)
            group.attrs["fastgpu_format"] = 1
            group.attrs["class_names"] = [str(digit) for digit in range(10)]
            group.attrs["mean"] = [float(images[splits["train"]].mean())]
            group.attrs["std"] = [float(images[splits["train"]].std())]
            group.create_dataset("images", data=images[rows], chunks=(CHUNK_ROWS, 1, 8, 8))
            group.create_dataset("labels", data=labels[rows], chunks=(CHUNK_ROWS * 8,))
            print(f"{name}: {len(rows)} rows, {np.bincount(labels[rows]).tolist()} of each class")


if __name__ == "__main__":
    main()
