import pytest
import torch
from harness import ALONE, CPU, in_world
from torch import nn

from fastgpu.process.config import Dist
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.run.model_files import DescribedSource
from fastgpu.training.parallel import average_statistics, reseed, share_gradients, unused_gpus_hint


def three_backward_passes(world: World) -> tuple[list, list, float, int]:
    """Weights and gradients of a shared model, and the running statistics of a norm after averaging."""
    torch.manual_seed(world.rank)  # the wrapper must make the weights equal
    model = nn.Linear(2, 1)
    shared = share_gradients(model, Dist(), world)
    for _ in range(3):
        shared(torch.full((4, 2), float(world.rank))).sum().backward()
    norm = nn.BatchNorm1d(1)
    norm.running_mean.fill_(world.rank)
    norm.num_batches_tracked.fill_(5)
    average_statistics(norm, world)
    return model.weight.tolist(), model.weight.grad.tolist(), norm.running_mean.item(), norm.num_batches_tracked.item()


@pytest.mark.slow
def test_ranks_share_weights_gradients_and_running_statistics():
    first, second = in_world(2, three_backward_passes)
    assert first == second
    _, gradients, mean, count = first
    assert gradients == [[6.0, 6.0]]  # the mean of 0 and 4, three times
    assert mean == 0.5
    assert count == 5  # an integer is not averaged


def test_alone_nothing_is_averaged():
    _, gradients, mean, count = three_backward_passes(ALONE)
    assert (gradients, mean, count) == ([[0.0, 0.0]], 0.0, 5)


def test_data_parallel_refuses_two_processes():
    with pytest.raises(UserError, match=r"dist.strategy is dp, which .* from one process, .* 2 processes: use ddp"):
        share_gradients(nn.Linear(1, 1), Dist(strategy="dp"), World(0, 2, 2, CPU))


def test_alone_ddp_leaves_the_model_as_it_is_and_dp_wraps_it():
    model = nn.Linear(1, 1)
    assert share_gradients(model, Dist(strategy="ddp"), ALONE) is model
    assert isinstance(share_gradients(model, Dist(strategy="dp"), ALONE), nn.DataParallel)


def test_ragged_rows_cannot_be_cut_by_data_parallel():
    rows = DescribedSource(
        {"attributes": {}, "fields": {"x": {"dtype": "u1", "shape": [], "is_ragged": True, "n_items": None}}}
    )
    with pytest.raises(UserError, match="dp, which cuts a batch into equal parts; rows are ragged: use ddp"):
        share_gradients(nn.Linear(1, 1), Dist(strategy="dp"), ALONE, rows)


def test_unused_gpus_are_told_with_the_command_that_uses_them(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    gpu = World(0, 1, 1, torch.device("cuda", 0))
    command = "torchrun --standalone --nproc-per-node=gpu train.py a=1"
    assert unused_gpus_hint(gpu, Dist(), "train.py a=1") == f"1 of 8 GPUs is in use; to use all of them: {command}"
    hint = unused_gpus_hint(gpu, Dist(strategy="dp"), "train.py a=1")
    assert f"ddp is faster: {command} dist.strategy=ddp" in hint
    assert unused_gpus_hint(ALONE, Dist(), "train.py") is None
    assert unused_gpus_hint(World(0, 2, 2, gpu.device), Dist(), "train.py") is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert unused_gpus_hint(gpu, Dist(), "train.py") is None


def draw(*numbers: int, rank: int = 0) -> float:
    rng = reseed(World(rank, 2, 2, CPU), *numbers)
    value = torch.rand(1, generator=rng).item()
    assert torch.initial_seed() == rng.initial_seed()  # dropout draws from the same generator
    return value


def test_a_seed_repeats_its_draws_and_depends_on_every_number_and_the_rank():
    assert draw(1, 2, 3) == draw(1, 2, 3)
    draws = {draw(a, b, c, rank=r) for a in range(3) for b in range(3) for c in range(3) for r in range(2)}
    assert len(draws) == 54


def average_a_queue(world: World) -> tuple[list[float], list[float]]:
    """A queue of two numbers of this rank, and the statistics of a norm, after averaging."""
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(2), "queue": nn.Module()})
    model["queue"].register_buffer("rows", torch.eye(2)[world.rank])
    model["norm"].running_var.fill_(world.rank)
    average_statistics(model, world)
    return model["queue"].rows.tolist(), model["norm"].running_var.tolist()


@pytest.mark.slow
def test_only_running_statistics_are_averaged_over_the_ranks():
    """A queue of unit vectors, as of contrastive learning, would lose its norm."""
    assert in_world(2, average_a_queue) == [([1, 0], [0.5, 0.5]), ([0, 1], [0.5, 0.5])]
