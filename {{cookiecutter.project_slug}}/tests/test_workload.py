"""The workload of config.yaml on its first rows, and what any workload in workloads/ may be asked for."""

import json
from pathlib import Path

import pytest
import torch
from contract import check_workload

import workloads
from fastgpu.feed import Loader
from fastgpu.rows import Rows

PROJECT = Path(__file__).parents[1]
NAMES = sorted(path.stem for path in PROJECT.glob("workloads/[a-z]*.py"))
MAX_ROWS = 32


def first_batch(loader: Loader) -> Rows:
    """A copy of the first rows of an epoch, on the CPU."""
    rows = next(iter(loader.batches(0)))
    return rows.take(torch.arange(min(len(rows), MAX_ROWS))).to(torch.device("cpu"))


@pytest.mark.parametrize("name", NAMES)
def test_a_workload_has_all_members_of_the_protocol(name):
    kind = workloads.load(name)
    assert kind.Options()
    assert kind.best
    assert not kind.__abstractmethods__


def test_the_workload_keeps_the_contract(parts):
    check_workload(parts.workload, first_batch(parts.loader), first_batch(next(iter(parts.val_loaders.values()))))


def test_a_few_rows_can_be_learned_by_heart(parts):
    """The loss of one batch falls by a fifth or more in at most a hundred steps without augmentation."""
    batch = first_batch(parts.loader)
    model = parts.workload.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(100):
        torch.manual_seed(0)  # dropout, and noise of a latent vector
        loss = parts.workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if losses[-1] < losses[0] - 0.2 * abs(losses[0]):
            return
    raise AssertionError(f"the loss goes from {losses[0]} to {min(losses)} only")


def test_a_model_built_again_from_its_card_gives_equal_outputs(parts):
    """The options and what `card` returned are all that a checkpoint keeps of the data."""
    if not parts.workload.inputs:
        pytest.skip("the workload declares no inputs of predict")
    card = json.loads(json.dumps(parts.workload.card()))
    val = next(iter(parts.splits.val.values()))
    for source in (parts.splits.train, val):
        source.attributes = {**source.attributes, **card}
    make = workloads.load(parts.config.workload)
    again = make(make.Options(**parts.config.model), parts.splits.train, val)
    model = parts.workload.model().eval()
    rebuilt = again.model()
    rebuilt.load_state_dict(model.state_dict())
    rebuilt.eval()
    batch = first_batch(next(iter(parts.val_loaders.values())))
    with torch.no_grad():
        expected = parts.workload.predict(model, batch)
        found = again.predict(rebuilt, batch)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value)
