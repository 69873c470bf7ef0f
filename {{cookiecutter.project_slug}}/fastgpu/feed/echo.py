"""A pool as batches, once or several times: data echoing.

Choi et al., "Faster Neural Network Training with Data Echoing", arXiv:1907.05550. If reading a batch takes R times as
long as training on it, training on each batch R times costs no time. In the paper echoed batches were worth almost as
much as fresh ones up to a factor of about 4 with random augmentation, and less without.
"""

from collections.abc import Iterator

import torch

from fastgpu.rows.rows import Ragged, Rows


def echo(rows: Rows, batch_size: int, passes: int, seed: int) -> Iterator[Rows]:
    """Batches of `batch_size` rows (the last may have fewer): once in order, then reshuffled `passes - 1` times.

    The first pass yields views of the pool, which are valid until the next pool is asked for. seed: of the order. The
    order of ragged rows is drawn on the host, because it decides their sizes.
    """
    if not len(rows):
        return  # a run that is resumed at the end of an epoch: splitting nothing would give an empty batch
    has_ragged = any(isinstance(column, Ragged) for column in rows.columns.values())
    device = torch.device("cpu") if has_ragged else rows.device
    rng = torch.Generator(device).manual_seed(seed)
    yield from rows.batches(batch_size)
    for _ in range(passes - 1):
        order = torch.randperm(len(rows), generator=rng, device=device)
        yield from map(rows.take, order.split(batch_size))
