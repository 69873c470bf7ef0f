"""Recognizes the format of a file from its first bytes, since its name may be wrong."""

import os
import re
from pathlib import Path
from stat import S_ISREG
from typing import IO

HEAD_BYTES = 512
KINDS = (
    (rb"\x89HDF\r\n\x1a\n", "an HDF5 file: `python convert.py info FILE` shows its datasets"),
    (rb"\x93NUMPY", "a NumPy array: `python convert.py arrays NAME=FILE x.h5`"),
    (rb"PK\x03\x04.*\.npy", "NumPy arrays: `python convert.py arrays FILE x.h5`"),
    (rb"PK\x03\x04.*/data\.pkl", 'a file of torch.save: np.save("x.npy", x) of its tensors makes one that is read'),
    (rb"PK\x03\x04.*(\[Content_Types\]|xl/)", "an Excel file: save it as CSV"),
    (rb"MATLAB 5", 'a MATLAB 5 file: np.save("x.npy", scipy.io.loadmat("FILE")["x"]) for each variable'),
    (rb"PAR1", "a Parquet file: `python convert.py arrays` or `images` takes x.parquet"),
    (rb"\x80[\x02-\x05]", 'a pickle, which can run programs: if it is yours, save its arrays by np.save("x.npy", x)'),
    (rb"PK\x03\x04|\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|.{257}ustar", "a packed file or an archive: unpack it"),
    (rb"version https://git-lfs", "a pointer of Git LFS: `git lfs pull` fetches the file"),
    (rb"\xff\xd8\xff|\x89PNG|GIF8|RIFF.{4}WEBP", "an image: `python convert.py images` takes folders, or a CSV"),
    (rb"\s*<[?!a-zA-Z]", "XML or HTML, such as the page of a login: write its rows as CSV"),
    (rb'\s*(\{\s*["}]|\[\s*[\[{"])', 'JSON: polars.read_json("FILE"), or read_ndjson, and .write_csv("x.csv")'),
    (rb"$", "empty"),
)
"""(pattern of the first bytes, what the file is and how to convert it)"""
TEXT = 'text; if it is a CSV of numbers: np.save("x.npy", polars.read_csv("FILE").to_numpy())'


def open_regular(path: Path) -> IO[bytes]:
    """Open a file to read. Raises ValueError for a FIFO, a device or a folder: opening one may block for ever."""
    if not S_ISREG(path.stat().st_mode):
        raise ValueError("it is no regular file")
    return path.open("rb")


def describe_content(path: str | os.PathLike[str]) -> str:
    """The kind of a file and how to convert it, as a part of a sentence; empty if it is unreadable or unknown."""
    try:
        with open_regular(Path(path)) as file:
            head = file.read(HEAD_BYTES)
        known = (text for pattern, text in KINDS if re.match(pattern, head, re.DOTALL))
        is_text = not re.search(rb"[\0-\x08\x0e-\x1f]", head)
    except (OSError, ValueError):
        return ""
    return next(known, TEXT if is_text else "").replace("FILE", str(path))
