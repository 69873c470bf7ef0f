import re
import shutil
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import convert, no_host_sync, run_train
from test_ranking import ragged_of
from torch import Tensor

from fastgpu.feed.tiers import make_feed
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from fastgpu.training.optim import make_optimizer
from fastgpu.training.parallel import wrap
from fastgpu.training.step import Step
from workloads.recsys import AutoEncoder, Workload, multinomial_nll

ITEMS, USERS = 60, 40
SETTINGS = {"hidden": 24, "latent": 8, "dropout": 0.5, "variational": True, "kl_weight": 0.2, "kl_anneal_steps": 20}
CONFIG = ("--config", "configs/recsys.yaml", "model.hidden_dim=16", "model.latent_dim=8", "train.epochs=2")


def rows_of(users: list[list[int]], **more: list[list[int]]) -> Rows:
    return Rows({"items": ragged_of(users)} | {name: ragged_of(rows) for name, rows in more.items()})


def users(seed: int = 0, count: int = USERS) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.permutation(ITEMS)[: rng.integers(0, 20)].tolist() for _ in range(count)]


def dense(rows: Rows, values: Tensor) -> Tensor:
    """(B, I): `values` (N,) where a user has an item, 0 elsewhere."""
    items = rows["items"]
    x = torch.zeros(len(items), ITEMS, dtype=values.dtype)
    x[items.rows.long(), items.values.long()] = values
    return x


def sparse_loss(model: AutoEncoder, rows: Rows) -> tuple[Tensor, Tensor]:
    """Loss and logits."""
    logits, penalty = model(rows["items"].values, rows["items"].offsets)
    return multinomial_nll(logits, rows["items"]) + penalty, logits


def dense_loss(m: AutoEncoder, rows: Rows) -> tuple[Tensor, Tensor]:
    """The same as it is usually written, on dense rows, with the random numbers of the sparse one."""
    dtype = m.weight_IH.dtype
    count = len(rows["items"].values)
    x = dense(rows, torch.ones(count, dtype=dtype))
    coins = (torch.rand(count, dtype=dtype) >= m.dropout) / (1 - m.dropout) if m.training and m.dropout else 1
    h = F.linear(F.normalize(x) * dense(rows, coins * torch.ones(count, dtype=dtype)), m.weight_IH.T, m.bias_H)
    code, penalty = m.encode(h), 0.0
    if m.variational:
        mean, log_var = code.chunk(2, 1)
        code = mean
        if m.training:
            m.passes += 1
            code = mean + torch.exp(log_var / 2) * torch.randn_like(mean)
        prior, found = torch.distributions.Normal(0, 1), torch.distributions.Normal(mean, torch.exp(log_var / 2))
        weight = m.kl_weight * min(1, m.passes.item() / m.kl_anneal_steps)
        penalty = weight * torch.distributions.kl_divergence(found, prior).sum(1).mean()
    else:
        code = torch.tanh(code)
    logits = m.output(m.decode(code))
    return -(F.log_softmax(logits, 1) * x).sum(1).mean() + penalty, logits


LOSSES = {"sparse": sparse_loss, "dense": dense_loss}


@pytest.fixture(params=[(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=["f64", "f32"])
def exact(request) -> tuple[torch.dtype, float]:
    return request.param


@pytest.mark.parametrize("variational", [True, False], ids=["vae", "dae"])
@pytest.mark.parametrize("hidden", [24, 0])
@pytest.mark.parametrize("training", [True, False])
def test_forward_loss_and_gradients_are_those_of_dense_rows(exact, variational, hidden, training):
    dtype, error = exact
    model = AutoEncoder(ITEMS, **SETTINGS | {"variational": variational, "hidden": hidden}).to(dtype).train(training)
    rows, found = rows_of(users()), []
    for form in LOSSES:
        torch.manual_seed(7)
        model.zero_grad()
        model.passes.fill_(4)
        loss, logits = LOSSES[form](model, rows)
        loss.backward()
        found.append((logits.detach(), loss.detach(), *(p.grad.clone() for p in model.parameters())))
    for sparse, full in zip(*found, strict=True):
        torch.testing.assert_close(sparse, full, rtol=error, atol=error)
    assert found[0][1] > 1


@pytest.mark.parametrize("variational", [True, False], ids=["vae", "dae"])
def test_thirty_steps_of_training_are_those_of_dense_rows(exact, variational):
    dtype, error = exact
    models = []
    for form in LOSSES:
        torch.manual_seed(1)
        model = AutoEncoder(ITEMS, **SETTINGS | {"variational": variational}).to(dtype)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0, eps=1e-4)
        losses, rows = [], rows_of(users())
        for number in range(30):
            torch.manual_seed(number)
            loss, _ = LOSSES[form](model, rows)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        models.append((torch.stack(losses), *(p.detach() for p in model.parameters())))
    for sparse, full in zip(*models, strict=True):
        torch.testing.assert_close(sparse, full, rtol=error, atol=error)
    assert models[0][0][-5:].mean() < models[0][0][:5].mean()


def test_the_loss_has_the_gradient_that_differences_have():
    rows = ragged_of([[1, 4], [], [0, 2, 3]])
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda z: multinomial_nll(z, rows), (logits,))


