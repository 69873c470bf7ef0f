"""Users and items made up by a known law."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fastgpu.convert.interactions import csr, hide, rows_of
from fastgpu.rows.rows import Ragged, RaggedArray
from fastgpu.storage.arrays import Arrays
from fastgpu.training.ranking import rank

TOPICS, TASTE = 12, 0.05  # of a user: a Dirichlet draw with so small a parameter is one or two topics
POPULARITY, HEAD = 1.6, 110  # power law of the items: exponent, and the rank at which it sets in
SPREAD = 2.0  # of an item's log-popularity between topics
MIN_ITEMS, LENGTHS = 5, 1.15  # of a user; spread of the logarithm of their number
CHUNK_USERS = 4096


def interactions(users: int, items: int, mean_items: float, train_share: float, seed: int) -> dict[str, Arrays]:
    """{"train", "val"}: users who like items, drawn from a known law that a model can learn, and no model can beat.

        p(item | user) = sum over topics of theta[user, topic] phi[topic, item]

    theta: Dirichlet draws. phi: one power law of popularity for all, times log-normal noise a topic. A user's items are
    drawn one after the other without repeats, their number log-normal around `mean_items`: the likelihood of Mult-VAE
    with few latent dimensions. `val` has the attributes popularity_ndcg_at_100 and oracle_ndcg_at_100: what ranking by
    the training users' counts comes to, and ranking by p itself.
    """
    rng = np.random.default_rng(seed)
    phi = (np.arange(items) + 1 + HEAD) ** -POPULARITY * np.exp(SPREAD * rng.standard_normal((TOPICS, items)))
    phi = phi[:, rng.permutation(items)]
    phi /= phi.sum(1, keepdims=True)
    theta = rng.dirichlet(np.full(TOPICS, TASTE), users)
    most = max(MIN_ITEMS, items // 4)
    wanted = np.exp(LENGTHS * rng.standard_normal(users))
    for _ in range(50):  # so that the mean is right although the ends are cut off
        wanted *= mean_items / np.clip(wanted, MIN_ITEMS, most).mean()
    wanted = np.clip(np.rint(wanted), MIN_ITEMS, most).astype(np.int64)
    drawn = [
        _draw(theta[start : start + CHUNK_USERS], phi, wanted[start : start + CHUNK_USERS], rng)
        for start in range(0, users, CHUNK_USERS)
    ]
    rows = np.concatenate([some + number * CHUNK_USERS for number, (some, _) in enumerate(drawn)])
    chosen = np.concatenate([some for _, some in drawn])
    trained = round(train_share * users)
    name, is_train = f"synthetic interactions, seed {seed}", rows < trained
    train = csr(rows[is_train], chosen[is_train], trained)
    rows, chosen = rows[~is_train] - trained, chosen[~is_train]
    hidden = hide(rows, seed)
    val = {
        field: csr(rows[which], chosen[which], users - trained)
        for field, which in (("items", ~hidden), ("held_out", hidden))
    }
    counts = np.bincount(train.values, minlength=items)
    known = {
        "popularity_ndcg_at_100": _ndcg(val, lambda some: np.broadcast_to(counts, (len(theta[trained:][some]), items))),
        "oracle_ndcg_at_100": _ndcg(val, lambda some: theta[trained:][some] @ phi),
    }
    return {"train": rows_of(name, {"items": train}, items, {}), "val": rows_of(name, val, items, known)}


def _draw(theta: np.ndarray, phi: np.ndarray, wanted: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """(users, items) of the draws, users ascending: `wanted` different items each, a few less for the greediest."""
    users, items = len(theta), phi.shape[1]
    topics, of_topic = theta.cumsum(1), phi.cumsum(1)
    keys, missing = np.empty(0, np.int64), wanted.copy()
    for _ in range(12):
        rows = np.repeat(np.arange(users), np.where(missing, 2 * missing + 8, 0))
        if not len(rows):
            break
        topic = (rng.random(len(rows))[:, None] > topics[rows, :-1]).sum(1)
        chosen, points = np.empty(len(rows), np.int64), rng.random(len(rows))
        for number in range(TOPICS):
            mine = topic == number
            chosen[mine] = np.searchsorted(of_topic[number], points[mine] * of_topic[number, -1], "right")
        keys = np.concatenate([keys, rows * items + np.minimum(chosen, items - 1)])
        keys = keys[np.sort(np.unique(keys, return_index=True)[1])]  # each once, in the order of the draws
        keys = keys[np.argsort(keys // items, kind="stable")]
        owner = keys // items
        place = np.arange(len(keys)) - np.searchsorted(owner, np.arange(users))[owner]
        keys = keys[place < wanted[owner]]
        missing = wanted - np.bincount(keys // items, minlength=users)
    return keys // items, keys % items


def _ndcg(val: Mapping[str, RaggedArray], score: Any) -> float:
    """Mean over the users that have something held out. score: slice of users -> (users, items)."""
    total = users = 0.0
    for some in _slices(len(val["items"]), 512):
        seen, held_out = (_ragged(val[field])[some] for field in ("items", "held_out"))
        found = rank(torch.tensor(score(some), dtype=torch.float32), seen, held_out, (), 100)
        total += float((found.ndcg * found.counts).sum())
        users += float(found.counts.sum())
    return total / max(1.0, users)


def _slices(count: int, step: int) -> Iterator[slice]:
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _ragged(rows: RaggedArray) -> Ragged:
    offsets = rows.offsets.astype(np.int32)
    return Ragged(torch.from_numpy(rows.values), torch.from_numpy(offsets), offsets)
