"""Made-up users and items, drawn from a known law that a model can learn and no model can beat.

    python tools/make_interactions.py TARGET.h5 --compression gzip

makes TARGET-train.h5 and TARGET-val.h5, such as data/interactions.h5 of the generated project.

    p(item | user) = sum over topics of theta[user, topic] phi[topic, item]

theta: Dirichlet draws. phi: one power law of popularity for all topics, times log-normal noise for each topic. The
items of a user are drawn without replacement; their number is log-normal. This is the likelihood
of Mult-VAE (Liang et al., arXiv:1802.05814) with few latent dimensions.

Shapes: U users, T topics, I items, N draws.
"""

import argparse
from pathlib import Path

import facts  # noqa: F401  makes the project importable
import numpy as np
import torch

from fastgpu.convert.recsys.interactions import UserRows, draw_hidden, make_csr
from fastgpu.convert.writing import Writing, write_files
from fastgpu.dataset.items import Columns
from fastgpu.rows.rows import Ragged, RaggedArray
from fastgpu.storage.arrays import ArrayDataset
from workloads.recsys import rank

N_TOPICS = 12
TASTE = 0.05
"""Parameter of the Dirichlet distribution. With so small a one, a user has one or two topics."""
POPULARITY_EXPONENT = 1.6
POPULARITY_HEAD = 110
"""Rank at which the power law sets in."""
TOPIC_SPREAD = 2.0
"""Standard deviation of the logarithm of an item's popularity between topics."""
MIN_ITEMS = 5
"""Minimum number of items of a user."""
LENGTH_SPREAD = 1.15
"""Standard deviation of the logarithm of the number of items of a user."""
CHUNK_USERS = 4096
"""Users that are drawn at a time."""
SCORED_USERS = 512
"""Users that are scored at a time."""
NDCG_AT = 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("target", type=Path, help="TARGET.h5")
    add("--users", type=int, default=6000, help="number of users; default: 6,000")
    add("--items", type=int, default=1000, help="number of items; default: 1,000")
    add("--mean-items", type=float, default=30, help="mean number of items of a user; default: 30")
    add("--train-share", type=float, default=0.9, help="share of the users to train on; default: 0.9")
    add("--seed", type=int, default=0)
    add("--compression", choices=("none", "gzip"), default="none")
    args = parser.parse_args()
    parts = make_interactions(args.users, args.items, args.mean_items, train_share=args.train_share, seed=args.seed)
    scores = ", ".join(f"{name} {value:.3f}" for name, value in parts["val"].attributes.items())
    print(f"val: {scores}")
    torch.set_num_threads(1)
    write_files(parts, args.target, Writing(seed=args.seed, compression=args.compression, replace=True))


def make_interactions(
    n_users: int, n_items: int, mean_items: float, *, train_share: float, seed: int
) -> dict[str, ArrayDataset]:
    """{"train": users with `items`, "val": users with `items` and `held_out`}.

    mean_items: mean number of items of a user. `val` has the attributes popularity_ndcg_at_100 and oracle_ndcg_at_100:
    the metric of ranking by the counts of the training users, and of ranking by p itself.
    """
    rng = np.random.default_rng(seed)
    phi_TI = _draw_phi(n_items, rng)
    theta_UT = rng.dirichlet(np.full(N_TOPICS, TASTE), n_users)
    lengths_U = _draw_lengths(n_users, n_items, mean_items, rng)
    pairs = []
    for start in range(0, n_users, CHUNK_USERS):
        chunk = slice(start, start + CHUNK_USERS)
        users, items = _draw_items(theta_UT[chunk], phi_TI, lengths_U[chunk], rng)
        pairs.append((users + start, items))
    rows, items = (np.concatenate(column) for column in zip(*pairs, strict=True))

    n_train = round(train_share * n_users)
    is_train = rows < n_train
    train = make_csr(rows[is_train], items[is_train], n_train)
    val_rows = rows[~is_train] - n_train
    val_items, hidden = items[~is_train], draw_hidden(val_rows, seed)
    masks = {"items": ~hidden, "held_out": hidden}
    val = {name: make_csr(val_rows[mask], val_items[mask], n_users - n_train) for name, mask in masks.items()}

    counts_1I = np.bincount(train.values, minlength=n_items)[None]
    scores = {
        f"popularity_ndcg_at_{NDCG_AT}": _mean_ndcg(val, np.ones((n_users - n_train, 1)), counts_1I),
        f"oracle_ndcg_at_{NDCG_AT}": _mean_ndcg(val, theta_UT[n_train:], phi_TI),
    }
    name = f"synthetic interactions, seed {seed}"
    return {"train": UserRows(name, {"items": train}, n_items, {}), "val": UserRows(name, val, n_items, scores)}