def test_the_weight_of_the_divergence_rises_with_the_passes():
    model, rows = AutoEncoder(ITEMS, **SETTINGS | {"dropout": 0.0}), rows_of(users())["items"]
    found = []
    for passes in (0, 9, 19, 500):
        torch.manual_seed(0)
        model.passes.fill_(passes)
        found.append(model(rows.values, rows.offsets)[1].item())
    assert found[1] == pytest.approx(10 * found[0], rel=1e-5)
    assert found[2] == pytest.approx(20 * found[0], rel=1e-5) == found[3]
    assert "passes" in model.state_dict()


def test_parts_of_a_batch_give_the_gradient_of_the_whole():
    """Accumulation cuts ragged batches too; each part's mean counts by its rows."""
    rows, found = rows_of(users(3)), []
    for accumulation in (1, 4):
        torch.manual_seed(0)
        model = AutoEncoder(ITEMS, **SETTINGS | {"dropout": 0.0, "variational": False}).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = Step(model, partial(Workload.loss, None), optimizer, "fp32", torch.device("cpu"), accumulation)
        found.append((step(rows, 0.1), *(p.detach() for p in model.parameters())))
    for whole, parts in zip(*found, strict=True):
        torch.testing.assert_close(whole, parts, rtol=1e-12, atol=1e-12)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """interactions-train.h5 and interactions-val.h5 of 600 users, and a folder `configs` beside `data`."""
    folder = tmp_path_factory.mktemp("made")
    (folder / "data").mkdir()
    result = convert(
        "synthetic",
        folder / "data/interactions.h5",
        "--kind",
        "interactions",
        "--rows",
        "600",
        "--items",
        "200",
        "--mean-items",
        "20",
        "--split",
        "0.8",
    )
    assert result.returncode == 0, result.stderr
    return folder


def paths(made: Path) -> list[str]:
    return [f"data.{part}={made}/data/interactions-{part}.h5" for part in ("train", "val")]


def stores(made: Path, **fields: str) -> tuple:
    names = {"items": "items"}, {"items": "items", "held_out": "held_out"} | fields
    return tuple(
        open_store(f"data.{part}", f"{made}/data/interactions-{part}.h5", chosen)
        for part, chosen in zip(("train", "val"), names, strict=True)
    )


def test_scores_are_sums_over_the_users_that_count(made):
    workload = Workload(*stores(made), **SETTINGS)
    model = workload.model().eval()
    order = BlockSampler(stores(made)[1].block_rows, 120, shuffle=False, drop_last=False)
    feed = make_feed(stores(made)[1], order, "disk", torch.device("cpu"), 1)
    (pool,) = feed.pools(0)
    count, sums = workload.score(model, pool.rows)
    parts = [workload.score(model, batch) for batch in pool.rows.batches(7)]
    assert count == sum(part[0] for part in parts) == (stores(made)[1].lengths["held_out"] > 0).sum()
    for whole, *some in zip(sums, *(part[1] for part in parts), strict=True):
        torch.testing.assert_close(whole, torch.stack(some).sum())
        assert 0 < whole < count
    feed.close()


def test_rows_of_another_kind_are_one_line(made, tmp_path):
    train, val = stores(made)
    with pytest.raises(UserError, match="data.val_fields has items; the recsys workload needs held_out of"):
        Workload(train, train, **SETTINGS)
    convert("synthetic", tmp_path / "other.h5", "--kind", "interactions", "--rows", "60", "--items", "150")
    other = open_store("data.train", str(tmp_path / "other-train.h5"), {"items": "items"})
    with pytest.raises(UserError, match="of 200 items, those of .*other-train.h5 of 150; convert them together"):
        Workload(other, val, **SETTINGS)
    val.lengths["held_out"][:3] = 0
    assert "3 of 120 users of" in Workload(train, val, **SETTINGS).note
    val.lengths["held_out"][:] = 0
    with pytest.raises(UserError, match="no user has anything held out, so nothing can be scored"):
        Workload(train, val, **SETTINGS)
    model = AutoEncoder(ITEMS, **SETTINGS)
    with pytest.raises(UserError, match="dp, which cuts a batch into equal parts, but its rows are ragged: use ddp"):
        wrap(World(0, 1, 1, torch.device("cpu")), model, "dp", True)


