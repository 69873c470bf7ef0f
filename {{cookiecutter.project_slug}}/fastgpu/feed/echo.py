"""Pool -> batches, several times over: splitting a big batch on the device and echoing it are one loop.

Data echoing (Choi et al., "Faster Neural Network Training with Data Echoing", arXiv:1907.05550): when supplying a batch
takes R times as long as training on it, training R times on each costs no time. The paper saw echoed batches worth
almost as much as fresh ones up to about 4 with augmentation drawn anew, and less without.
"""

from collections.abc import Iterator

import torch

from fastgpu.rows.rows import Rows


def echo(rows: Rows, batch_rows: int, times: int, rng: torch.Generator) -> Iterator[Rows]:
    """Batches of `batch_rows` rows (the last may be shorter): once as they lie, then reshuffled `times - 1` times.

    The first pass yields views of the pool; they are valid until the next pool is asked for. rng: on the rows' device.
    The order of ragged rows is drawn on the host, by torch's own generator there, since batches have sizes by it.
    """
    yield from rows.batches(batch_rows)
    for _ in range(times - 1):
        order = torch.randperm(len(rows)) if rows.has_ragged else torch.randperm(
            len(rows), generator=rng, device=rng.device)  # fmt: skip
        for index in order.split(batch_rows):
            yield rows.take(index)


MOST, MOST_UNCHANGED = 4.0, 2.0  # data.echo=auto: where a transform draws augmentation anew, and where none does


def auto_factor(supply_s: float, train_s: float, redraws: bool) -> float:
    """The factor that costs no time: R = supply / train, seconds to supply and to train on a row; 1 where R is less.

    redraws: whether a row looks different each time it is trained on.
    """
    most = MOST if redraws else MOST_UNCHANGED
    return round(min(max(supply_s / train_s, 1.0), most), 2)


def times_of_pool(factor: float, number: int) -> int:
    """How often pool `number` (counted over the whole run) is trained on: 2.5 -> 2, 3, 2, 3 ...

    The difference of two floors of number x factor: exact in the mean, without a state to keep in a checkpoint.
    """
    milli = round(1000 * factor)
    return (number + 1) * milli // 1000 - number * milli // 1000
