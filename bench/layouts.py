"""The contenders of bench/run.py layouts: this project reads the same rows in other blocks, compressed, or checked.

`convert.py` writes the fastest of these layouts. The rows are smooth pictures with a little noise, so that filters
can compress them. How much they save depends on the pictures; it is shown in the table.
"""

from functools import partial
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin
from contenders import from_feed
from ours import open_feed, open_rows
from peers import Contender, Task, convert_once

DEFAULT = "blocks of 2 MiB"
BLOCK_BYTES = 2 << 20


def layout(task: Task, *, name: str, block_bytes: int | None = BLOCK_BYTES, **options: Any) -> Contender:
    """The rows of the task in a file of another layout. block_bytes: of a chunk. options: of h5py's create_dataset."""

    def write(target: Path) -> None:
        with h5py.File(task.h5) as source, h5py.File(target, "w") as file:
            images = source["images"]
            if block_bytes:
                block_rows = max(1, block_bytes // (images.nbytes // len(images)))
                options["chunks"] = (min(block_rows, len(images)), *images.shape[1:])
            file.create_dataset("images", data=images[:], **options)
            file["labels"] = source["labels"][:]

    path = task.h5 if name == DEFAULT else convert_once(task.folder / f"{name.replace(' ', '-')}.h5", write)
    return from_feed(open_feed(open_rows(path), task.batch_size), [path])


OPTIONS: dict[str, dict[str, Any]] = {
    DEFAULT: {},  # as convert.py writes it
    "in one piece": {"block_bytes": None, "chunks": None},
    "chunks of 1 row": {"block_bytes": 1},
    "chunks of 64 MiB": {"block_bytes": 64 << 20},
    "chunks that split rows": {"block_bytes": None, "chunks": True},
    "gzip": {"compression": "gzip", "compression_opts": 1},
    "lz4": hdf5plugin.LZ4(),
    "zstd": hdf5plugin.Zstd(clevel=1),
    "fletcher32": {"fletcher32": True},
}
CONTENDERS = {name: partial(layout, name=name, **options) for name, options in OPTIONS.items()}
