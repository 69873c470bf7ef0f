"""The workload `minimal`, and what a workload of your own may rely on. Copy this file along with minimal.py."""

import numpy as np
import pytest
import torch
import train as script
from contract import check_workload
from harness import ALONE, copy_project, metrics_of, run_train, weights_of

import workloads
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset
from workloads.minimal import Workload


def make_source(n_rows: int = 40, shape: tuple[int, ...] = (3, 2), n_outputs: int = 2) -> ArrayDataset:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((n_rows, *shape)).astype(np.float32)
    y = rng.standard_normal((n_rows, n_outputs)).astype(np.float32)
    return ArrayDataset("made up", {"x": x, "y": y})


def make_batch(source: ArrayDataset) -> Rows:
    return Rows({name: torch.from_numpy(np.asarray(source.column(name))) for name in source.fields})


def test_the_workload_fits_the_protocol():
    source = make_source()
    check_workload(Workload(Workload.Options(), source, source), make_batch(source), make_batch(source))


@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_loss_and_score_are_the_mean_squared_error(shape):
    source = make_source(shape=shape)
    workload = Workload(Workload.Options(hidden_dim=5), source, source)
    model = workload.model()
    batch = make_batch(source)
    expected = (model(batch["x"].reshape(len(batch), -1)) - batch["y"]).square().mean()
    torch.testing.assert_close(workload.loss(model, batch), expected)
    score = workload.score(model, batch)["mse"]
    torch.testing.assert_close(score / len(batch), expected)


def test_inputs_and_outputs_come_from_the_data():
    source = make_source(shape=(4,), n_outputs=3)
    workload = Workload(Workload.Options(hidden_dim=5), source, source)
    assert workload.card() == {"inputs": 4, "outputs": 3}
    assert workload.model()(torch.zeros(2, 4)).shape == (2, 3)


def test_training_improves_the_metric(folder):
    script.train(script.build(load_config(["train.epochs=6", "model.hidden_dim=32", "optim.lr=0.01"]), ALONE), ALONE)
    errors = [point["val/mse"] for point in metrics_of(folder / "runs/a") if "val/mse" in point]
    assert len(errors) == 6
    assert errors[-1] < 0.7 * errors[0]
    assert weights_of(folder / "runs/a")["0.weight"].shape == (32, 6)


# ---------------------------------------------------------------------------------------------- finding a workload


def test_a_workload_is_found_by_the_name_of_its_module():
    assert workloads.load("minimal") is Workload
    assert workloads.find_options("minimal") is Workload.Options


def test_a_workload_that_does_not_exist_is_an_error_with_the_names_that_do():
    with pytest.raises(UserError, match=r"workloads/tables.py does not exist; there are: .*minimal"):
        workloads.load("tables")


def test_a_module_without_a_workload_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "hollow.py").write_text("")
    monkeypatch.setattr(workloads, "__file__", str(tmp_path / "__init__.py"))
    monkeypatch.setattr(workloads, "__path__", [str(tmp_path)])
    with pytest.raises(UserError, match=r"workloads/hollow.py has no class Workload; copy that of workloads/minimal"):
        workloads.load("hollow")


# ---------------------------------------------------------------------------------------------- your own


def edit(text: str, old: str, new: str) -> str:
    """The text with one passage replaced. Fails if the passage is not there."""
    assert old in text
    return text.replace(old, new, 1)


@pytest.mark.slow
def test_a_new_setting_takes_two_lines_in_the_workload(folder):
    project = copy_project(folder)
    path = project / "workloads/minimal.py"
    text = path.read_text()
    text = edit(text, "class Options(Section):\n", "class Options(Section):\n        loss_scale: float = 1.0\n")
    text = edit(text, "return F.mse_loss(", "return self.options.loss_scale * F.mse_loss(")
    path.write_text(text)
    done = run_train("model.loss_scale=0.0", "train.epochs=1", cwd=folder, root=project)
    assert done.returncode == 0, done.stderr
    assert metrics_of(folder / "runs/a")[-1]["val/mse"] == 0
    done = run_train("model.loss_scale=much", "run.name=b", cwd=folder, root=project)
    assert done.returncode == 2
    assert done.stderr == 'error: command line: model.loss_scale is "much"; it should be a valid number\n'
    assert "model.loss_scale=1.0" in run_train("--help", cwd=folder, root=project).stdout


BARE = """
import os

import torch
from torch import nn

import workloads
from fastgpu.process.config import Section


class Workload(workloads.Workload):
    class Options(Section):
        pass

    best = ("error", "lower")

    def __init__(self, options, train, val):
        self.width = int(os.environ["WIDTH"])

    def model(self):
        return nn.Sequential(nn.Linear(6, self.width), nn.ReLU(), nn.Linear(self.width, 1))

    def transform(self, batch, rng):
        return batch

    def loss(self, model, batch):
        return (model(batch["x"]).flatten() - batch["y"]).square().mean().float()

    def score(self, model, batch):
        return {"error": self.loss(model, batch) * len(batch)}

    def metrics(self, sums):
        return {"error": sums["error"] / sums["n"]}

    def card(self):
        return {}
"""


@pytest.mark.slow
def test_a_workload_without_docstrings_that_reads_the_environment_trains(folder):
    project = copy_project(folder)
    (project / "workloads/bare.py").write_text(BARE)
    done = run_train("workload=bare", "train.epochs=1", cwd=folder, root=project, WIDTH="17")
    assert done.returncode == 0, done.stderr
    assert "val/error" in metrics_of(folder / "runs/a")[-1]
    assert weights_of(folder / "runs/a")["0.weight"].shape == (17, 6)
    done = run_train("workload=bare", "model.width=3", "run.name=b", cwd=folder, root=project, WIDTH="17")
    assert done.returncode == 2
    assert "unknown key model.width" in done.stderr
