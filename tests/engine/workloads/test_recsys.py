"""The workload `recsys`: autoencoders on sparse rows against the same on dense rows."""

import math
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from contract import check_workload
from torch import Tensor
from train import train_step

from fastgpu.predict.answers import to_columns
from fastgpu.process.config import Optim
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Ragged, Rows
from fastgpu.storage.store import HDF5Dataset, open_store
from support.ranks import needs_gpu, no_host_sync
from support.rows import open_feed
from support.runs import parts_of_step
from workloads.recsys import AutoEncoder, Workload, multinomial_nll, rank

ITEMS = 60
USERS = 40


def make_options(**changes: Any) -> Workload.Options:
    """A small variational model."""
    return Workload.Options(**({"hidden_dim": 24, "latent_dim": 8, "kl_anneal_steps": 20} | changes))


def ragged_of(rows: list[list[int]]) -> Ragged:
    offsets = np.cumsum([0, *map(len, rows)]).astype(np.int32)
    return Ragged(torch.tensor([i for row in rows for i in row], dtype=torch.int32), torch.from_numpy(offsets), offsets)


def user_rows(items: list[list[int]], **more: list[list[int]]) -> Rows:
    return Rows({name: ragged_of(rows) for name, rows in {"items": items, **more}.items()})


def draw_users(seed: int = 0, n_users: int = USERS) -> list[list[int]]:
    """The items of each user, up to 19 different ones."""
    rng = np.random.default_rng(seed)
    return [rng.permutation(ITEMS)[: rng.integers(0, 20)].tolist() for _ in range(n_users)]


def to_dense(rows: Rows, values: Tensor) -> Tensor:
    """(B, I): `values` (N,) where a user has an item, 0 elsewhere."""
    items = rows["items"]
    x_BI = torch.zeros(len(items), ITEMS, dtype=values.dtype)
    x_BI[items.rows.long(), items.values.long()] = values
    return x_BI


def sparse_loss(model: AutoEncoder, rows: Rows) -> tuple[Tensor, Tensor]:
    logits, penalty = model(rows["items"].values, rows["items"].offsets)
    return multinomial_nll(logits, rows["items"]) + penalty, logits


def dense_loss(model: AutoEncoder, rows: Rows) -> tuple[Tensor, Tensor]:
    """The same as it is usually written, on dense rows, with the random numbers of the sparse one."""
    options = model.options
    ones_N = torch.ones(len(rows["items"].values), dtype=model.weight_IH.dtype)
    x_BI = to_dense(rows, ones_N)
    keep_N = ones_N
    if model.training:
        keep_N = (torch.rand_like(ones_N) >= options.dropout) / (1 - options.dropout)
    code = model.encode(F.normalize(x_BI) * to_dense(rows, keep_N) @ model.weight_IH + model.bias_H)
    penalty = torch.zeros(())
    if options.variational:
        code, log_var = code.chunk(2, 1)
        posterior = torch.distributions.Normal(code, torch.exp(log_var / 2))
        divergence = torch.distributions.kl_divergence(posterior, torch.distributions.Normal(0, 1))
        if model.training:
            model.passes += 1
            code = posterior.mean + posterior.stddev * torch.randn_like(code)
        penalty = options.kl_weight * min(1, model.passes.item() / options.kl_anneal_steps) * divergence.sum(1).mean()
    else:
        code = torch.tanh(code)
    logits = model.output(model.decode(code))
    return -(F.log_softmax(logits, 1) * x_BI).sum(1).mean() + penalty, logits


