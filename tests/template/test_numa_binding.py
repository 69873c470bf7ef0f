"""launch/node.sh binds ranks to NUMA nodes where there are GPUs and numactl, with stand-ins for all programs."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

NODE = Path(__file__).parents[2] / "{{cookiecutter.project_slug}}" / "launch/node.sh"
SHELL = ("bash", "env")
JOB = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1", "PET_RDZV_ENDPOINT": "localhost:0", "RUN_NAME": "a"}


TORCHRUN = "#!/usr/bin/env bash\nif [ $1 = --help ]; then echo '{help}'; else echo \"$@\"; fi\n"


@pytest.mark.parametrize(
    ("programs", "binding", "expected"),
    [
        (("nvidia-smi", "numactl"), None, "--numa-binding=node train.py"),
        (("nvidia-smi", "numactl"), "socket", "--numa-binding=socket train.py"),
        (("nvidia-smi", "numactl"), "", "train.py"),
        (("nvidia-smi",), None, "train.py"),
        (("numactl",), None, "train.py"),
        (("nvidia-smi", "numactl", "old torchrun"), None, "train.py"),
    ],
)
def test_ranks_are_bound_where_that_is_possible(tmp_path, programs, binding, expected):
    for name in ("python", *programs):
        (tmp_path / name).write_text("#!/usr/bin/env bash\n")
    has_flag = "old torchrun" not in programs
    (tmp_path / "torchrun").write_text(TORCHRUN.format(help="--numa-binding {node}" if has_flag else "--standalone"))
    for name in SHELL:
        (tmp_path / name).symlink_to(shutil.which(name))
    for program in tmp_path.iterdir():
        if not program.is_symlink():
            program.chmod(0o755)
    chosen = {} if binding is None else {"NUMA_BINDING": binding}
    environment = {**JOB, **chosen, "PATH": str(tmp_path), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run(
        [tmp_path / "bash", NODE], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{expected} run.folder=runs run.name=a run.resume=auto")
