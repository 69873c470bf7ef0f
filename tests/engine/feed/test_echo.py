from itertools import chain

import pytest
import torch
from harness import is_ragged, ragged

from fastgpu.feed.echo import echo
from fastgpu.rows.order import echo_passes
from fastgpu.rows.rows import Ragged, Rows


def numbered_rows(n: int) -> Rows:
    return Rows({"x": torch.arange(n)})


def test_one_pass_is_no_echo():
    pool = numbered_rows(10)
    batches = list(echo(pool, 4, 1, seed=0))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[1]["x"].data_ptr() == pool["x"][4].data_ptr()  # views: nothing is copied


def test_two_batches_are_uploaded_trained_reshuffled_and_trained_again():
    """The recipe for a slow disk: upload 512 rows, train 2 x 256, reshuffle them, train 2 x 256 again."""
    batches = [batch["x"] for batch in echo(numbered_rows(512), 256, 2, seed=0)]
    assert [len(batch) for batch in batches] == [256] * 4
    assert torch.cat(batches[:2]).tolist() == list(range(512))
    again = torch.cat(batches[2:])
    assert again.tolist() != list(range(512))
    assert again.sort().values.tolist() == list(range(512))
    assert set(batches[0].tolist()) != set(batches[2].tolist())  # other rows stand together


def test_a_seed_gives_the_same_batches_whatever_the_loop_draws():
    def draw(seed: int, n_draws: int = 0) -> list[list[int]]:
        batches = []
        for batch in echo(numbered_rows(12), 4, 3, seed):
            torch.rand(n_draws)
            batches.append(batch["x"].tolist())
        return batches

    assert draw(1) == draw(1, n_draws=5) != draw(2)


@pytest.mark.parametrize(("factor", "first"), [(1, [1, 1, 1, 1]), (2.5, [2, 3, 2, 3]), (1.25, [1, 1, 1, 2])])
def test_fractions_alternate_and_their_mean_is_exact(factor, first):
    passes = [echo_passes(factor, number) for number in range(1000)]
    assert passes[:4] == first
    assert sum(passes) == round(1000 * factor)
    assert max(passes) - min(passes) <= 1


def test_ragged_rows_are_echoed_whole():
    items = ragged(range(24))
    column = Ragged(torch.from_numpy(items.values), torch.from_numpy(items.offsets), items.offsets)
    pool = Rows({"items": column, "number": torch.arange(24)})
    batches = list(echo(pool, 8, 3, seed=3))
    numbers = [batch["number"].tolist() for batch in batches]
    for batch, row_numbers in zip(batches, numbers, strict=True):
        assert is_ragged(batch["items"], row_numbers)
    first, second, third = (list(chain(*numbers[start : start + 3])) for start in (0, 3, 6))
    assert first == list(range(24)) == sorted(second) == sorted(third)
    assert first != second != third != first
