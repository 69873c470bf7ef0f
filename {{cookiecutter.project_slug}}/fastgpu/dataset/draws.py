"""The random numbers that the items of a Dataset draw from the generators of Python, NumPy and torch."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import blake2b
from struct import unpack
from typing import Any

import numpy as np
import torch

GENERATORS: dict[str, tuple[Callable[[int], object], Callable[[], object]]] = {
    "random": (random.seed, random.random),
    "numpy.random": (np.random.seed, np.random.random_sample),
    "torch": (torch.default_generator.manual_seed, lambda: torch.rand(1, dtype=torch.float64).item()),
}
"""{module: seeds its generator, draws a number from it}. torch.manual_seed would seed GPUs, too."""


def seed_each(names: set[str], *key: int) -> None:
    """Seed these generators with a hash of `key`. SeedSequence would take longer than a small item."""
    seeds = unpack("<3I", blake2b(repr(key).encode(), digest_size=12).digest())
    for number, (name, (set_seed, _)) in enumerate(GENERATORS.items()):
        if name in names:
            set_seed(seeds[number])


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators with the seed of the run. After the block, they are as they were before it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    seed_each({*GENERATORS}, seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def read_items(read: Callable[[int], Any], keys: list[tuple[int, ...]], drawn: set[str]) -> list[Any]:
    """The items of some rows, of which each draws what follows from its own key: (row, ...).

    drawn: the generators that are seeded for each row, because items have drawn from them: all three would take longer
    than a small item. If another one is drawn from, it is added to `drawn`, and the rows are read again.
    """
    while True:
        seed_each({*GENERATORS})
        items = []
        for key in keys:
            seed_each(drawn, *key)
            items.append(read(key[0]))
        others = {name for name in GENERATORS if name not in drawn and _is_drawn_from(name)}
        if not others:
            return items
        drawn |= others


def _is_drawn_from(name: str) -> bool:
    """Whether a generator has been drawn from since `seed_each` without a key."""
    draw = GENERATORS[name][1]
    number = draw()
    seed_each({name})
    return draw() != number
