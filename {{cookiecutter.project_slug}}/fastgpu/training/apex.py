"""NVIDIA Apex (https://github.com/NVIDIA/apex), if it is installed: its fused optimizers and its old DDP.

Apex is never required: torch has fused Adam and SGD itself. `pip install apex` installs another project of that name.
Nothing of the package is executed before it is known to be NVIDIA's, built with its kernels, on a machine with CUDA.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastgpu.process.config import Auto, Kernels, Optim
from fastgpu.process.launch import UserError, warn
from fastgpu.process.world import World

CLASSES = {"adamw": "FusedAdam", "sgd": "FusedSGD", "lamb": "FusedLAMB"}
"""{optim.name: class in apex.optimizers}"""
SAME_ALGORITHM = ({"AdamW of torch", "FusedAdam of apex"}, {"SGD of torch", "FusedSGD of apex"})
"""Optimizers whose states can be converted into each other."""
SOURCE = "from source: https://github.com/NVIDIA/apex#installation"
REMOVED = "on 2025-05-08 (NVIDIA/apex#1896)"


def why_unusable(part: str, name: str, kernels: str = "") -> str:
    """Why `apex.<part>.<name>` cannot be used here, and the cure; empty if it can.

    kernels: the compiled module that it needs.
    """
    spec = find_spec("apex")
    if not spec:
        return f"NVIDIA Apex is not installed ({SOURCE})"
    folders = [Path(folder) for folder in spec.submodule_search_locations or []]
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return "the installed package apex is not NVIDIA's but another project of that name: pip uninstall apex"
    sources = [folder / part / "__init__.py" for folder in folders]
    if not any(path.exists() and name in path.read_text(encoding="utf-8") for path in sources):
        cure = ""
        if part == "parallel":
            cure = f": apex.{part} was removed {REMOVED}; use torch's (dist.strategy=ddp)"
        return f"this NVIDIA Apex has no apex.{part}.{name}{cure}"
    if kernels and not find_spec(kernels):
        return f"NVIDIA Apex was built without its CUDA kernels ({kernels}): build it again ({SOURCE})"
    if not torch.cuda.is_available():
        return "NVIDIA Apex needs CUDA, and torch sees no GPU"
    try:
        getattr(import_module(f"apex.{part}"), name)
    except Exception as error:  # a build for another version of torch can fail in any way
        reason = " ".join(str(error).split())
        return f"NVIDIA Apex cannot be imported ({reason}): build it for torch {torch.__version__}"
    return ""


def choose_kernels(settings: Optim, world: World) -> Kernels:
    """The fused kernels that the optimizer uses, the same on every rank.

    Raises UserError on every rank if they have to be Apex's and cannot be used on one of them.
    """
    with world.raise_on_every_rank():
        kernels = usable_kernels(settings)
    world.check_same({"optim.fused": kernels}, "install NVIDIA Apex on every machine, or set optim.fused=torch")
    return kernels


def usable_kernels(settings: Optim) -> Kernels:
    """The fused kernels for this process. auto: Apex's if they can be used, else torch's, with a warning.

    Raises UserError if they have to be Apex's and cannot be used.
    """
    name = settings.name
    fused: Kernels | Auto = settings.fused
    if fused in ("torch", "none"):
        if name == "lamb":
            raise UserError(f"optim.name is lamb, which torch does not have, but optim.fused is {fused}; use apex")
        return "torch" if fused == "torch" else "none"
    why = why_unusable("optimizers", CLASSES[name], "amp_C")
    if not why:
        return "apex"
    if fused == "apex" or name == "lamb":
        raise UserError(f"optim.name is {name}, optim.fused is {fused}, but {why}")
    warn(f"optim.fused is auto: torch's own kernels are used, because {why}")
    return "torch"


def make_optimizer(name: str, groups: list[dict[str, Any]], lr: float, momentum: float) -> torch.optim.Optimizer:
    """FusedAdam as AdamW with betas (momentum, 0.999), FusedSGD with Nesterov momentum, or FusedLAMB.

    LAMB: You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962.
    """
    kind = getattr(import_module("apex.optimizers"), CLASSES[name])
    if name == "sgd":
        optimizer = kind(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
    else:
        optimizer = kind(groups, lr=lr, betas=(momentum, 0.999))
    assert isinstance(optimizer, torch.optim.Optimizer)
    return optimizer


def distributed(model: torch.nn.Module, world_size: int) -> torch.nn.Module:
    """The model in apex.parallel.DistributedDataParallel, which old builds of Apex have; unchanged for one rank.

    Raises UserError if there is no such class.
    """
    if why := why_unusable("parallel", "DistributedDataParallel"):
        raise UserError(f"dist.strategy is apex, but {why}")
    if world_size == 1:
        return model
    wrapped = import_module("apex.parallel").DistributedDataParallel(model)
    assert isinstance(wrapped, torch.nn.Module)
    return wrapped


# ---------------------------------------------------------------------------------------------- checkpoints


def label(optimizer: torch.optim.Optimizer) -> str:
    """Class and package of an optimizer, for the checkpoint: `FusedAdam of apex`."""
    return f"{type(optimizer).__name__} of {type(optimizer).__module__.partition('.')[0]}"


def converted(saved: dict[str, Any], saved_label: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A state that was saved by the optimizer with label `saved_label`, as `optimizer` loads it.

    Apex counts steps in the parameter groups, torch in each parameter: without its count, Adam would correct its bias
    anew. Raises ValueError if the optimizers are not the same algorithm.
    """
    now = label(optimizer)
    if saved_label == now:
        return saved
    if {saved_label, now} not in SAME_ALGORITHM:
        raise ValueError(f"saved by {saved_label}, optim.name is now {now}; continue with the one it began with")
    state = {key: dict(values) for key, values in saved["state"].items()}
    groups = optimizer.state_dict()["param_groups"]
    for saved_group, group in zip(saved["param_groups"], groups, strict=True):
        keys = [key for key in group["params"] if key in state]
        steps = [state[key].pop("step", None) for key in keys]
        if now.endswith(" of apex") and steps and steps[0] is not None:
            group["step"] = int(steps[0])
        elif "step" in saved_group:
            for key in keys:
                state[key]["step"] = torch.tensor(float(saved_group["step"]))
    return {"state": state, "param_groups": groups}
