"""How well scores rank what a user held out: Recall@k and NDCG@k, on the device, without a host sync.

As Liang et al. (arXiv:1802.05814) define them, for a user with the held-out items h and the k best-scored others:
    Recall@k = hits among the k / min(k, |h|)
    NDCG@k   = sum over hits of 1 / log2(1 + rank), divided by that of a ranking with all hits first

Shapes: B users, I items.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgpu.rows.rows import Ragged


class Ranking(NamedTuple):
    """Metrics of each user; those without held-out items have none, and must not count."""

    recall: Mapping[int, Tensor]
    """{k: (B,)}"""
    ndcg: Tensor
    """(B,)"""
    counts: Tensor
    """(B,) bool: the user has something held out."""


def rank(scores_BI: Tensor, seen: Ragged, held_out: Ragged, recall_at: Sequence[int], ndcg_at: int) -> Ranking:
    """Rank the items that a user has not seen. seen, held_out: item numbers, each user's all different.

    Where there are fewer items than k, all of them are ranked. The scores of seen items are overwritten.
    """
    users, items = scores_BI.shape
    scores_BI[seen.rows, seen.values] = -torch.inf
    is_held_BI = torch.zeros_like(scores_BI, dtype=torch.bool)
    is_held_BI[held_out.rows, held_out.values] = True
    best = scores_BI.topk(min(items, max((ndcg_at, *recall_at))), dim=1).indices
    hits = is_held_BI.gather(1, best).to(scores_BI.dtype)
    held_B = held_out.offsets.diff()
    recall = {k: hits[:, :k].sum(1) / held_B.clamp(1, k) for k in recall_at}
    gain = 1 / torch.arange(2, ndcg_at + 2, dtype=scores_BI.dtype, device=scores_BI.device).log2()
    ideal_B = gain.cumsum(0)[held_B.clamp(1, ndcg_at) - 1]
    hits = hits[:, :ndcg_at]
    return Ranking(recall, hits @ gain[: hits.shape[1]] / ideal_B, held_B > 0)