@pytest.mark.parametrize("variational", [True, False], ids=["vae", "dae"])
@pytest.mark.parametrize("hidden_dim", [24, 0])
@pytest.mark.parametrize(("is_training", "passes"), [(True, 4), (True, 500), (False, 4)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_recsys_is_the_same_on_dense_rows(dtype, error, is_training, passes, hidden_dim, variational):
    """The weight of the divergence rises with the passes, up to a limit."""
    model = AutoEncoder(ITEMS, make_options(variational=variational, hidden_dim=hidden_dim))
    model = model.to(dtype).train(is_training)
    rows = user_rows(draw_users())
    results = []
    for loss_of in (sparse_loss, dense_loss):
        torch.manual_seed(7)
        model.zero_grad()
        model.passes.fill_(passes)
        loss, logits = loss_of(model, rows)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        results.append([logits.detach(), loss.detach(), model.passes.clone(), *gradients])
    torch.testing.assert_close(*results, rtol=error, atol=error)
    assert results[0][1] > 1


class LossOnly:
    """Loss and scores of the workload without its data."""

    loss = Workload.loss
    score = Workload.score


def write_users(path: Path, n_users: int, *, seed: int = 0, n_empty: int = 0) -> HDF5Dataset:
    """Write a file with `items` and `held_out`, of 200 items, and open it.

    There are two kinds of users: one likes the first half of the items, the other one the second half.
    """
    rng = np.random.default_rng(seed)
    liked = [rng.permutation(100)[:25] + 100 * (user % 2) for user in range(n_users)]
    n_seen = rng.integers(5, 20, n_users)
    items = [row[:n] for row, n in zip(liked, n_seen, strict=True)]
    held_out = [row[n:] for row, n in zip(liked, n_seen, strict=True)]
    held_out[:n_empty] = [held_out[0][:0]] * n_empty
    with h5py.File(path, "w") as file:
        for name, rows in (("items", items), ("held_out", held_out)):
            file[f"{name}/indptr"] = np.cumsum([0, *map(len, rows)])
            file[f"{name}/indices"] = np.concatenate(rows)
            file[name].attrs["shape"] = (n_users, 200)
    return open_store("data.train", str(path), {"items": "items", "held_out": "held_out"})


def all_rows(store: HDF5Dataset) -> Rows:
    feed = open_feed(store, BlockSampler(store.block_rows, len(store), seed=None, drop_last=False), "device")
    return next(feed.pools(0)).rows


@pytest.mark.parametrize("variational", [True, False], ids=["vae", "dae"])
def test_recsys_fits_the_protocol(tmp_path, capsys, variational):
    train_rows = write_users(tmp_path / "train.h5", 60)
    val = write_users(tmp_path / "val.h5", 50, seed=1, n_empty=9)
    workload = Workload(make_options(variational=variational), train_rows, val)
    assert "warning: 9 of 50 users of" in capsys.readouterr().out  # the others are told
    rows = all_rows(val)
    check_workload(workload, all_rows(train_rows), rows)
    sums = workload.score(workload.model().eval(), rows)
    assert int(sums["users"]) == 41
    metrics = workload.metrics(sums)
    assert list(metrics) == ["ndcg_at_100", "recall_at_20", "recall_at_50"]
    assert all(0 < value < 1 for value in metrics.values())
    assert not capsys.readouterr().out


def test_recsys_predicts_the_best_new_items():
    model = AutoEncoder(ITEMS, make_options()).eval()
    users = [[3, 5, 7], [], list(range(ITEMS - 4))]
    rows = user_rows(users)
    logits_BI, _ = model(rows["items"].values, rows["items"].offsets)
    predicted = to_columns(Workload.predict(None, model, rows), {}, None, every=False)
    assert np.shape(predicted["items"]) == np.shape(predicted["scores"]) == (3, 10)
    for row, user in enumerate(users):
        others = [item for item in logits_BI[row].argsort(descending=True).tolist() if item not in user][:10]
        assert predicted["items"][row] == others + [-1] * (10 - len(others))
        torch.testing.assert_close(torch.tensor(predicted["scores"][row][: len(others)]), logits_BI[row, others])


def test_recsys_warns_of_items_that_cannot_be_found(capsys):
    """Known items are never ranked, and an item is found once."""
    rows = user_rows([[1, 2], [3], [], [4]], held_out=[[2, 5], [3], [6, 7, 7], []])
    sums = LossOnly().score(AutoEncoder(ITEMS, make_options()).eval(), rows)
    Workload.metrics(None, sums)
    assert capsys.readouterr().out == (
        "warning: 3 held-out items are among the items of their user, or twice: these cannot be found, so the metrics "
        "are too low; leave them out\n"
    )


def by_hand(scores: list[float], seen: list[int], held: list[int], k: int) -> tuple[float, float]:
    """(recall, ndcg) by sorting, one user at a time."""
    order = [i for i in sorted(range(len(scores)), key=lambda i: -scores[i]) if i not in seen][:k]
    gains = [1 / math.log2(place + 2) for place, item in enumerate(order) if item in held]
    ideal = sum(1 / math.log2(place + 2) for place in range(min(k, len(held))))
    return len(gains) / min(k, len(held)), sum(gains) / ideal


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("items", "ks"), [(150, (20, 50, 100)), (30, (5, 20, 100))], ids=["many", "fewer than k"])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_recsys_metrics_are_those_by_hand(seed, items, ks, dtype, error):
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


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_recsys_on_a_gpu_never_waits(precision):
    device = torch.device("cuda", 0)
    workload, model = LossOnly(), AutoEncoder(ITEMS, make_options()).to(device)
    parts = parts_of_step(workload, model, Optim(lr=0.1, accumulation_steps=2), precision)
    rows = user_rows(draw_users(), held_out=draw_users(1)).to(device)

    def train_and_score() -> None:
        train_step(parts, rows, 0.1)
        with torch.no_grad():
            workload.score(model, rows)

    train_and_score()
    with no_host_sync():
        train_and_score()
