"""How well scores rank the items that a user held out: Recall@k and NDCG@k, on the device, without a host sync.

Definitions of Liang et al. (arXiv:1802.05814), for a user with the held-out items h, and the k best of the items that
the user has not seen:
    Recall@k = hits among the k / min(k, |h|)
    NDCG@k   = sum over hits of 1 / log2(1 + rank), divided by that of a ranking with all hits first

Shapes: B users, I items, K best-scored items.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fastgpu.rows.rows import Ragged


class Ranking(NamedTuple):
    """The metrics of each user. They mean nothing for users without held-out items, who must not count."""

    recall: Mapping[int, Tensor]
    """{k: (B,)}"""
    ndcg: Tensor
    """(B,)"""
    has_held_out: Tensor
    """(B,) bool: whether the user has held-out items."""
    n_lost: Tensor
    """Held-out items that are among those seen, or stand there twice: they are never found."""


def rank(scores_BI: Tensor, seen: Ragged, held_out: Ragged, *, recall_at: Sequence[int], ndcg_at: int) -> Ranking:
    """Rank the items that each user has not seen. If there are fewer than k of them, all are ranked.

    seen, held_out: B rows of item numbers, all different within a row. The scores of seen items are overwritten.
    """
    _, n_items = scores_BI.shape
    # To assign a Python number at indices, torch would copy it to the device, and the host would wait for that.
    scores_BI.index_put_((seen.rows, seen.values), scores_BI.new_full((), -torch.inf))
    is_held_out_BI = torch.zeros_like(scores_BI, dtype=torch.bool)
    is_held_out_BI.index_put_((held_out.rows, held_out.values), is_held_out_BI.new_ones(()))
    n_lost = len(held_out.values) - is_held_out_BI.sum() + is_held_out_BI[seen.rows, seen.values].sum()
    n_best = min(n_items, max((ndcg_at, *recall_at)))
    best_BK = scores_BI.topk(n_best, dim=1).indices
    hits_BK = is_held_out_BI.gather(1, best_BK).to(scores_BI.dtype)
    n_held_out_B = held_out.offsets.diff()
    recall = {k: hits_BK[:, :k].sum(1) / n_held_out_B.clamp(1, k) for k in recall_at}
    ranks = torch.arange(1, ndcg_at + 1, dtype=scores_BI.dtype, device=scores_BI.device)
    gain_K = 1 / (1 + ranks).log2()
    ideal_B = gain_K.cumsum(0)[n_held_out_B.clamp(1, ndcg_at) - 1]
    hits_BK = hits_BK[:, :ndcg_at]
    ndcg_B = (hits_BK * gain_K[: hits_BK.shape[1]]).sum(1) / ideal_B  # autocast would round a matrix product
    return Ranking(recall, ndcg_B, n_held_out_B > 0, n_lost)
