"""What the training loop asks of a workload, as one check. Use it for your own workloads, too."""

import json

import torch

from fastgpu.rows import Rows
from workloads import Workload

ON_A_CPU = ("dist.device=cpu", "dist.strategy=ddp", "data.tier=disk", "train.precision=fp32", "train.compile=false")
"""Words for train.py: a test runs on a CPU, whatever config.yaml says."""


def check_workload(workload: Workload, train_batch: Rows, val_batch: Rows) -> None:
    """Check a workload against the protocol in workloads/__init__.py.

    train_batch, val_batch: some rows of each kind, on the CPU.
    """
    metric, direction = workload.best
    assert direction in ("higher", "lower")
    assert isinstance(workload.options, workload.Options)

    model = workload.model()
    layers, others = ({id(layer) for layer in network.modules()} for network in (model, workload.model()))
    assert not layers & others  # each network is new: none changes another one
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    batch = workload.transform(train_batch, torch.Generator().manual_seed(0))
    assert len(batch) == len(train_batch)
    loss = workload.loss(model, batch)
    assert loss.shape == ()
    assert torch.isfinite(loss)
    loss.backward()
    assert any(parameter.grad is not None for parameter in model.parameters())

    model.eval()
    with torch.no_grad():
        whole = workload.score(model, val_batch)
        parts = [workload.score(model, part) for part in val_batch.batches(-(-len(val_batch) // 3))]
    for name, value in whole.items():  # sums over the parts of a batch are the sums of the whole
        total = torch.stack([part[name].double() for part in parts]).sum(0)
        torch.testing.assert_close(total, value.double(), rtol=1e-4, atol=1e-4)
    assert metric in workload.metrics({**whole, "n": torch.tensor(len(val_batch), dtype=torch.float64)})
    if workload.inputs:
        with torch.no_grad():
            predicted = workload.predict(model, Rows({name: val_batch[name] for name in workload.inputs}))
        assert predicted
        assert all(len(value) == len(val_batch) for value in predicted.values())
    json.dumps(workload.card())
