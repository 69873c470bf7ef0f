"""Opens HDF5 files in a helper process first (data.trusted=false): it may crash, hang or take all memory instead."""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from fastgpu.process.launch import Launch, UserError, exit_with_message
from fastgpu.storage.store import open_store

TIME_LIMIT_S = 120
MEMORY_BYTES = 8 << 30
"""What the helper process may allocate: more than one column that is kept in memory (see `layout.COLUMN_BYTES`)."""
ROOT = str(Path(__file__).parents[2])


def try_to_open(
    key: str, paths: str | Sequence[str], fields: Mapping[str, str], *, verify: bool, trust_links: bool
) -> None:
    """Open the files as `open_store` does, in a helper process. Raises UserError if it does not end well."""
    request = {"key": key, "paths": paths, "fields": dict(fields), "verify": verify, "trust_links": trust_links}
    command = [sys.executable, "-c", f"import sys; sys.path[0] = {ROOT!r}; import fastgpu.storage.trial as t; t.main()"]
    reason = f"took longer than {TIME_LIMIT_S} s"
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pass
    else:
        if not done.returncode:
            return
        last_line = done.stderr.strip().rpartition("\n")[2]
        if last_line.startswith("error: "):
            raise UserError(last_line.removeprefix("error: "))
        reason = f"ended with {done.returncode} ({last_line})"
    raise UserError(f"{key} is {paths}: opening it in a helper process {reason}; do not use it (data.trusted is false)")


def main() -> None:
    """The helper process. stdin: the arguments of `open_store` as JSON."""
    request = json.load(sys.stdin)
    limit = psutil.Process().memory_info().vms + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with exit_with_message(Launch()):
        open_store(request.pop("key"), request.pop("paths"), request.pop("fields"), **request)
