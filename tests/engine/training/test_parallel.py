import sys
from functools import partial
from itertools import product
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from train import make_optimizer

from fastgpu.process.config import Dist, Optim
from fastgpu.process.seeds import reseed
from fastgpu.process.world import World
from fastgpu.training.parallel import mean_over_ranks, wrap_in_ddp
from fastgpu.training.step import prepare_optimizer
from support.ranks import ALONE, CPU, in_world

TWO = World(0, 2, 2, CPU)


def averages(world: World) -> tuple[list, dict, int, int]:
    """Weights and a number that is logged, which are shared, and a buffer before and after the next forward pass."""
    torch.manual_seed(world.rank)  # the wrapper must make the weights equal
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    ddp = wrap_in_ddp(model, Dist(), world)
    counter = model[1].num_batches_tracked
    for micro_batch in range(2):  # as with optim.accumulation_steps=2, each rank counts its own
        ddp.require_backward_grad_sync = micro_batch == 1
        counter += world.rank
        ddp(torch.ones(2, 2)).sum().backward()
    own = counter.item()
    ddp(torch.ones(2, 2))
    steps = [{"loss": torch.tensor(world.rank + number)} for number in (1.0, 2.0)]
    return model[0].weight.tolist(), mean_over_ranks(steps, world), own, counter.item()


@pytest.mark.slow
def test_parallel_ranks_share_weights_and_buffers():
    """A step begins with the buffers of rank 0 on all ranks."""
    first, second = in_world(2, averages)
    assert first[1:] == ({"loss": 2.0}, 2, 3)
    assert second == (first[0], {"loss": 2.0}, 3, 3)


def train_sparse(world: World) -> list[float]:
    """The weights after a step of rank r on row r, of an embedding with sparse gradients."""
    model = nn.Sequential(nn.EmbeddingBag(4, 1, sparse=True, mode="sum"), nn.Linear(1, 1))
    nn.init.ones_(model[0].weight)
    nn.init.ones_(model[1].weight)
    model.register_forward_hook(Mock(side_effect=AssertionError))
    ddp = wrap_in_ddp(model, Dist(), world)
    model._forward_hooks.clear()
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in model.parameters())
    ddp(torch.tensor([[world.rank]])).sum().backward()
    torch.optim.SGD(model[:1].parameters(), lr=1.0).step()
    return model[0].weight.flatten().tolist()


def train_table(world: World, *, sparse: bool) -> list[list[float]]:
    """The weights after two steps of two micro-batches by Adagrad, with a row that both ranks look up."""
    model = nn.Sequential(nn.Embedding(5, 2, sparse=sparse), nn.Linear(2, 1))
    ddp = wrap_in_ddp(model, Dist(), world)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    prepare_optimizer(model, optimizer)
    for _ in range(2):
        for micro_batch in range(2):
            ddp.require_backward_grad_sync = micro_batch == 1
            ddp(torch.tensor([world.rank, 3, 3 * micro_batch])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model[0].weight.tolist()


@pytest.mark.slow
def test_parallel_sparse_gradients():
    assert in_world(2, train_sparse) == [[0.5, 0.5, 1, 1]] * 2
    first, second = in_world(2, partial(train_table, sparse=True))
    assert first == second
    torch.testing.assert_close(first, in_world(2, partial(train_table, sparse=False))[0])


class Unused(nn.Sequential):
    """The loss uses the first of its parts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[0](x)


def leave_out_a_branch(world: World) -> None:
    ddp = wrap_in_ddp(Unused(nn.Linear(1, 1), nn.Linear(1, 1)), Dist(), world)
    for _ in range(2):
        ddp(torch.ones(1, 1)).sum().backward()


@pytest.mark.slow
def test_parallel_branch_without_gradients_is_one_line():
    line = "UserError: DDP: the loss does not depend .*dist.find_unused_parameters=true"
    with pytest.raises(AssertionError, match=line):
        in_world(2, leave_out_a_branch)


def test_parallel_alone_and_other_strategies(monkeypatch, capsys):
    assert averages(ALONE)[1:] == ({"loss": 1.5}, 2, 3)
    assert not capsys.readouterr().out
    model = nn.Linear(1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device_count", lambda: 8)
        assert wrap_in_ddp(model, Dist(), World(0, 1, 1, torch.device("cuda", 0))) is model
    assert "1 of 8 GPUs is in use; torchrun --standalone --nproc-per-node=gpu train.py" in capsys.readouterr().out
    assert isinstance(wrap_in_ddp(model, Dist(strategy="dp"), ALONE), nn.DataParallel)
    assert wrap_in_ddp(model, Dist(strategy="apex"), ALONE) is model
    monkeypatch.setitem(sys.modules, "apex.parallel", SimpleNamespace(DistributedDataParallel=nn.Sequential))
    assert wrap_in_ddp(model, Dist(strategy="apex"), TWO)[0] is model


def test_messages_of_training(compare_messages, monkeypatch):
    model = nn.Linear(1, 1)
    adam = Mock(side_effect=RuntimeError("apex.optimizers.FusedAdam requires\ncuda"))
    monkeypatch.setitem(sys.modules, "apex.optimizers", SimpleNamespace(FusedAdam=adam))
    table = nn.Sequential(nn.Embedding(2, 1, sparse=True))
    gpus = World(0, 2, 2, torch.device("cuda", 0))
    steps = [{"train/loss": torch.ones(())}, {"train/loss": torch.ones(()), "train/norm": torch.ones(())}]
    compare_messages(
        {
            "SyncBatchNorm on CPUs": lambda: wrap_in_ddp(nn.SyncBatchNorm(1), Dist(), TWO),
            "sparse gradients, and AdamW": lambda: prepare_optimizer(table, make_optimizer(table, Optim())),
            "sparse gradients, and fused SGD": lambda: prepare_optimizer(
                table, make_optimizer(table, Optim(name="sgd"))
            ),
            "sparse gradients on several GPUs": lambda: wrap_in_ddp(table, Dist(), gpus),
            "Apex is not installed": lambda: wrap_in_ddp(model, Dist(strategy="apex"), TWO),
            "Apex refuses": lambda: make_optimizer(model, Optim(name="fused_adam")),
            "a number that only some steps have": lambda: mean_over_ranks(steps, ALONE),
        }
    )


def draw(*numbers: int) -> float:
    rng = reseed(CPU, *numbers)
    assert torch.initial_seed() == rng.initial_seed()  # dropout draws from the same generator
    return torch.rand(1, generator=rng).item()


def test_seeds_repeat_and_depend_on_every_number():
    keys = [numbers for length in (1, 2, 4) for numbers in product(range(3), repeat=length)]
    draws = {draw(*numbers) for numbers in keys}
    assert draws == {draw(*numbers) for numbers in keys}
    assert len(draws) == 3 + 9 + 81
