"""What the ranks share while they train: gradients, running statistics, and the numbers that are logged."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from fastgpu.process.config import Dist
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Rows
from fastgpu.training.apex import from_apex


def share_gradients(model: nn.Module, settings: Dist, world: World, rows: Dataset) -> nn.Module:
    """The module to train: it averages the gradients over the ranks.

    rows: what is trained on. Raises UserError if dist.strategy does not fit the job or is not available.
    """
    if settings.strategy == "dp":
        if world.world_size > 1 or any(field.is_ragged for field in rows.fields.values()):
            raise UserError("dist.strategy is dp, which is for one process and takes no ragged rows: use ddp")
        return DataParallel(model)
    if world.world_size == 1:
        if world.device.type == "cuda" and (n_gpus := torch.cuda.device_count()) > 1:
            print(f"1 of {n_gpus} GPUs is in use; torchrun --standalone --nproc-per-node=gpu train.py uses all")
        return model
    if settings.strategy == "apex":  # Apex had it until 25.05
        return from_apex("dist.strategy is apex", "apex.parallel:DistributedDataParallel", model)
    unused = settings.find_unused_parameters
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, find_unused_parameters=unused)
    ddp.broadcast_buffers = False  # `average_statistics` does this when it matters, not in every forward pass
    return ddp


def mean_over_ranks(steps: Sequence[Mapping[str, Tensor]], world: World) -> dict[str, float]:
    """The mean of each number over some steps and all ranks. The host waits for the device, once.

    Raises UserError if steps have different numbers.
    """
    if any(step.keys() != steps[0].keys() for step in steps):
        raise UserError(f"train_step returns other tags than {', '.join(steps[0])} in some steps; return all in each")
    means = [torch.stack([step[tag] for step in steps]).mean().float() for tag in steps[0]]
    sums = world.all_reduce_sum(torch.stack(means)).tolist()
    return {tag: total / world.world_size for tag, total in zip(steps[0], sums, strict=True)}


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
    """Stop training a part of a model: its weights, the running statistics of its batch norms, and its dropout.

    Call it in `model()` of a workload. Nothing here sets the part back to training.
    """
    module.requires_grad_(False).eval()


def settle_buckets(parts: Any, batch: Rows, world: World) -> None:
    """Run a backward pass that changes nothing, by which DDP chooses the places of the gradients in its buckets.

    A place decides in which order the gradients of more than two ranks are summed. Without this pass, a resumed run
    would round its first step otherwise than a run that goes on. Later calls do nothing. parts: of train.py.
    """
    if world.world_size <= 2 or hasattr(parts.ddp, "is_settled"):
        return
    parts.ddp.is_settled = True
    buffers = [buffer.clone() for buffer in parts.model.buffers()]
    part = batch.slice(0, len(batch) // parts.config.optim.accumulation_steps)
    with torch.random.fork_rng([world.device] if world.device.type == "cuda" else []):
        with parts.precision.autocast:
            loss = parts.workload.loss(parts.ddp, part)
        loss.backward()
    parts.model.zero_grad()
    for buffer, before in zip(parts.model.buffers(), buffers, strict=True):
        buffer.copy_(before)
