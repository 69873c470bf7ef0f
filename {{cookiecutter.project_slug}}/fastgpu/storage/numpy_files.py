"""Files of NumPy arrays, as convert.py and predict.py read them."""

from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.process.machine import format_bytes, free_host_bytes

LARGE_BYTES = 1 << 30
"""Arrays that are read at once are told of above this size."""


def load_numpy(path: str | Path) -> Any:
    """An .npy file, mapped; or the arrays of an .npz file by their names, read.

    Raises UserError if they do not fit into memory: a small archive may have large arrays.
    """
    content = np.load(path, mmap_mode="r", allow_pickle=False)
    if isinstance(content, np.ndarray):
        return content
    n_bytes = sum(member.file_size for member in content.zip.infolist())  # zipfile reads no more than these
    n_free = free_host_bytes()
    if n_bytes > n_free:
        sizes = f"{path} takes {format_bytes(n_bytes)} of memory, {format_bytes(n_free)} are free"
        raise UserError(f"{sizes}; save its arrays as .npy files, which are not read at once")
    if n_bytes > LARGE_BYTES:
        print(f"{path}: reading {format_bytes(n_bytes)}; .npy files are not read at once")
    return {name: np.asarray(array) for name, array in content.items()}
