"""The random numbers that the items of a Dataset draw from the generators of Python, NumPy and torch."""

import random
from collections.abc import Callable, Iterator, Sequence
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
"""{module: (seeds its generator, draws a number from the generator)}. torch.manual_seed would also seed GPUs."""


def make_seeds(*key: int) -> tuple[int, ...]:
    """A seed of 32 bits for each of GENERATORS. NumPy's SeedSequence would take longer than a small item."""
    return unpack("<3I", blake2b(repr(key).encode(), digest_size=12).digest())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators with the seed of the run. After the block, their states from before are restored."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for (set_seed, _), number in zip(GENERATORS.values(), make_seeds(seed), strict=True):
        set_seed(number)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def read_items(read: Callable[[int], Any], keys: Sequence[tuple[int, ...]], drawn: set[str]) -> list[Any]:
    """The items of some rows. The random numbers of an item follow from its own key, (row, ...).

    drawn: the generators that are seeded for each row, because items have drawn from them. Seeding all three would take
    longer than reading a small item. If items draw from another generator, it is added to `drawn`, and the rows are
    read again.
    """
    while True:
        for set_seed, _ in GENERATORS.values():
            set_seed(0)
        used = [(number, GENERATORS[name][0]) for number, name in enumerate(GENERATORS) if name in drawn]
        items = []
        for key in keys:
            seeds = make_seeds(*key)
            for number, set_seed in used:
                set_seed(seeds[number])
            items.append(read(key[0]))
        others = {name for name in GENERATORS if name not in drawn and _is_drawn_from(name)}
        if not others:
            return items
        drawn |= others


def _is_drawn_from(name: str) -> bool:
    """Whether a generator has been drawn from since it was seeded with 0."""
    set_seed, draw = GENERATORS[name]
    number = draw()
    set_seed(0)
    return draw() != number
