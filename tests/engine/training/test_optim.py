import pytest
import torch
from torch import nn
from train import make_optimizer

from fastgpu.process.config import Optim


@pytest.fixture
def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 2))


def test_adamw_has_the_settings(model):
    optimizer = make_optimizer(model, Optim(name="adamw", lr=0.3, momentum=0.8))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]
    assert optimizer.defaults["lr"] == 0.3
    assert optimizer.defaults["betas"] == (0.8, 0.999)


def test_sgd_has_the_settings(model):
    optimizer = make_optimizer(model, Optim(name="sgd", lr=0.3, momentum=0.8))
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.defaults["fused"]
    assert optimizer.defaults["lr"] == 0.3
    assert (optimizer.defaults["momentum"], optimizer.defaults["nesterov"]) == (0.8, True)


def test_sgd_without_momentum_is_plain(model):
    assert not make_optimizer(model, Optim(name="sgd", momentum=0.0)).defaults["nesterov"]


def test_biases_and_norms_do_not_decay(model):
    groups = make_optimizer(model, Optim(weight_decay=0.5)).param_groups
    dimensions = [{parameter.ndim for parameter in group["params"]} for group in groups]
    assert dimensions == [{2}, {1}]
    assert [group["weight_decay"] for group in groups] == [0.5, 0.0]


def test_frozen_parameters_are_left_out(model):
    model[0].requires_grad_(False)
    parameters = [id(p) for group in make_optimizer(model, Optim()).param_groups for p in group["params"]]
    assert id(model[0].weight) not in parameters
    assert id(model[3].weight) in parameters
