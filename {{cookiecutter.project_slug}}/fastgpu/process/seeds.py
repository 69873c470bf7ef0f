"""Seeds of random generators: a pure function of the run's seed and a key, so no random state has to be saved."""

import numpy as np
import torch

from fastgpu.process.world import with_index

__all__ = ["reseed"]


def make_seed(seed: int, *key: int) -> int:
    """Derive a seed of 64 bits from the seed of the run. key: the use of the seed, such as (epoch, step, rank).

    `spawn_key` distinguishes keys of different lengths: NumPy treats the plain seeds (0, 0) and (0, 0, 0, 0) as equal.
    """
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)[0])


def reseed(device: torch.device, seed: int, *key: int) -> torch.Generator:
    """Seed torch's generators with `make_seed(seed, *key)`, and return the generator of the device.

    Each step calls this, so that no checkpoint has to keep a random state. `torch.manual_seed` would be slower: it also
    seeds the devices that this rank does not use.
    """
    derived = make_seed(seed, *key)
    rng = torch.default_generator.manual_seed(derived)
    if device.type == "cuda":
        rng = torch.cuda.default_generators[with_index(device).index].manual_seed(derived)
    return rng
