"""The engine trains the weights of a plain loop, bit for bit.

The loop follows docs/data-path.md and train.py with NumPy and torch: no threads, no tiers, no processes, no
checkpoints. It takes the workloads, which are the user's, and the blocks of a file from the project, and nothing else.
"""

import signal
from collections.abc import Iterator
from math import cos, pi
from pathlib import Path
from typing import Any
from unittest.mock import patch

import h5py
import numpy as np
import pytest
import torch
import train as script
from torch import Tensor, nn

import workloads
from fastgpu.feed import open_splits
from fastgpu.process.config import Config, LoaderConfig, Optim
from fastgpu.process.config_loader import load_config
from fastgpu.process.world import World
from fastgpu.rows.rows import Ragged, RaggedArray, Rows
from support import PROJECT
from support.ranks import ALONE, in_world
from support.runs import at_call, signalled, train_rank, weights_of

CANONICAL_RANKS = 8


def seed_of(*entropy: int, key: tuple[int, ...] = ()) -> np.random.SeedSequence:
    return np.random.SeedSequence(entropy, spawn_key=key)


def torch_seed(*key: int, seed: int) -> int:
    return int(seed_of(seed, key=key).generate_state(1, np.uint64)[0])


def plan_pools(cfg: Config, block_rows: np.ndarray, epoch: int) -> Iterator[np.ndarray]:
    """The row numbers of each pool, (batches, rows of a batch): blocks are shuffled, then the rows of each pool."""
    seed, size, pool_batches = cfg.run.seed, cfg.data.batch_size, cfg.data.pool_batches
    stops = np.cumsum(block_rows)
    blocks = np.arange(len(stops), dtype=np.int32)
    np.random.default_rng(seed_of(seed, epoch)).shuffle(blocks)
    rows = np.concatenate([np.arange(stops[block] - block_rows[block], stops[block]) for block in blocks])
    bounds = np.arange(CANONICAL_RANKS + 1) * len(rows) // CANONICAL_RANKS
    rows_each = size // CANONICAL_RANKS
    n_batches = len(rows) // CANONICAL_RANKS // rows_each
    for number, first in enumerate(range(0, n_batches, pool_batches)):
        n_rows = min(pool_batches, n_batches - first) * rows_each
        shares = []
        for rank, bound in enumerate(bounds[:-1]):
            rng = np.random.default_rng(seed_of(seed, epoch, key=(rank, number)))
            share = np.empty(n_rows, np.int64)
            share[rng.permutation(n_rows)] = rows[bound + first * rows_each :][:n_rows]
            shares.append(share.reshape(-1, rows_each))
        yield np.concatenate(shares, axis=1)


def plan_steps(cfg: Config, pools: list[np.ndarray], epoch: int, rank: int, n_ranks: int) -> Iterator[np.ndarray]:
    """The row numbers of each step of a rank: of each pool, and of its echoes, in which each canonical rank
    shuffles its own rows again."""
    for number, pool in enumerate(pools):
        yield from np.split(pool, n_ranks, axis=1)[rank]
        shares = np.split(pool, CANONICAL_RANKS, axis=1)
        rngs = [torch.Generator() for _ in shares]
        for canonical_rank, rng in enumerate(rngs):
            rng.manual_seed(torch_seed(epoch, number, canonical_rank, 1, seed=cfg.run.seed))
        n_before = epoch * len(pools) + number
        n_passes = int((n_before + 1) * cfg.data.echo) - int(n_before * cfg.data.echo)
        for _ in range(n_passes - 1):
            orders = [torch.randperm(share.size, generator=rng) for share, rng in zip(shares, rngs, strict=True)]
            echoed = [share.ravel()[order].reshape(share.shape) for share, order in zip(shares, orders, strict=True)]
            yield from np.split(np.concatenate(echoed, axis=1), n_ranks, axis=1)[rank]


def read_all(path: str, fields: dict[str, str]) -> dict[str, np.ndarray | RaggedArray]:
    """All rows of `file.h5::/group`: {field: array, or the items of each row}."""
    name, _, group = path.partition("::")
    columns: dict[str, np.ndarray | RaggedArray] = {}
    with h5py.File(name) as file:
        for field, where in fields.items():
            column = file[f"{group}/{where}"]
            is_sparse = isinstance(column, h5py.Group)
            columns[field] = RaggedArray(column["indices"][:], column["indptr"][:]) if is_sparse else column[:]
    return columns


