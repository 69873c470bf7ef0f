"""What the ranks share while they train: gradients, running statistics, and seeds that differ."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fastgpu.process.config import Dist
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset


def share_gradients(model: nn.Module, settings: Dist, world: World, rows: Dataset | None = None) -> nn.Module:
    """The module to train: it averages the gradients over the ranks.

    rows: what is trained on; nn.DataParallel cannot cut ragged rows. Raises UserError if the strategy does not fit the
    number of processes or is not available.
    """
    world.print_once(unused_gpus_hint(world, settings, " ".join(sys.argv)))
    strategy = settings.strategy
    if strategy == "apex":
        with explain_apex("dist.strategy is apex"):
            kind = import_module("apex.parallel").DistributedDataParallel  # which Apex had until 25.05
            averaging: nn.Module = kind(model) if world.world_size > 1 else model
        return averaging
    if strategy == "dp":
        if world.world_size > 1:
            raise UserError(
                f"dist.strategy is dp, which drives all GPUs from one process, but there are {world.world_size} "
                "processes: use ddp"
            )
        if rows is not None and any(field.is_ragged for field in rows.fields.values()):
            raise UserError("dist.strategy is dp, which cuts a batch into equal parts; rows are ragged: use ddp")
        return DataParallel(model)
    if world.world_size == 1:
        return model
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        find_unused_parameters=settings.find_unused_parameters,
    )
    ddp.broadcast_buffers = False  # `average_statistics` does this when it matters, not in every forward pass
    return ddp


@contextmanager
def explain_apex(setting: str) -> Iterator[None]:
    """Raise UserError for whatever raises if Apex (https://github.com/NVIDIA/apex) is missing, foreign or unfit."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())
        raise UserError(f"{setting}, but {reason}; see https://github.com/NVIDIA/apex#installation") from None


def average_statistics(model: nn.Module, world: World) -> None:
    """Replace the running statistics of the ranks (batch norm) by their mean, before evaluating and saving.

    Other buffers stay as they are on each rank: a queue, or a codebook, has no mean.
    """
    if world.world_size == 1:
        return
    for module in model.modules():
        if isinstance(module, _NormBase):
            for buffer in (module.running_mean, module.running_var):
                if buffer is not None:
                    world.all_reduce_sum(buffer).div_(world.world_size)


def freeze(module: nn.Module) -> None:
    """Stop training a part of a model: its weights, and the running statistics of its batch norms."""
    module.requires_grad_(False).eval()


@contextmanager
def keep_state(model: nn.Module, world: World) -> Iterator[None]:
    """Undo, at the end, what happens to the model's buffers and to torch's random numbers. Gradients stay."""
    buffers = [buffer.clone() for buffer in model.buffers()]
    devices = [world.device] if world.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        yield
    for buffer, before in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(before)


def settle_buckets(model: nn.Module, world: World, backward: Callable[[], object]) -> None:
    """Run two backward passes that change nothing, by which DDP chooses the places of the gradients in its buckets.

    A place decides in which order the ranks' gradients are summed. Without them, a resumed run would round its first
    steps otherwise than a run that goes on.
    """
    with keep_state(model, world):
        for _ in range(2):
            backward()
            model.zero_grad()


def reseed(world: World, *numbers: int) -> torch.Generator:
    """Seed torch's generators from the numbers and the rank, and return the one of the device.

    It is called once for each step, so that a resumed run draws the same numbers as an uninterrupted one and no
    checkpoint has to keep a random state. `torch.manual_seed`, which visits every kind of device, takes 0.13 ms.
    """
    seed = make_seed(world, *numbers)
    rng = torch.default_generator.manual_seed(seed)
    if world.device.type == "cuda":
        rng = torch.cuda.default_generators[world.device.index].manual_seed(seed)
    return rng


def make_seed(world: World, *numbers: int) -> int:
    """A seed that follows from the numbers and the rank."""
    seed = 0
    for number in (*numbers, world.rank):
        seed = (seed * 1_000_003 + number + 1) % (1 << 63)
    return seed


def unused_gpus_hint(world: World, settings: Dist, script: str) -> str | None:
    """The command that uses all GPUs of the machine, if this one does not."""
    n_gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if world.world_size > 1 or n_gpus < 2:
        return None
    command = f"torchrun --standalone --nproc-per-node=gpu {script}"
    if settings.strategy == "dp":
        return (
            f"nn.DataParallel copies the model to {n_gpus} GPUs in every step; ddp is faster: {command} "
            "dist.strategy=ddp"
        )
    return f"1 of {n_gpus} GPUs is in use; to use all of them: {command}"
