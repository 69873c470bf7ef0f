"""The workload `minimal`, and what a workload of your own may rely on. Copy this file along with minimal.py."""

import numpy as np
import pytest
import torch
from contract import check_workload

import workloads
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from fastgpu.storage.arrays import ArrayDataset
from workloads.minimal import Workload


@pytest.mark.parametrize("n_outputs", [1, 3])
@pytest.mark.parametrize("shape", [(), (6,), (2, 3)])
def test_minimal_fits_the_protocol(shape, n_outputs):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.standard_normal((40, *shape)).astype(np.float32),
        "y": rng.standard_normal((40, n_outputs)).astype(np.float32),
    }
    source = ArrayDataset("made up", arrays)
    batch = Rows({name: torch.from_numpy(array) for name, array in arrays.items()})
    workload = Workload(Workload.Options(hidden_dim=5), source, source)
    check_workload(workload, batch, batch)
    assert workload.card() == {"inputs": int(np.prod(shape)), "outputs": n_outputs}
    model = workload.model()
    expected = (model(batch["x"].reshape(40, -1)) - batch["y"]).square().mean()
    torch.testing.assert_close(workload.loss(model, batch), expected)
    torch.testing.assert_close(workload.score(model, batch)["mse"] / 40, expected)


def test_minimal_lacking_a_method_cannot_be_made():
    class Hollow(workloads.Workload):
        Options = Workload.Options

    with pytest.raises(TypeError, match="abstract .*card.*loss"):
        Hollow(Workload.Options(), None, None)


def test_minimal_lacking_a_method_is_one_line(monkeypatch):
    class Hollow(workloads.Workload):
        pass

    monkeypatch.setattr("workloads.minimal.Workload", Hollow)
    with pytest.raises(UserError, match="workloads/minimal.py: Workload has no .*card, .*loss"):
        workloads.load("minimal")
