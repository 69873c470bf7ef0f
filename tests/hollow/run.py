"""Runs a command with stand-ins for GPUs.    .cache/hollow/bin/python tests/hollow/run.py DEVICES COMMAND ...

The README tells what other variables HOLLOW_* do.
"""

import os
import sys
from pathlib import Path

LIB = Path(sys.prefix, "lib/hollow")


def environment(devices: int) -> dict[str, str]:
    """The variables that make the CUDA build of torch use the stand-in."""
    paths = {"PATH": f"{sys.prefix}/bin", "LD_LIBRARY_PATH": str(LIB), "LD_PRELOAD": str(LIB / "libhollow.so")}
    before = {
        name: os.pathsep.join((path, os.environ.get(name, ""))).rstrip(os.pathsep) for name, path in paths.items()
    }
    return os.environ | before | {"HOLLOW_DEVICES": str(devices)}


if __name__ == "__main__":
    _, devices, *command = sys.argv
    os.execvpe(command[0], command, environment(int(devices)))
