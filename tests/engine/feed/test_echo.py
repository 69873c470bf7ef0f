from itertools import chain

import pytest
import torch
from harness import is_ragged, ragged

from fastgpu.feed.echo import echo
from fastgpu.rows.order import echo_passes
from fastgpu.rows.rows import Ragged, Rows

VALUES, OFFSETS = ragged(range(25))
ITEMS = Ragged(torch.from_numpy(VALUES), torch.from_numpy(OFFSETS), OFFSETS)
POOL = Rows({"number": torch.arange(25), "items": ITEMS})


def test_the_first_pass_is_the_rows_in_their_order_as_views():
    batches = list(echo(POOL, 10, 1, seed=0))
    assert [batch["number"].tolist() for batch in batches] == [[*range(10)], [*range(10, 20)], [*range(20, 25)]]
    assert batches[1]["number"].data_ptr() == POOL["number"][10].data_ptr()


def test_each_other_pass_has_all_rows_whole_in_an_order_of_its_own_that_the_seed_decides():
    def numbers(seed: int, n_draws: int = 0) -> list[list[int]]:
        found = []
        for batch in echo(POOL, 10, 3, seed):
            torch.rand(n_draws)  # the loop may draw what it wants
            found.append(batch["number"].tolist())
            assert is_ragged(batch["items"], found[-1])
        assert [*map(len, found)] == [10, 10, 5] * 3
        return [list(chain(*found[start : start + 3])) for start in (0, 3, 6)]

    first, second, third = numbers(seed=3)
    assert first == list(range(25)) == sorted(second) == sorted(third)
    assert first != second != third != first
    assert set(first[:10]) != set(second[:10])  # other rows stand together
    assert numbers(seed=3, n_draws=5) == [first, second, third] != numbers(seed=4)


@pytest.mark.parametrize(("factor", "first"), [(1, [1, 1, 1, 1]), (2.5, [2, 3, 2, 3]), (1.25, [1, 1, 1, 2])])
def test_fractions_alternate_and_their_mean_is_exact(factor, first):
    passes = [echo_passes(factor, number) for number in range(1000)]
    assert passes[:4] == first
    assert sum(passes) == round(1000 * factor)
    assert max(passes) - min(passes) <= 1
