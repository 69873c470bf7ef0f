import math

import numpy as np
import pytest
import torch

from fastgpu.rows.rows import Ragged
from fastgpu.training.ranking import rank


def ragged_of(rows: list[list[int]]) -> Ragged:
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return Ragged(torch.tensor([i for row in rows for i in row], dtype=torch.int32), torch.from_numpy(offsets), offsets)


def by_hand(scores: list[float], seen: list[int], held: list[int], k: int) -> tuple[float, float]:
    """(recall, ndcg) by sorting, one user at a time."""
    order = [i for i in sorted(range(len(scores)), key=lambda i: -scores[i]) if i not in seen][:k]
    gains = [1 / math.log2(place + 2) for place, item in enumerate(order) if item in held]
    ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(held))))
    return len(gains) / min(k, len(held)), sum(gains) / ideal


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("items", "ks"), [(150, (20, 50, 100)), (30, (5, 20, 100))], ids=["many", "fewer than k"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_metrics_are_those_of_sorting_by_hand_also_under_autocast(seed, items, ks, dtype, error):
    rng = np.random.default_rng(seed)
    users = [rng.permutation(items).tolist() for _ in range(40)]
    seen = [user[: rng.integers(0, 12)] for user in users]
    held = [user[12 : 12 + rng.integers(0, 18)] for user in users]
    scores = torch.from_numpy(rng.standard_normal((40, items))).to(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        ranking = rank(scores.clone(), ragged_of(seen), ragged_of(held), recall_at=ks[:2], ndcg_at=ks[2])
    assert ranking.has_held_out.tolist() == [bool(items) for items in held]
    assert torch.isfinite(ranking.ndcg).all()
    for user in np.flatnonzero([bool(items) for items in held]):
        arguments = scores[user].tolist(), seen[user], held[user]
        for k in ks[:2]:
            assert ranking.recall[k][user] == pytest.approx(by_hand(*arguments, k)[0], abs=error)
        assert ranking.ndcg[user] == pytest.approx(by_hand(*arguments, ks[2])[1], abs=error)
