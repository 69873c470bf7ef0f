"""What is trained: one module a workload, named by `workload:` in config.yaml. Your own code lives here."""

from importlib import import_module
from pathlib import Path
from typing import Any

from fastgpu.launch import UserError


def load(name: str) -> Any:
    """The class `Workload` of workloads/<name>.py, such as images.py has. Raises UserError if there is no such file."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in names:
        raise UserError(f"workload is {name}, but workloads/{name}.py does not exist; there are: {', '.join(names)}")
    return import_module(f"workloads.{name}").Workload
