import pytest
import torch
from harness import is_ragged, ragged

from fastgpu.feed.echo import echo, echo_passes, free_echo_factor
from fastgpu.rows.rows import Ragged, Rows


def rows(n: int) -> Rows:
    return Rows({"x": torch.arange(n)})


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_once_is_no_echo():
    pool, generator = rows(10), rng()
    before = generator.get_state()
    batches = list(echo(pool, 4, 1, generator))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert batches[1]["x"].data_ptr() == pool["x"][4].data_ptr()  # views: nothing is copied
    assert torch.equal(generator.get_state(), before)  # and nothing is drawn


def test_the_big_batch_recipe():
    """Upload 512, train 2 x 256, reshuffle, train 2 x 256 again: a pool of two batches, echoed twice."""
    batches = [batch["x"] for batch in echo(rows(512), 256, 2, rng())]
    assert [len(batch) for batch in batches] == [256] * 4
    assert torch.cat(batches[:2]).tolist() == list(range(512))
    again = torch.cat(batches[2:])
    assert again.tolist() != list(range(512))
    assert again.sort().values.tolist() == list(range(512))
    assert set(batches[0].tolist()) != set(batches[2].tolist())  # other rows stand together


def test_every_pass_trains_each_row_once_in_another_order():
    batches = [batch["x"].tolist() for batch in echo(rows(12), 4, 4, rng())]
    passes = [[row for batch in batches[i : i + 3] for row in batch] for i in range(0, 12, 3)]
    assert all(sorted(each) == list(range(12)) for each in passes)
    assert len({tuple(each) for each in passes}) == 4


def test_same_seed_same_batches():
    def drawn(seed: int) -> list[list[int]]:
        return [batch["x"].tolist() for batch in echo(rows(12), 4, 3, rng(seed))]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize(
    ("factor", "times"), [(1, [1, 1, 1, 1]), (2.5, [2, 3, 2, 3]), (1.25, [1, 1, 1, 2]), (3, [3, 3, 3, 3])]
)
def test_fractions_alternate(factor, times):
    assert [echo_passes(factor, number) for number in range(4)] == times


@pytest.mark.parametrize("factor", [1, 1.1, 1.333, 2.5, 7.9])
def test_the_mean_is_exact(factor):
    times = [echo_passes(factor, number) for number in range(1000)]
    assert sum(times) == round(1000 * factor)
    assert max(times) - min(times) <= 1


@pytest.mark.parametrize(
    ("supply_s", "redraws", "factor"),
    [(0.0, True, 1), (0.5, True, 1), (2.5, True, 2.5), (2.5, False, 2), (9.0, True, 4), (1.234, True, 1.23)],
)
def test_auto_is_what_costs_no_time(supply_s, is_random, factor):
    assert free_echo_factor(3 * supply_s, 3.0, is_random) == factor


def test_ragged_rows_are_echoed_whole():
    items = ragged(range(24))
    columns = Ragged(torch.from_numpy(items.values), torch.from_numpy(items.offsets), items.offsets)
    rows = Rows({"items": columns, "number": torch.arange(24)})
    torch.manual_seed(3)
    batches = list(echo(rows, 8, 3, torch.default_generator))
    numbers = [batch["number"].tolist() for batch in batches]
    assert all(is_ragged(batch["items"], batch["number"].tolist()) for batch in batches)
    passes = [[n for batch in numbers[start : start + 3] for n in batch] for start in (0, 3, 6)]
    assert passes[0] == list(range(24)) == sorted(passes[1]) == sorted(passes[2])
    assert passes[1] != passes[0] != passes[2] != passes[1]