def weights_of(made: Path, run: str) -> dict[str, Tensor]:
    newest = max((made / "runs" / run / "checkpoints").glob("last-*"))
    return torch.load(newest / "model.pt", weights_only=True)


def last_line(output: str) -> str:
    return re.findall(r"epoch 2/2 (val/ndcg_at_100 [\d.]+, val/recall_at_20 [\d.]+, val/recall_at_50 [\d.]+)", output)[
        -1
    ]


@pytest.mark.slow
def test_every_tier_and_number_of_ranks_trains_the_same(made):
    shown, base = [], [*CONFIG, *paths(made), f"run.folder={made}/runs", "data.batch_size=48", "data.echo=1.5"]
    for tier in ("device", "host", "disk"):
        result = run_train(*base, f"data.tier={tier}", f"run.name={tier}", "data.pool_batches=3")
        assert result.returncode == 0, result.stderr
        shown.append(last_line(result.stdout))
    assert shown[0] == shown[1] == shown[2]
    for name, value in weights_of(made, "device").items():
        assert torch.equal(value, weights_of(made, "host")[name])
        assert torch.equal(value, weights_of(made, "disk")[name])
    result = run_train(*base, "run.name=ranks", ranks=2)
    assert result.returncode == 0, result.stderr
    assert last_line(result.stdout)


@pytest.mark.slow
def test_a_run_that_was_stopped_goes_on_to_the_same_weights(made):
    base = [*CONFIG, *paths(made), f"run.folder={made}/runs", "data.batch_size=48", "data.tier=disk"]
    base += ["data.pool_batches=3", "run.checkpoint_every_steps=1"]
    assert run_train(*base, "run.name=whole").returncode == 0
    shutil.copytree(made / "runs/whole", made / "runs/again")
    *_, inside, last = sorted((made / "runs/again/checkpoints").glob("last-*"))
    assert int(inside.name[-9:]) % 10  # not the end of an epoch
    shutil.rmtree(last)
    result = run_train(*base, "run.name=again", "run.resume=auto")
    assert result.returncode == 0, result.stderr
    assert f"at step {int(inside.name[-9:])}" in result.stdout
    for name, value in weights_of(made, "whole").items():
        assert torch.equal(value, weights_of(made, "again")[name])


@pytest.mark.slow
def test_the_recipe_beats_popularity_and_not_the_law_that_made_the_data(made, tmp_path):
    """The gate: NDCG@100 above 1.4 x that of popularity, and at most that of the known law."""
    result = convert("synthetic", tmp_path / "x.h5", "--kind", "interactions")
    popularity, oracle = map(float, re.findall(r"ndcg_at_100 ([\d.]+)", result.stdout))
    data = [f"data.{part}={tmp_path}/x-{part}.h5" for part in ("train", "val")]
    result = run_train("--config", "configs/recsys.yaml", *data, f"run.folder={tmp_path}/runs")
    assert result.returncode == 0, result.stderr
    found = float(re.findall(r"epoch 30/30 val/ndcg_at_100 ([\d.]+)", result.stdout)[-1])
    assert 1.4 * popularity < found <= oracle


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_on_a_gpu_a_step_on_ragged_rows_never_makes_the_host_wait(precision):
    gpu = torch.device("cuda", 0)
    model, rows = AutoEncoder(ITEMS, **SETTINGS).to(gpu), rows_of(users()).to(gpu)
    step = Step(
        model, partial(Workload.loss, None), make_optimizer(model, "adamw", 0.1, 0.0, 0.9), precision, gpu, 2, 1.0
    )
    step(rows, 0.1)
    with no_host_sync():
        step(rows, 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_loss_and_scores_are_those_of_the_host():
    model = AutoEncoder(ITEMS, **SETTINGS).double().eval()
    rows = rows_of(users(1), held_out=users(2))
    found = []
    for device in ("cpu", "cuda"):
        model, here = model.to(device), rows.to(torch.device(device))
        scores = Workload.score(None, model, here)
        found.append([Workload.loss(None, model, here).detach(), scores[0], *scores[1]])
    for host, device in zip(*found, strict=True):
        torch.testing.assert_close(device.cpu(), host, rtol=1e-6, atol=1e-6)
