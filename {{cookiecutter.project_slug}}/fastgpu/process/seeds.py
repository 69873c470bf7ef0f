"""Seeds of random generators: a pure function of the run's seed and of what is drawn, so no state has to be saved."""

import numpy as np
import torch

from fastgpu.process.world import with_index

__all__ = ["reseed"]


def make_seed(seed: int, *key: int) -> int:
    """Derive a seed of 64 bits from the seed of the run. key: what it is for, such as (epoch, step, rank).

    `spawn_key` keeps keys of different lengths apart: to NumPy, the plain seeds (0, 0) and (0, 0, 0, 0) are the same.
    """
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0])


def reseed(device: torch.device, seed: int, *key: int) -> torch.Generator:
    """Seed torch's generators with `make_seed(seed, *key)`, and return the one of the device.

    Each step calls it, so that no checkpoint has to keep a random state. `torch.manual_seed` would be slower: it also
    seeds the devices that this rank does not use.
    """
    derived = make_seed(seed, *key)
    rng = torch.default_generator.manual_seed(derived)
    if device.type == "cuda":
        rng = torch.cuda.default_generators[with_index(device).index].manual_seed(derived)
    return rng
