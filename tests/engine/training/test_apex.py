"""A package stands in for NVIDIA Apex, which needs a GPU."""

import sys
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch
from harness import ALONE, CPU
from torch import nn
from train import make_optimizer

from fastgpu.process.config import Dist, Optim
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.training.apex import OPTIMIZERS
from fastgpu.training.parallel import share_gradients

TWO = World(0, 2, 2, CPU)


@pytest.fixture
def install(monkeypatch):
    """install(part, name=class, ...) makes a module apex.<part>."""

    def make(part: str, **classes: object) -> None:
        module = ModuleType(f"apex.{part}")
        vars(module).update(classes)
        monkeypatch.setitem(sys.modules, "apex", ModuleType("apex"))
        monkeypatch.setitem(sys.modules, f"apex.{part}", module)

    return make


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_optimizers_have_the_settings(install, name):
    install("optimizers", **{OPTIMIZERS[name]: torch.optim.AdamW})
    optimizer = make_optimizer(nn.Linear(3, 2), Optim(name=name, lr=0.3, momentum=0.8, weight_decay=0.5))
    assert (optimizer.defaults["lr"], optimizer.defaults["betas"]) == (0.3, (0.8, 0.999))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]


def test_what_the_import_says_is_the_message(install):
    with pytest.raises(UserError, match="^optim.name is fused_lamb, but No module named 'apex.*'; see https://github"):
        make_optimizer(nn.Linear(3, 2), Optim(name="fused_lamb"))
    with pytest.raises(UserError, match="dist.strategy is apex, but No module named 'apex"):
        share_gradients(nn.Linear(3, 2), Dist(strategy="apex"), TWO, Dataset())
    install("optimizers", FusedAdam=Mock(side_effect=RuntimeError("apex.optimizers.FusedAdam requires\ncuda")))
    with pytest.raises(UserError, match="optim.name is fused_adam, but apex.optimizers.FusedAdam requires cuda; see"):
        make_optimizer(nn.Linear(3, 2), Optim(name="fused_adam"))


def test_the_old_ddp_wraps_the_model_of_two_ranks(install):
    install("parallel", DistributedDataParallel=nn.Sequential)
    model = nn.Linear(3, 2)
    assert share_gradients(model, Dist(strategy="apex"), ALONE, Dataset()) is model
    assert share_gradients(model, Dist(strategy="apex"), TWO, Dataset())[0] is model
