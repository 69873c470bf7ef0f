"""What ranking without a model finds: the scores that a model has to beat.

    python docs/examples/baselines.py data/last-train.h5 data/last-test.h5

Both files come from `convert.py events` with a column of times. `popularity` ranks all items by their number in the
training rows. `followers` first ranks the items that came next after the user's last item in the training rows, by how
often they did, and then the other items by popularity. Items that a user has are left out. The metrics, as in
the workloads:

    Recall@k = number of held-out items among the k best / min(k, number of held-out items)
    NDCG@k   = sum over these of 1 / log2(1 + rank) / the same if all held-out items came first
"""

import sys
from itertools import pairwise

import h5py
import numpy as np
from scipy import sparse

K = 10


def read_rows(file: h5py.File, name: str) -> list[np.ndarray]:
    """The items of each user."""
    items = file[name]["indices"][:]
    return [items[start:stop] for start, stop in pairwise(file[name]["indptr"][:].tolist())]


def metrics(scores_I: np.ndarray, seen: np.ndarray, held_out: np.ndarray) -> tuple[float, float]:
    """Recall@K and NDCG@K of one user."""
    scores_I = scores_I.astype(float)
    scores_I[seen] = -np.inf
    best = np.argsort(-scores_I, kind="stable")[:K]
    gains = 1 / np.log2(np.arange(K) + 2)
    hits = np.isin(best, held_out)
    n_found = min(K, len(held_out))
    return hits.sum() / n_found, gains[: len(best)][hits].sum() / gains[:n_found].sum()


def main(train_path: str, test_path: str) -> None:
    """Print the scores of both baselines."""
    with h5py.File(train_path) as file:
        rows = read_rows(file, "items")
        n_items = int(file["items"].attrs["shape"][1])
    with h5py.File(test_path) as file:
        users = list(zip(read_rows(file, "items"), read_rows(file, "held_out"), strict=True))
    users = [(seen, held_out) for seen, held_out in users if len(held_out)]

    counts_I = np.bincount(np.concatenate(rows), minlength=n_items)
    before = np.concatenate([row[:-1] for row in rows])
    after = np.concatenate([row[1:] for row in rows])
    follow_II = sparse.csr_array((np.ones(len(before)), (before, after)), (n_items, n_items))

    found: dict[str, list[tuple[float, float]]] = {"popularity": [], "followers": []}
    rarity_I = counts_I / (1 + counts_I.sum())  # below 1: it decides between equal counts
    for seen, held_out in users:
        followers_I = follow_II[[seen[-1]]].toarray()[0] if len(seen) else np.zeros(n_items)
        found["popularity"].append(metrics(counts_I, seen, held_out))
        found["followers"].append(metrics(followers_I + rarity_I, seen, held_out))
    print(f"{len(users):,} users of {test_path}")
    for name, values in found.items():
        recall, ndcg = np.mean(values, axis=0)
        print(f"{name:10}  recall_at_{K} {recall:.4f}  ndcg_at_{K} {ndcg:.4f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
