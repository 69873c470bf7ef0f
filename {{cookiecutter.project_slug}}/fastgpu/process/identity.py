"""What all ranks of a job must have in common, besides their rows: settings and versions of libraries.

Each node has its own copy of the project, so one of them may be old. Ranks that differ would deadlock, or train on rows
that nobody asked for, without a word.
"""

from collections.abc import Mapping

import numpy as np
import torch

from fastgpu import TEMPLATE_VERSION

MAY_DIFFER = ("data.train", "data.val", "data.tier")
"""Keys that nodes may set differently, besides the sections `loader` and `hdf5`. Files may have other names: their rows
are compared. The others decide how rows are read, not which."""


def identify_job(config: Mapping[str, object]) -> dict[str, object]:
    """{name of a setting or a library: its value or version}.

    config: {dotted key: value}.
    """
    settings = {key: value for key, value in config.items() if key not in MAY_DIFFER and not key.startswith("loader.")}
    versions = {
        "fastgpu.TEMPLATE_VERSION": TEMPLATE_VERSION,
        "the version of torch": torch.__version__,
        "the version of numpy": np.__version__,
    }
    return versions | settings
