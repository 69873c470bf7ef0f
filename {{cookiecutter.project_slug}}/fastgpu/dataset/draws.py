"""The random numbers that the items of a Dataset draw from the generators of Python, NumPy and torch."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastgpu.process.seeds import make_seed

GENERATORS: dict[str, tuple[Callable[[int], object], Callable[[], object]]] = {
    "random": (random.seed, random.random),
    "numpy.random": (np.random.seed, np.random.random_sample),
    "torch": (torch.default_generator.manual_seed, lambda: torch.rand(1, dtype=torch.float64).item()),
}
"""{module: seeds its generator, draws a number from it}. torch.manual_seed would seed GPUs, too."""


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed all generators with the seed of the run. After the block, they are as they were before it."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    for number, (set_seed, _) in enumerate(GENERATORS.values()):
        set_seed(make_seed(seed, number) >> 32)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def row_seeds(rows: np.ndarray, seed: int, epoch: int, repeats: np.ndarray) -> list[list[int]]:
    """(n, 3): for each row, a seed of 32 bits for each of GENERATORS. repeats: (n,) as in `ItemSource.read_rows`.

    One `make_seed` would take longer than a small item, so this is SplitMix64 (Steele et al., 2014) for all rows.
    """
    streams = np.arange(len(GENERATORS), dtype=np.uint64) << np.uint64(62)
    z = (rows + (repeats << 32)).astype(np.uint64)[:, None] + streams + np.uint64(make_seed(seed, epoch))
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    seeds: list[list[int]] = (z >> np.uint64(32)).tolist()
    return seeds


def read_items(read: Callable[[int], Any], rows: list[int], seeds: list[list[int]], drawn: set[str]) -> list[Any]:
    """The items of some rows, of which each draws what follows from its `row_seeds`.

    drawn: the generators that are seeded for each row, because items have drawn from them. To seed all three takes
    longer than a small item. If another one is drawn from, it is added to `drawn`, and the rows are read again.
    """
    while True:
        for set_seed, _ in GENERATORS.values():
            set_seed(0)
        used = [(number, GENERATORS[name][0]) for number, name in enumerate(GENERATORS) if name in drawn]
        items = []
        for row, numbers in zip(rows, seeds, strict=True):
            for number, set_seed in used:
                set_seed(numbers[number])
            items.append(read(row))
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
