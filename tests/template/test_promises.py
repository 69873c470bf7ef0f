"""What the pages promise, as a user tries it: a clean environment, scores, examples."""

import os
import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest
import yaml
from template import PROJECT

from support.projects import EXAMPLES, take_example
from support.ranks import run_train
from support.runs import metrics_of


@pytest.mark.nightly
@pytest.mark.slow
def test_clean_environment(own_copy):
    """The lines of README.md and those of the project's CI need nothing but Python and the lists of the project."""
    project = own_copy("images")
    text = (project / "README.md").read_text()
    (first,) = re.findall(r"(?ms)^## First run\n\n```bash\n(.*?)^```", text)
    (use,) = re.findall(r"(?ms)^## Use the model\n\n```bash\n(.*?)^```", text)
    (onnx,) = re.findall(r"(?m)^ONNX needs `(.*)`\.$", text)
    gates = yaml.safe_load((project / ".github/workflows/ci.yml").read_text())["jobs"]["test"]["strategy"]["matrix"]
    lines = [line for line in first.splitlines() if "torchrun" not in line]
    lines += [*dict.fromkeys(gate["run"] for gate in gates["include"]), onnx]
    lines += [line for line in use.splitlines() if "new-photos" not in line]
    lines.append("python predict.py runs/NAME --export model.onnx")
    script = "\n".join(lines).replace("runs/NAME", "runs/*").replace("data/photos-test.h5", "data/digits.h5::/val")
    assert [script.count(name) for name in ("train.py", "predict.py", "pytest", "mypy")] == [1, 3, 1, 1]
    # Neither the packages of this environment nor the caches of a user.
    own = {"HOME": str(project), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join(
        part for part in os.environ["PATH"].split(os.pathsep) if part != str(Path(sys.executable).parent)
    )
    environment = os.environ | {"PATH": path} | own
    command = ["bash", "-euc", script]
    done = subprocess.run(
        command, cwd=project, env=environment, capture_output=True, text=True, timeout=3000, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    printed = done.stdout
    assert "epoch 20/20" in printed
    assert float(re.search(r"(?m)^top1_pct +([\d.]+)", printed)[1]) > 98
    assert all((project / name).stat().st_size > 10_000 for name in ("model.pt2", "model.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "score", "promised"),
    [("config.yaml", "val/top1_pct", 98.5), ("configs/recsys.yaml", "val/ndcg_at_100", 0.35)],
)
def test_shipped_scores(tmp_path, config, score, promised):
    """The pages round: 99 % and 0.36."""
    done = run_train("--config", config, f"run.folder={tmp_path}", "run.name=a", "dist.device=cpu", cwd=PROJECT)
    assert done.returncode == 0, done.stderr
    assert max(point.get(score, 0) for point in metrics_of(tmp_path / "a")) >= promised


def offers() -> list[tuple[str, str]]:
    """Each example, and the workload of the smallest project that the table of docs/examples offers it for."""
    smallest = {"any project": "own", "a project that has images": "images"}
    found = []
    for line in (EXAMPLES / "README.md").read_text().splitlines():
        for name in re.findall(r"\((\w+)\.yaml\)", line):
            *_, needs, _ = (cell.strip() for cell in line.split("|"))
            found.append((name, smallest[needs]))
    return found


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("name", "workload"), offers())
def test_example_in_the_smallest_project(own_copy, name, workload):
    project = own_copy(workload, tools="none")
    (project / "configs").mkdir(exist_ok=True)
    take_example(project, name)
    if (project / f"{name}.diff").exists():
        subprocess.run(["git", "apply", f"{name}.diff"], cwd=project, check=True)
    rng = np.random.default_rng(0)
    with h5py.File(project / "rows.h5", "w") as file:
        file["images"] = rng.integers(0, 256, (64, 3, 32, 32), np.uint8)
        file["masks"] = rng.integers(0, 3, (64, 32, 32), np.uint8)
        file["labels"] = rng.random(64, np.float32)
        file["text"] = rng.integers(0, 256, (64, 33), np.uint8)
        file.attrs["n_classes"] = 3
    words = [f"configs/{name}.yaml", "data.train=rows.h5", "data.val=25%", "data.batch_size=8", "train.epochs=1"]
    words += [] if name == "letters" else ["model.width=4"]
    done = run_train("--config", *words, "dist.device=cpu", cwd=project, root=project)
    assert done.returncode == 0, done.stderr
    assert "epoch 1/1" in done.stdout
