"""NVIDIA Apex (https://github.com/NVIDIA/apex), where it is installed: what of it can be used, or why nothing can.

It is never a requirement: torch has fused Adam and SGD itself, and `pip install apex` brings another project of that
name. Nothing of it is executed before it is known to be the right one, built with its kernels, on a machine with CUDA.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

from fastgpu.process.launch import UserError

Kernels = Literal["torch", "apex", "off"]
CLASSES = {"adamw": "FusedAdam", "sgd": "FusedSGD", "lamb": "FusedLAMB"}  # of apex.optimizers
SOURCE = "from source: https://github.com/NVIDIA/apex#installation"
REMOVED = "on 2025-05-08 (NVIDIA/apex#1896)"


def reason_against(part: str, name: str, kernels: str = "") -> str:
    """Why `apex.<part>.<name>` cannot be used here, and the cure; "" if it can.

    kernels: the compiled module that it needs.
    """
    spec = find_spec("apex")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or [])] if spec else []
    if not spec:
        return f"NVIDIA Apex is not installed ({SOURCE})"
    if not any((folder / "multi_tensor_apply").is_dir() for folder in folders):
        return "the installed package apex is not NVIDIA's but another project of that name: pip uninstall apex"
    sources = [folder / part / "__init__.py" for folder in folders]
    if not any(path.exists() and name in path.read_text(encoding="utf-8") for path in sources):
        return f"this NVIDIA Apex has no apex.{part}.{name}" + (
            f": apex.{part} was removed {REMOVED}; use torch's (dist.strategy=ddp)" if part == "parallel" else ""
        )
    if kernels and not find_spec(kernels):
        return f"NVIDIA Apex was built without its CUDA kernels ({kernels}): build it again ({SOURCE})"
    if not torch.cuda.is_available():
        return "NVIDIA Apex needs CUDA, and torch sees no GPU"
    try:
        getattr(import_module(f"apex.{part}"), name)
    except Exception as error:  # a build for another torch fails in any way
        return (
            f"NVIDIA Apex cannot be imported ({' '.join(str(error).split())}): build it for torch {torch.__version__}"
        )
    return ""


def choose(fused: Kernels | Literal["auto"], name: str) -> tuple[Kernels, str]:
    """Whose kernels the optimizer has, and a line about it where `auto` would have liked Apex's.

    Raises UserError if they must be Apex's and cannot.
    """
    if fused in ("torch", "off"):
        if name == "lamb":
            raise UserError(f"optim.name is lamb, which torch does not have, but optim.fused is {fused}; use apex")
        return fused, ""
    why = reason_against("optimizers", CLASSES[name], "amp_C")
    if not why:
        return "apex", ""
    if fused == "apex" or name == "lamb":
        raise UserError(f"optim.name is {name}, optim.fused is {fused}, but {why}")
    return "torch", f"\noptim.fused is auto: torch's own kernels, as {why}"


def make(name: str, groups: list[dict[str, Any]], lr: float, momentum: float) -> torch.optim.Optimizer:
    """FusedAdam as AdamW (betas = momentum, 0.999), FusedSGD with Nesterov momentum, or FusedLAMB.

    LAMB: You et al., "Large Batch Optimization for Deep Learning", arXiv:1904.00962.
    """
    kind = getattr(import_module("apex.optimizers"), CLASSES[name])
    if name == "sgd":
        made = kind(groups, lr=lr, momentum=momentum, nesterov=momentum > 0)
    else:
        made = kind(groups, lr=lr, betas=(momentum, 0.999))
    assert isinstance(made, torch.optim.Optimizer)
    return made


def distributed(model: torch.nn.Module, ranks: int) -> torch.nn.Module:
    """The model in apex.parallel.DistributedDataParallel, of builds from before its removal; itself for one rank.

    Raises UserError where there is no such class.
    """
    if why := reason_against("parallel", "DistributedDataParallel"):
        raise UserError(f"dist.strategy is apex, but {why}")
    if ranks == 1:
        return model
    wrapped = import_module("apex.parallel").DistributedDataParallel(model)
    assert isinstance(wrapped, torch.nn.Module)
    return wrapped


# ---------------------------------------------------------------------------------------------- checkpoints


def label(optimizer: torch.optim.Optimizer) -> str:
    """Kind and maker, for the checkpoint: `FusedAdam of apex`."""
    return f"{type(optimizer).__name__} of {type(optimizer).__module__.partition('.')[0]}"


def converted(saved: dict[str, Any], before: str, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The state of an optimizer labelled `before`, for `optimizer`.

    Apex counts steps in the groups, torch in each parameter: without its count Adam would correct its bias anew. Raises
    ValueError where they are not the same algorithm.
    """
    now = label(optimizer)
    if before == now:
        return saved
    same = [{"AdamW of torch", "FusedAdam of apex"}, {"SGD of torch", "FusedSGD of apex"}]
    if {before, now} not in same:
        raise ValueError(f"saved by {before}, optim.name is now {now}; go on with the one that it began with")
    state = {key: dict(values) for key, values in saved["state"].items()}
    groups = optimizer.state_dict()["param_groups"]
    for old, group in zip(saved["param_groups"], groups, strict=True):
        steps = [state[key].pop("step", None) for key in group["params"] if key in state]
        if now.endswith(" of apex") and steps and steps[0] is not None:
            group["step"] = int(steps[0])
        elif "step" in old:
            for key in group["params"]:
                if key in state:
                    state[key]["step"] = torch.tensor(float(old["step"]))
    return {"state": state, "param_groups": groups}
