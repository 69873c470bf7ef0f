"""Files of users and their items."""

from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest


def write_csr(file: h5py.File, name: str, rows: list[list[int]], n_items: int) -> None:
    group = file.create_group(name)
    group.attrs.update({"encoding-type": "csr_matrix", "encoding-version": "0.1.0", "shape": (len(rows), n_items)})
    group["indptr"] = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    group["indices"] = np.concatenate([np.array(row, np.int32) for row in rows])


@pytest.fixture
def write_users(tmp_path: Path) -> Callable[..., str]:
    """write_users(name, n_users) writes a file with `items` and `held_out`, and returns its path.

    There are two kinds of users: one likes the first half of the items, the other one the second half.
    """

    def write(name: str, n_users: int, *, n_items: int = 200, seed: int = 0, n_empty: int = 0) -> str:
        rng = np.random.default_rng(seed)
        items = []
        held_out = []
        for user in range(n_users):
            liked = rng.permutation(n_items // 2)[:25] + n_items // 2 * (user % 2)
            n_seen = int(rng.integers(5, 20))
            items.append(sorted(liked[:n_seen].tolist()))
            held_out.append([] if user < n_empty else sorted(liked[n_seen:].tolist()))
        with h5py.File(tmp_path / name, "w") as file:
            write_csr(file, "items", items, n_items)
            write_csr(file, "held_out", held_out, n_items)
        return str(tmp_path / name)

    return write
