"""The folder of the project that this process runs, and how its packages are installed."""

import sys
from pathlib import Path

DISTRIBUTION = "fastgpu-engine"
"""Name of the package that the engine is installed as."""


def project_folder() -> Path:
    """The folder of the script that was started, such as train.py. Without a script of a project, the current folder.

    A notebook, pytest and `python -c` have no such script. The engine does not look in its own folder, because it may
    be installed as a package.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    is_project = (folder / "workloads").is_dir() or (folder / "config.yaml").is_file()
    return folder if is_project else Path.cwd()


def install_command(extra: str) -> str:
    """The command that installs an extra: of this project, which pins versions, or of the installed engine alone."""
    if (project_folder() / "constraints.txt").is_file():
        return f"pip install -c constraints.txt -e '.[{extra}]'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"
