"""Copies of a state in host memory."""

import io

import torch
from torch import nn

from fastgpu.run.saver import copy_to_host


def saved(state: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def test_a_copy_is_saved_as_the_same_bytes_and_keeps_its_values():
    """With tied weights, views, another memory format, empty tensors and the state of an optimizer."""
    model = nn.Module()
    model.conv = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    model.one, model.tied = nn.Linear(3, 3), nn.Linear(3, 3)
    model.tied.weight = model.one.weight
    model.register_buffer("view", torch.arange(10)[2:5])
    model.register_buffer("empty", torch.empty(0))
    optimizer = torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    parts = {"model": model, "step": optimizer}
    before = {name: saved(part.state_dict()) for name, part in parts.items()}
    copies = copy_to_host(parts)
    optimizer.step()
    assert {name: saved(copy.state_dict()) for name, copy in copies.items()} == before
    assert saved(model.state_dict()) != before["model"]
    storages = [copies["model"].state[f"{name}.weight"].untyped_storage().data_ptr() for name in ("one", "tied")]
    assert storages[0] == storages[1]