def cut_windows(cfg: Config, epoch: int) -> dict[str, np.ndarray]:
    """All windows of an epoch, in the order of the files, as slices of h5py: {field: (windows, steps, *shape)}."""
    length, stride = cfg.data.window, cfg.data.stride or cfg.data.window
    windows: dict[str, list[np.ndarray]] = {name: [] for name in cfg.data.fields}
    named = [path.partition("::") for path in cfg.data.train]
    with h5py.File(named[0][0]) as file:
        groups = [file[group] for _, _, group in named]
        n_places = [len(group[next(iter(cfg.data.fields.values()))]) - length + 1 for group in groups]
        shifts = np.random.default_rng(seed_of(cfg.run.seed, epoch, key=(0, 0, 0))).integers(n_places)
        for group, places, shift in zip(groups, n_places, shifts.tolist(), strict=True):
            n_windows = -(-places // stride)
            for number in range(n_windows):
                start = (number * places + shift) // n_windows
                for name, where in cfg.data.fields.items():
                    windows[name].append(group[where][start : start + length])
    return {name: np.stack(each) for name, each in windows.items()}


def take(columns: dict[str, Any], numbers: np.ndarray) -> Rows:
    """Copies of the rows with these numbers."""
    taken: dict[str, Tensor | Ragged] = {}
    for name, column in columns.items():
        if isinstance(column, RaggedArray):
            rows = [column.values[column.offsets[n] : column.offsets[n + 1]] for n in numbers]
            offsets = np.cumsum([0, *map(len, rows)], dtype=np.int32)
            taken[name] = Ragged(torch.from_numpy(np.concatenate(rows)), torch.from_numpy(offsets), offsets)
        else:
            taken[name] = torch.from_numpy(column[numbers])
    return Rows(taken)


def rate(share: float, optim: Optim) -> float:
    """Linear warm-up, then a cosine to 0."""
    after_warmup = max(0.0, share - optim.warmup_share) / (1 - optim.warmup_share)
    return optim.lr * min(1.0, share / optim.warmup_share) * 0.5 * (1 + cos(pi * after_warmup))


def train_plainly(cfg: Config, n_ranks: int = 1) -> dict[str, dict[str, Tensor]]:
    """The weights at the end, and their average: {"model": ..., "ema": ...}. Each rank has a replica of the model."""
    source, sets = open_splits(cfg.data, LoaderConfig(), cfg.run.seed)
    columns = {} if cfg.data.window else read_all(cfg.data.train, cfg.data.fields)
    workload = workloads.make(cfg, source, sets)
    optim, seed = cfg.optim, cfg.run.seed
    replicas = []
    optimizers = []
    for _ in range(n_ranks):
        torch.manual_seed(seed)
        model = workload.model().to(memory_format=torch.channels_last)
        decayed = [each for each in model.parameters() if each.ndim >= 2]
        others = [each for each in model.parameters() if each.ndim < 2]
        groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": others, "weight_decay": 0.0}]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, betas=(optim.momentum, 0.999), fused=True)
        if optim.name == "sgd":
            optimizer = torch.optim.SGD(groups, momentum=optim.momentum, nesterov=True, fused=True)
        replicas.append(model)
        optimizers.append(optimizer)
    average = {name: value.clone() for name, value in replicas[0].state_dict().items()}
    n_steps = 0
    for epoch in range(cfg.train.epochs):
        if cfg.data.window:
            columns = cut_windows(cfg, epoch)
        pools = list(plan_pools(cfg, source.block_rows, epoch))
        steps = list(zip(*(plan_steps(cfg, pools, epoch, rank, n_ranks) for rank in range(n_ranks)), strict=True))
        for step, numbers_of_ranks in enumerate(steps):
            for rank, (model, numbers) in enumerate(zip(replicas, numbers_of_ranks, strict=True)):
                rng = torch.default_generator.manual_seed(torch_seed(epoch, step, rank, seed=seed))
                batch = workload.transform(take(columns, numbers), rng)
                for part in batch.batches(len(batch) // optim.accumulation_steps):
                    (workload.loss(model, part) / optim.accumulation_steps).backward()
            for parameters in zip(*(model.parameters() for model in replicas), strict=True):
                mean = torch.stack([parameter.grad / n_ranks for parameter in parameters]).sum(0)
                for parameter in parameters:
                    parameter.grad.copy_(mean)
            for model, optimizer in zip(replicas, optimizers, strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = rate((epoch * len(steps) + step + 0.5) / (cfg.train.epochs * len(steps)), optim)
                nn.utils.clip_grad_norm_(model.parameters(), optim.clip_grad_norm)
                optimizer.step()
                optimizer.zero_grad()
            decay = min(cfg.train.ema, n_steps / (n_steps + 9))
            n_steps += 1
            for name, value in replicas[0].state_dict().items():
                average[name] = average[name].lerp(value, 1 - decay) if value.is_floating_point() else value.clone()
    return {"model": replicas[0].state_dict(), "ema": average}  # whose running statistics all ranks get


DIGITS = """
workload: images
data: {train: "digits.h5::/train", val: "digits.h5::/val", fields: {images: images, labels: labels}, batch_size: 64}
model: {width: 8, flip: true, crop_padding: 1}
"""
INTERACTIONS = """
workload: recsys
data:
  train: interactions-train.h5
  val: interactions-val.h5
  fields: {items: items}
  val_fields: {items: items, held_out: held_out}
  batch_size: 200
model: {hidden_dim: 32, latent_dim: 8}
"""
SERIES = """
workload: minimal
data: {train: ["series.h5::/a", "series.h5::/b"], val: "series.h5::/c", fields: {x: x, y: y}, batch_size: 32}
model: {hidden_dim: 16}
"""
SHORT = ("data.pool_batches=3", "train.precision=fp32", "dist.device=cpu", "train.epochs=2")
CASES = {
    # what is trained: (config, ranks, the step after which a run is stopped and resumed, more words)
    "digits, echoed, resumed": (DIGITS, 1, 37, ("data.echo=2.5",)),
    "digits, accumulated, averaged": (DIGITS, 1, 30, ("optim.accumulation_steps=2", "train.ema=0.9")),
    "digits, sgd, clipped": (DIGITS, 1, 0, ("optim.name=sgd", "optim.clip_grad_norm=0.1", "data.tier=disk")),
    "digits, two ranks": (DIGITS, 2, 5, ("data.echo=1.5", "optim.accumulation_steps=2")),
    "interactions": (INTERACTIONS, 1, 20, ("data.echo=2",)),
    "windows": (SERIES, 1, 20, ("data.window=16", "data.stride=3", "data.echo=1.5", "data.tier=disk")),
    "windows, whole steps": (SERIES, 1, 9, ("data.window=40", "optim.accumulation_steps=2", "train.ema=0.9")),
    "windows, two ranks": (SERIES, 2, 11, ("data.window=16", "data.stride=5", "data.tier=host")),
    "interactions, two ranks": (INTERACTIONS, 2, 0, ("data.tier=disk", "loader.num_readers=2")),
}


def write_series(path: Path) -> None:
    """Groups a, b and c of different length: x, float32 (steps, 3), in compressed chunks, and y, (steps,)."""
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, n_steps in (("a", 9000), ("b", 5000), ("c", 700)):
            x = rng.standard_normal((n_steps, 3), np.float32)
            file.create_dataset(f"{name}/x", data=x, chunks=(100, 3), compression="gzip")
            file[f"{name}/y"] = np.cumsum(x[:, 0]) % 3


def train_until(world: World, stop_at: int, *words: str) -> int | str:
    """A rank of train.py, which gets a signal before this step. 0: it gets none."""
    with patch.object(script, "train_step", at_call(stop_at, script.train_step, signalled(signal.SIGTERM))):
        return train_rank(world, *words)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_of_plain_loop(tmp_path, monkeypatch, case):
    config, n_ranks, stopped_at, more = CASES[case]
    words = ("run.name=a", "run.resume=auto", *SHORT, *more)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(config)
    write_series(tmp_path / "series.h5")
    for path in (PROJECT / "data").glob("*.h5"):
        (tmp_path / path.name).symlink_to(path)

    def train_ranks(stop_at: int) -> list[int | str]:
        is_alone = n_ranks == 1
        return [train_until(ALONE, stop_at, *words)] if is_alone else in_world(n_ranks, train_until, stop_at, *words)

    if stopped_at:
        assert train_ranks(stopped_at) == [128 + signal.SIGTERM] * n_ranks
    assert train_ranks(0) == [0] * n_ranks
    plain = train_plainly(load_config([*words]), n_ranks)
    torch.testing.assert_close(weights_of(tmp_path / "runs/a"), plain["model"], rtol=0, atol=0)
    if "train.ema=0.9" in words:
        average = {f"module.{name}": value for name, value in plain["ema"].items()}
        found = weights_of(tmp_path / "runs/a", "ema")
        torch.testing.assert_close({name: found[name] for name in average}, average, rtol=0, atol=0)