def _draw_phi(n_items: int, rng: np.random.Generator) -> np.ndarray:
    """(T, I): the probability of each item in each topic."""
    popularity_I = (np.arange(n_items) + 1 + POPULARITY_HEAD) ** -POPULARITY_EXPONENT
    phi_TI = popularity_I * np.exp(TOPIC_SPREAD * rng.standard_normal((N_TOPICS, n_items)))
    phi_TI = phi_TI[:, rng.permutation(n_items)]
    return phi_TI / phi_TI.sum(1, keepdims=True)


def _draw_lengths(n_users: int, n_items: int, mean_items: float, rng: np.random.Generator) -> np.ndarray:
    """(U,) int64: the number of items of each user."""
    max_items = max(MIN_ITEMS, n_items // 4)
    lengths_U = np.exp(LENGTH_SPREAD * rng.standard_normal(n_users))
    for _ in range(50):  # so that the mean is right although both ends are cut off
        lengths_U *= mean_items / np.clip(lengths_U, MIN_ITEMS, max_items).mean()
    return np.clip(np.rint(lengths_U), MIN_ITEMS, max_items).astype(np.int64)


def _draw_items(
    theta_UT: np.ndarray, phi_TI: np.ndarray, lengths_U: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """(users, items) of the draws, users ascending: lengths_U different items for each; for a few users with very many,
    some less."""
    n_users = len(theta_UT)
    n_items = phi_TI.shape[1]
    topic_ends_UT = theta_UT.cumsum(1)
    item_ends_TI = phi_TI.cumsum(1)
    keys = np.empty(0, np.int64)  # user * n_items + item
    missing_U = lengths_U.copy()
    for _ in range(12):
        users_N = np.repeat(np.arange(n_users), np.where(missing_U, 2 * missing_U + 8, 0))
        if not len(users_N):
            break
        topics_N = (rng.random(len(users_N))[:, None] > topic_ends_UT[users_N, :-1]).sum(1)
        points_N = rng.random(len(users_N))
        items_N = np.empty(len(users_N), np.int64)
        for topic in range(N_TOPICS):
            in_topic = topics_N == topic
            ends_I = item_ends_TI[topic]
            items_N[in_topic] = np.searchsorted(ends_I, points_N[in_topic] * ends_I[-1], "right")
        keys = np.concatenate([keys, users_N * n_items + np.minimum(items_N, n_items - 1)])
        keys = keys[np.sort(np.unique(keys, return_index=True)[1])]  # each once, in the order of the draws
        keys = keys[np.argsort(keys // n_items, kind="stable")]
        owners = keys // n_items
        place_of_key = np.arange(len(keys)) - np.searchsorted(owners, np.arange(n_users))[owners]
        keys = keys[place_of_key < lengths_U[owners]]
        missing_U = lengths_U - np.bincount(keys // n_items, minlength=n_users)
    return keys // n_items, keys % n_items


def _mean_ndcg(val: Columns, theta_UT: np.ndarray, phi_TI: np.ndarray) -> float:
    """Mean NDCG of the scores theta @ phi over the users that have held-out items."""
    items, held_out = (_as_ragged(val[name]) for name in ("items", "held_out"))
    total = 0.0
    n_users = 0.0
    for start in range(0, len(items), SCORED_USERS):
        users = slice(start, min(start + SCORED_USERS, len(items)))
        scores_UI = torch.tensor(theta_UT[users] @ phi_TI, dtype=torch.float32)
        ranking = rank(scores_UI, items[users], held_out[users], recall_at=(), ndcg_at=NDCG_AT)
        total += float((ranking.ndcg * ranking.has_held_out).sum())
        n_users += float(ranking.has_held_out.sum())
    return total / max(1.0, n_users)


def _as_ragged(rows: np.ndarray | RaggedArray) -> Ragged:
    assert isinstance(rows, RaggedArray)
    offsets = rows.offsets.astype(np.int32)
    return Ragged(torch.from_numpy(rows.values), torch.from_numpy(offsets), offsets)


if __name__ == "__main__":
    main()
