"""Write data/digits.h5 of the generated project from scikit-learn's copy of the UCI digits.

    pip install scikit-learn && python tools/make_digits.py

The data are 1,797 handwritten digits of 8 x 8 pixels with 17 grey levels (Optical Recognition of Handwritten Digits,
E. Alpaydin and C. Kaynak, CC BY 4.0). A fifth of each class is for validation. The rows of both splits are in
random order with a fixed seed, so the file is the same each time.
"""

import hashlib
from pathlib import Path

import h5py
import numpy as np
from sklearn.datasets import load_digits

TARGET = Path(__file__).parents[1] / "{{cookiecutter.project_slug}}" / "data" / "digits.h5"
CHUNK_ROWS = 32  # small, so that even this small file has enough blocks to shuffle and to share among ranks
SEED = 0
N_CLASSES = 10
MAX_LEVEL = 16


def main() -> None:
    digits = load_digits()
    images = (digits.images * (255 / MAX_LEVEL)).astype(np.uint8)[:, None]  # (N, 1, 8, 8)
    labels = digits.target.astype(np.int64)
    rows = split_rows(labels)
    mean = float(images[rows["train"]].mean())
    std = float(images[rows["train"]].std())
    with h5py.File(TARGET, "w", libver="latest") as file:
        file.attrs["source"] = "UCI Optical Recognition of Handwritten Digits, doi:10.24432/C50P49, CC BY 4.0"
        for name, row_ids in rows.items():
            group = file.create_group(name)
            group.attrs["fastgpu_format"] = 1
            group.attrs["class_names"] = [str(digit) for digit in range(N_CLASSES)]
            group.attrs["mean"] = [mean]
            group.attrs["std"] = [std]
            write_field(group, "images", images[row_ids], CHUNK_ROWS)
            write_field(group, "labels", labels[row_ids], CHUNK_ROWS * 8)
            print(f"{name}: {len(row_ids)} rows, {np.bincount(labels[row_ids]).tolist()} of each class")


def write_field(group: h5py.Group, name: str, rows: np.ndarray, chunk_rows: int) -> None:
    """Write rows, and the SHA-256 of each block, as convert.py does."""
    group.create_dataset(name, data=rows, chunks=(chunk_rows, *rows.shape[1:]))
    blocks = (rows[start : start + chunk_rows] for start in range(0, len(rows), chunk_rows))
    checksums = b"".join(hashlib.sha256(block.tobytes()).digest() for block in blocks)
    group.create_dataset(f"fastgpu_sha256/{name}", data=np.frombuffer(checksums, np.uint8).reshape(-1, 32))


def split_rows(labels: np.ndarray) -> dict[str, np.ndarray]:
    """{split: (rows,) row numbers in random order}."""
    order = np.random.RandomState(SEED).permutation(len(labels))
    val = []
    for digit in range(N_CLASSES):
        rows = order[labels[order] == digit]
        val.append(rows[: len(rows) // 5])
    is_val = np.isin(order, np.concatenate(val))
    return {"train": order[~is_val], "val": order[is_val]}


if __name__ == "__main__":
    main()
