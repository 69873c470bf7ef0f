from statistics import fmean

import pytest
import torch
from harness import ALONE

from fastgpu.training.step import Losses


def with_losses(*values: float) -> Losses:
    losses = Losses()
    for value in values:
        losses.add(torch.tensor(value))
    return losses


def test_the_mean_is_of_the_steps_since_the_last_report():
    losses = with_losses(1.0, 2.0)
    assert losses.take(ALONE) == 1.5
    assert len(losses) == 0
    losses.add(torch.tensor(4.0))
    assert losses.take(ALONE) == 4.0


def test_the_mean_of_an_epoch_is_that_of_its_steps():
    losses = Losses()
    reports = [[4.0], [1.0, 2.0, 6.0], [0.5, 0.25]]
    assert losses.epoch_mean is None
    for steps in reports:
        losses.add_to_epoch(fmean(steps), len(steps))
    assert losses.epoch_mean == pytest.approx(fmean([loss for steps in reports for loss in steps]))
    losses.begin_epoch()
    assert losses.epoch_mean is None
    losses.add_to_epoch(7.0, 3)
    assert losses.epoch_mean == 7.0
