"""What all ranks of a job must have in common, besides their rows: settings, code and versions of libraries.

Each node has its own copy of the project, so one of them may be old. Ranks that differ would deadlock, or train on rows
that nobody asked for, without a word.
"""

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from fastgpu import TEMPLATE_VERSION

MAY_DIFFER = ("data.train", "data.val", "data.tier", "data.verify", "data.trust_links", "data.trusted")
"""Keys that nodes may set differently, besides the sections `loader` and `hdf5`. Files may have other names: their rows
are compared. The others decide how rows are read, not which."""


def identify_job(config: Mapping[str, object]) -> dict[str, object]:
    """{name of a setting, a library or a file of this project: its value, version or digest}.

    config: {dotted key: value}.
    """
    settings = {
        key: value
        for key, value in config.items()
        if key not in MAY_DIFFER and not key.startswith(("loader.", "hdf5."))
    }
    versions = {
        "fastgpu.TEMPLATE_VERSION": TEMPLATE_VERSION,
        "the version of torch": torch.__version__,
        "the version of numpy": np.__version__,
    }
    return versions | settings | identify_code()


def identify_code() -> dict[str, object]:
    """{path of a file of this project that has been imported: the beginning of its SHA-256}."""
    root = Path(__file__).parents[2]
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    return {
        str(Path(file).relative_to(root)): hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
        for file in sorted(files)
        if file.startswith(f"{root}/") and file.endswith(".py") and "site-packages" not in file
    }
