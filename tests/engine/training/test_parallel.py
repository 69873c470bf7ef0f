import numpy as np
import pytest
import torch
from harness import ALONE, CPU, in_world
from torch import nn

from fastgpu.process.config import Dist
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field
from fastgpu.training.parallel import average_statistics, mean_over_ranks, share_gradients
from fastgpu.training.step import reseed


def rows_of(**field: float) -> Dataset:
    rows = Dataset()
    rows.fields = {"x": Field(np.dtype("u1"), (), **field)}
    return rows


ROWS = rows_of()


def three_backward_passes(world: World) -> tuple[list, list, float, int, list]:
    """Weights and gradients of a shared model, and the buffers of a norm and a queue after averaging."""
    torch.manual_seed(world.rank)  # the wrapper must make the weights equal
    model = nn.Linear(2, 1)
    shared = share_gradients(model, Dist(), world, ROWS)
    for _ in range(3):
        shared(torch.full((4, 2), float(world.rank))).sum().backward()
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(world.rank)
    norm.num_batches_tracked.fill_(5)
    norm.register_buffer("queue", torch.eye(2)[world.rank])
    average_statistics(norm, world)
    statistics = norm.running_mean.item(), norm.num_batches_tracked.item()
    return model.weight.tolist(), model.weight.grad.tolist(), *statistics, norm.queue.tolist()


@pytest.mark.slow
def test_ranks_share_weights_gradients_and_running_statistics():
    (weights, gradients, *statistics, queue), second = in_world(2, three_backward_passes)
    assert second == (weights, gradients, *statistics, [0, 1])
    assert gradients == [[6.0, 6.0]]  # the mean of 0 and 4, three times
    assert statistics == [0.5, 5]  # a counter is not averaged
    assert queue == [1, 0]  # nor a queue of unit vectors, as of contrastive learning


def test_a_number_that_only_some_steps_have_is_told():
    steps = [{"train/loss": torch.ones(())}, {"train/loss": torch.ones(()), "train/norm": torch.ones(())}]
    with pytest.raises(UserError, match="other tags than train/loss in some steps; return all in each"):
        mean_over_ranks(steps, ALONE)


def test_alone_nothing_is_averaged_and_dp_wraps_the_model():
    assert three_backward_passes(ALONE)[1:] == ([[0.0, 0.0]], 0.0, 5, [1, 0])
    model = nn.Linear(1, 1)
    assert share_gradients(model, Dist(strategy="ddp"), ALONE, ROWS) is model
    assert isinstance(share_gradients(model, Dist(strategy="dp"), ALONE, ROWS), nn.DataParallel)


@pytest.mark.parametrize(("world", "rows"), [(World(0, 2, 2, CPU), ROWS), (ALONE, rows_of(mean_values=1.0))])
def test_data_parallel_refuses_what_it_cannot_cut(world, rows):
    with pytest.raises(UserError, match="dist.strategy is dp, .*: use ddp"):
        share_gradients(nn.Linear(1, 1), Dist(strategy="dp"), world, rows)


def test_unused_gpus_are_told_with_the_command_that_uses_them(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    share_gradients(nn.Linear(1, 1), Dist(), World(0, 1, 1, torch.device("cuda", 0)), ROWS)
    assert "1 of 8 GPUs is in use; torchrun --standalone --nproc-per-node=gpu train.py" in capsys.readouterr().out
    share_gradients(nn.Linear(1, 1), Dist(), ALONE, ROWS)
    assert not capsys.readouterr().out


def draw(*numbers: int, rank: int = 0) -> float:
    rng = reseed(World(rank, 2, 2, CPU), *numbers)
    value = torch.rand(1, generator=rng).item()
    assert torch.initial_seed() == rng.initial_seed()  # dropout draws from the same generator
    return value


def test_a_seed_repeats_its_draws_and_depends_on_every_number_and_the_rank():
    assert draw(1, 2, 3) == draw(1, 2, 3)
    draws = {draw(a, b, c, rank=r) for a in range(3) for b in range(3) for c in range(3) for r in range(2)}
    assert len(draws) == 54
