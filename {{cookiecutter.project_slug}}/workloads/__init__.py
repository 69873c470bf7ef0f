"""What is trained: one module a workload, named by `workload:` in config.yaml. Your own code lives here."""

import inspect
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source


def make(name: str, train: Source, val: Source, options: Mapping[str, Any]) -> Any:
    """The `Workload` of workloads/<name>.py, such as images.py has, with those of the options that it takes.

    Raises UserError if there is no such file.
    """
    names = sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))
    if name not in names:
        raise UserError(f"workload is {name}, but workloads/{name}.py does not exist; there are: {', '.join(names)}")
    workload = import_module(f"workloads.{name}").Workload
    wanted = inspect.signature(workload).parameters
    return workload(train, val, **{key: value for key, value in options.items() if key in wanted})
