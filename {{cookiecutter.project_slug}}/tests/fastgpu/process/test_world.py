import dataclasses

import pytest
import torch
from harness import in_world
from torch import nn

from fastgpu.process import world as dist
from fastgpu.process.launch import Launch, UserError, exit_with_message, read_launch
from fastgpu.process.world import World, join
from fastgpu.training.parallel import hint, wrap

ALONE = World(0, 1, 1, torch.device("cpu"))


def _collectives(world: World):
    value = torch.tensor([1.0 + world.rank])
    model = nn.BatchNorm1d(2)
    model.running_mean.fill_(world.rank)
    model.num_batches_tracked.fill_(5)
    world.average_buffers(model)
    return (
        world.all_reduce_sum(value).item(),
        world.all_reduce_max(float(world.rank)),
        world.broadcast(f"rank {world.rank}"),
        model.running_mean.tolist(),
        model.num_batches_tracked.item(),
    )


def test_collectives():
    assert in_world(2, _collectives) == [(3.0, 1.0, "rank 0", [0.5, 0.5], 5)] * 2


def test_alone_nothing_is_sent():
    assert _collectives(ALONE) == (1.0, 0.0, "rank 0", [0.0, 0.0], 5)
    assert not torch.distributed.is_initialized()


def _one_rank_fails(world: World):
    try:
        with world.raise_on_every_rank():
            if world.rank == 1:
                raise UserError("disk of rank 1 is full")
        return "went on"
    except UserError as error:
        world.all_reduce_sum(torch.ones(1))  # the ranks can still talk
        return str(error)


def test_what_one_rank_meets_every_rank_raises():
    assert in_world(2, _one_rank_fails) == ["disk of rank 1 is full"] * 2


def _disagree(world: World):
    world.check_equal("the same", "no cure needed")
    try:
        world.check_equal(world.rank, "share the folder")
    except UserError as error:
        return str(error)


def test_ranks_that_differ_are_told():
    assert in_world(2, _disagree) == ["rank 1 has 1, rank 0 has 0; share the folder"] * 2


def _gradients(world: World, strategy):
    torch.manual_seed(world.rank)  # the wrapper must make the weights equal
    model = nn.Linear(2, 1)
    shared = wrap(world, model, strategy, static_graph=True)
    for _ in range(3):
        shared(torch.full((4, 2), float(world.rank))).sum().backward()
    return model.weight.tolist(), model.weight.grad.tolist()


def test_ddp_shares_weights_and_gradients():
    first, second = in_world(2, _gradients, "ddp")
    assert first == second
    assert first[1] == [[6.0, 6.0]]  # mean of 0 and 4, three times


@pytest.mark.parametrize(("strategy", "reason"), [("none", "shares no gradients"), ("dp", "from one process")])
def test_strategies_for_one_process_refuse_two(strategy, reason):
    with pytest.raises(UserError, match=f"dist.strategy is {strategy}, which .*{reason}.*use ddp"):
        wrap(World(0, 2, 2, torch.device("cpu")), nn.Linear(1, 1), strategy, True)


def test_alone_ddp_and_none_leave_the_model_as_it_is_and_dp_wraps_it():
    model = nn.Linear(1, 1)
    assert wrap(ALONE, model, "ddp", True) is model
    assert wrap(ALONE, model, "none", True) is model
    assert isinstance(wrap(ALONE, model, "dp", True), nn.DataParallel)


def test_launch_guard(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    gpu = World(0, 1, 1, torch.device("cuda", 0))
    command = "torchrun --standalone --nproc-per-node=gpu train.py a=1"
    assert hint(gpu, "ddp", "train.py a=1") == f"1 of 8 GPUs in use; all of them: {command}"
    assert "ddp is faster" in (hint(gpu, "dp", "train.py") or "")
    assert hint(ALONE, "ddp", "train.py") is None
    assert hint(World(0, 2, 2, gpu.device), "ddp", "train.py") is None
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert hint(gpu, "ddp", "train.py") is None


def test_a_gpu_where_there_is_none(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="dist.device is cuda, but torch .* sees no GPU"), join(Launch(), "cuda", 1):
        pass
    with join(Launch(), "auto", 1) as world:
        assert world.device.type == "cpu"


def test_more_processes_than_gpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with (
        pytest.raises(UserError, match="3 processes on a machine with 2 visible GPUs"),
        join(Launch(2, 3, 2, 3), "auto", 1),
    ):
        pass


def test_reseeding_repeats_and_depends_on_every_number():
    def draw(*numbers: int, rank: int = 0) -> float:
        rng = World(rank, 2, 2, torch.device("cpu")).reseed(*numbers)
        drawn = torch.rand(1, generator=rng).item()
        assert torch.initial_seed() == rng.initial_seed()  # dropout draws from the same
        return drawn

    assert draw(1, 2, 3) == draw(1, 2, 3)
    drawn = {draw(a, b, c, rank=r) for a in range(3) for b in range(3) for c in range(3) for r in range(2)}
    assert len(drawn) == 54


def _keys_of_this_attempt(world: World):
    ours = torch.distributed.distributed_c10d._get_default_store().underlying_store
    ours.set(f"rank {world.rank}", "here")
    return ours.underlying_store.get(f"attempt0/rank {world.rank}")


def test_addresses_are_kept_apart_for_each_restart():
    assert in_world(2, _keys_of_this_attempt) == [b"here"] * 2


def test_launch_reads_what_torchrun_sets(monkeypatch):
    assert read_launch() == Launch()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    for number, name in enumerate(names, 3):
        monkeypatch.setenv(name, str(number))
    assert read_launch() == Launch(3, 4, 5, 6, 7)


def test_one_message_a_machine_and_the_same_exit_code_on_every_rank(capsys):
    for local_rank, said in ((0, "error: too many\n"), (1, "")):
        with pytest.raises(SystemExit) as stop, exit_with_message(Launch(local_rank=local_rank)):
            raise UserError("too many")
        assert stop.value.code == 2
        assert capsys.readouterr().err == said


def test_an_interruption_needs_no_traceback(capsys):
    with pytest.raises(SystemExit) as stop, exit_with_message(Launch()):
        raise KeyboardInterrupt
    assert stop.value.code == 130
    assert "run.resume=auto" in capsys.readouterr().err


def test_our_own_mistakes_keep_their_traceback():
    with pytest.raises(ZeroDivisionError), exit_with_message(Launch()):
        raise ZeroDivisionError


def test_module_reads_no_environment():
    assert not hasattr(dist, "os")


def _two_machines(world: World) -> tuple[dict[str, float], list[str] | None, list[float]]:
    there = dataclasses.replace(world, local_world_size=1, local_rank=0)
    second = dataclasses.replace(world, local_rank=1)
    return there.gather_by_node({"host/rss_gib": float(world.rank)}), second.gpus, world.all_gather(world.rank + 0.5)


def test_what_each_machine_measures_comes_together():
    for merged, of_second, each in in_world(2, _two_machines):
        assert merged == {"host/rss_gib": 0.0, "machine1/host/rss_gib": 1.0}
        assert of_second is None  # one monitor a machine
        assert each == [0.5, 1.5]
    assert ALONE.gather_by_node({"a": 1.0}) == {"a": 1.0}
    assert ALONE.gpus == []


def _one_refuses(world: World) -> str:
    try:
        world.check_everywhere(world.rank == 0, "no room")
    except UserError as error:
        return str(error)
    return ""


def test_what_one_rank_lacks_every_rank_says():
    assert in_world(2, _one_refuses) == ["no room"] * 2
