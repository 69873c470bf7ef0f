"""A pool as batches, once or several times: data echoing.

Choi et al., "Faster Neural Network Training with Data Echoing", arXiv:1907.05550. If reading a batch takes R times as
long as training on it, training on each batch R times costs no time. In the paper echoed batches were worth almost as
much as fresh ones up to a factor of about 4 with random augmentation, and less without.
"""

from collections.abc import Iterator

import torch

from fastgpu.rows.rows import Rows

MAX_FACTOR = 4.0
"""Largest factor that data.echo=auto chooses if rows look different each time."""
MAX_FACTOR_UNCHANGED = 2.0
"""Largest factor that data.echo=auto chooses if rows look the same each time."""


def echo(rows: Rows, batch_size: int, passes: int, seed: int, *, only_pass: int | None = None) -> Iterator[Rows]:
    """Batches of `batch_size` rows (the last may have fewer): once in order, then reshuffled `passes - 1` times.

    The first pass yields views of the pool, which are valid until the next pool is asked for. seed: of the order. The
    order of ragged rows is drawn on the host, because it decides their sizes. only_pass: the one pass that is wanted.
    """
    if not len(rows):
        return  # a run that is resumed at the end of an epoch: splitting nothing would give an empty batch
    device = torch.device("cpu") if rows.has_ragged else next(iter(rows.columns.values())).device
    rng = torch.Generator(device).manual_seed(seed)
    for number in range(passes):
        batches = rows.batches(batch_size)
        if number:
            order = torch.randperm(len(rows), generator=rng, device=device)
            batches = map(rows.take, order.split(batch_size))
        if only_pass in (None, number):
            yield from batches


def max_echo(is_random: bool) -> float:
    """The largest factor that data.echo=auto chooses. is_random: whether rows look different each time."""
    return MAX_FACTOR if is_random else MAX_FACTOR_UNCHANGED


def free_echo(read_s: float, train_s: float, is_random: bool) -> float:
    """The factor that costs no time: seconds to read a row / seconds to train on it, between 1 and `max_echo`."""
    return round(min(max(read_s / train_s, 1.0), max_echo(is_random)), 2)
