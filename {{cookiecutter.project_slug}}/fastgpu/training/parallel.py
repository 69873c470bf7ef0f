"""Gradients shared between ranks."""

from typing import Literal

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.training import apex

Strategy = Literal["ddp", "apex", "dp", "none"]


def hint(world: World, strategy: Strategy, script: str) -> str | None:
    """The command that uses the whole machine, if this one does not."""
    gpus = torch.cuda.device_count() if world.device.type == "cuda" else 0
    if world.size > 1 or gpus < 2:
        return None
    command = f"torchrun --standalone --nproc-per-node=gpu {script}"
    if strategy == "dp":
        return f"nn.DataParallel copies the model to {gpus} GPUs every step; ddp is faster: {command} dist.strategy=ddp"
    return f"1 of {gpus} GPUs in use; all of them: {command}"


def wrap(world: World, model: nn.Module, strategy: Strategy, static_graph: bool, compiled: bool = False) -> nn.Module:
    """The module to train, which shares gradients between ranks.

    static_graph: each step uses the same parameters. compiled: by torch.compile, at its first step. Raises UserError if
    the strategy does not fit the number of processes, or is not to be had.
    """
    if strategy in ("dp", "none") and world.size > 1:
        what = "shares no gradients" if strategy == "none" else "drives all GPUs from one process"
        raise UserError(f"dist.strategy is {strategy}, which {what}, but there are {world.size} processes: use ddp")
    shared = model
    if strategy == "apex":
        shared = apex.distributed(model, world.size)
    elif strategy == "dp" and getattr(model, "is_ragged", False):
        raise UserError("dist.strategy is dp, which cuts a batch into equal parts, but its rows are ragged: use ddp")
    elif strategy == "dp":
        shared = DataParallel(model)
    elif world.size > 1:
        shared = DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            static_graph=static_graph,
            forward_sync_buffers=False,  # `average_buffers` makes them one when it matters, not in every forward pass
        )
    if compiled:
        shared.compile()
    return shared
