"""train.on_nan: what the step and a run do about batches that make NaN of the gradients."""

import copy
import json
from pathlib import Path
from typing import Any

import h5py
import pytest
import torch
import train as script
from harness import ALONE, in_world, metrics_of, run_train, same_weights, weights_of
from test_train_step import make_batch, make_parts
from torch import nn
from torch.utils._pytree import tree_leaves
from train import Parts, train_step

from fastgpu.process.config import Dist, OnNan, Optim, Precision
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from fastgpu.training.ema import AveragedModel
from fastgpu.training.parallel import share_gradients
from fastgpu.training.step import mixed_precision, prepare_to_skip
from workloads import minimal

# ---------------------------------------------------------------------------------------------- one step


def parts_with_norms(settings: Optim, precision: Precision = "fp32", on_nan: OnNan = "skip_step") -> Parts:
    """A model with running statistics and an average of its weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    parts = make_parts(model, settings, precision)
    parts = parts._replace(ema=AveragedModel(model, 0.9))
    parts = parts._replace(precision=mixed_precision(precision, torch.device("cpu"), on_nan))
    prepare_to_skip(parts.optimizer, parts.precision, "torch")
    return parts


def poisoned(value: float = torch.nan) -> Rows:
    batch = make_batch(seed=99)
    batch["x"][3] = value
    return batch


def train_on(parts: Parts, batches: list[Rows]) -> list[float]:
    return [train_step(parts, batch, 0.1).item() for batch in batches]


def assert_same(one: Any, other: Any) -> None:
    """Two states are equal to the last bit."""
    for ours, theirs in zip(tree_leaves(one), tree_leaves(other), strict=True):
        assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


def assert_same_parts(one: Parts, other: Parts) -> None:
    for name, part in one.state.items():
        assert_same(part.state_dict(), other.state[name].state_dict())


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("accumulation_steps", [1, 3])
def test_finite_steps_are_the_same_whatever_the_policy(name, precision, accumulation_steps):
    settings = Optim(name=name, accumulation_steps=accumulation_steps)
    stops, skips = (parts_with_norms(settings, precision, on_nan) for on_nan in ("stop", "skip_step"))
    batches = [make_batch(seed=seed) for seed in range(4)]
    assert train_on(stops, batches) == train_on(skips, batches)
    assert_same_parts(stops, skips)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
@pytest.mark.parametrize(("accumulation_steps", "clip_grad_norm"), [(1, 1.0), (3, 0.0)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_skipped_step_is_one_that_was_never_made(name, accumulation_steps, clip_grad_norm, value):
    """Weights, running statistics, momentum and average are those of the other batches. The first step is skipped."""
    settings = Optim(name=name, accumulation_steps=accumulation_steps, clip_grad_norm=clip_grad_norm)
    clean, met = parts_with_norms(settings), parts_with_norms(settings)
    batches = [make_batch(seed=seed) for seed in range(3)]
    losses = train_on(clean, batches)
    bad = poisoned(value)
    seen = train_on(met, [bad, batches[0], bad, bad, *batches[1:], bad])
    assert [loss for loss in seen if loss == loss] == losses
    assert len(seen) - len(losses) == 4
    assert_same_parts(clean, met)


def test_steps_that_the_search_for_the_scale_skips_are_not_averaged():
    """In fp16 and whatever train.on_nan is: they changed nothing."""
    parts = parts_with_norms(Optim(), "fp16", "stop")
    train_on(parts, [make_batch(seed=0)])
    parts.precision.scaler.update(2.0**120)  # the gradients overflow
    before = copy.deepcopy(parts.state["ema"].state_dict())
    train_on(parts, [make_batch(seed=1)])
    after = parts.state["ema"].state_dict()
    assert after["n_averaged"] == before["n_averaged"] == 1
    assert torch.equal(after["module.0.weight"], before["module.0.weight"])
    assert parts.model_to_use is parts.ema.module


def test_a_first_step_that_is_skipped_in_fp16_leaves_no_value_in_the_momentum():
    """torch.empty would: what is in the memory by chance."""
    parts = parts_with_norms(Optim(name="sgd"), "fp16", "stop")
    train_on(parts, [poisoned()])
    assert all(not state["momentum_buffer"].any() for state in parts.optimizer.state.values())


def test_kernels_that_make_the_host_wait_are_refused():
    parts = make_parts(nn.Linear(2, 2), Optim(fused="none"))
    precision = mixed_precision("fp32", torch.device("cpu"), "skip_step")
    with pytest.raises(UserError, match="train.on_nan is skip_step, but optim.fused is none; .* use optim.fused=torch"):
        prepare_to_skip(parts.optimizer, precision, "none")


def skip_on_one_rank(world: World) -> list[list]:
    parts = parts_with_norms(Optim())
    parts = parts._replace(ddp=share_gradients(parts.model, Dist(), world))
    batches = [make_batch(seed=2), poisoned() if world.rank else make_batch(seed=3), make_batch(seed=4)]
    losses = train_on(parts, batches)
    return [[loss == loss for loss in losses], [parameter.tolist() for parameter in parts.model.parameters()]]


@pytest.mark.slow
def test_all_ranks_skip_what_one_rank_meets():
    first, second = in_world(2, skip_on_one_rank)
    assert first == second
    assert first[0] == [True, False, True]


# ---------------------------------------------------------------------------------------------- a run


def train(*overrides: str) -> int:
    return script.train(load_config(["log.to=[]", *overrides]), ALONE)


def poison(patch: pytest.MonkeyPatch, *calls: int) -> None:
    """Make NaN of the rows of the steps with these numbers."""
    n_calls = 0

    def transform(workload: minimal.Workload, batch: Rows, rng: torch.Generator) -> Rows:
        nonlocal n_calls
        n_calls += 1
        return Rows({**batch.columns, "x": batch["x"] * torch.nan}) if n_calls in calls else batch

    patch.setattr(minimal.Workload, "transform", transform)


def state_of(run: Path) -> dict[str, Any]:
    newest = max(run.glob("checkpoints/last-*"))
    return json.loads((newest / "state.json").read_text())["progress"]


def assert_finite(run: Path) -> None:
    assert all(value.isfinite().all() for value in weights_of(run).values())
    assert all(point["train/loss"] < 100 for point in metrics_of(run) if "train/loss" in point)


@pytest.mark.parametrize("more", [("data.echo=1.5",), ("optim.accumulation_steps=4", "train.ema=0.9"), ()])
def test_a_run_leaves_out_the_steps_with_nan(folder, monkeypatch, capsys, more):
    poison(monkeypatch, 1, 2, 17, 30)
    train("train.on_nan=skip_step", "train.epochs=2", "log.every_steps=2", "run.checkpoint_every_steps=1", *more)
    run = folder / "runs/a"
    assert_finite(run)
    assert state_of(run)["skipped_steps"] == 4
    counts = [point["train/skipped_steps"] for point in metrics_of(run) if "train/skipped_steps" in point]
    assert counts[0] == 2
    assert counts == sorted(counts)
    assert counts[-1] == 4
    assert "train/loss" not in metrics_of(run)[0]  # no step of this interval was made
    printed = capsys.readouterr().out
    assert "  skipped steps" in printed  # in the summary
    assert "nan" not in printed


def test_the_count_of_skipped_steps_goes_on_in_a_resumed_run(folder, monkeypatch):
    poison(monkeypatch, 3, 25)
    options = ("train.on_nan=skip_step", "log.every_steps=100")
    train(*options, "train.epochs=1")
    assert state_of(folder / "runs/a")["skipped_steps"] == 1
    train(*options, "train.epochs=2", "run.resume=auto")
    assert state_of(folder / "runs/a")["skipped_steps"] == 2


def test_a_run_that_skips_every_step_ends(folder, monkeypatch):
    poison(monkeypatch, *range(10, 1000))
    with pytest.raises(UserError, match=r"the last \d+ steps until step 3\d were skipped; lower optim.lr \(0.003\)"):
        train("train.on_nan=skip_step")


def test_the_policies_train_the_same_weights_where_all_is_finite(folder):
    for on_nan in ("stop", "skip_step", "rewind"):
        train(f"run.name={on_nan}", f"train.on_nan={on_nan}", "train.epochs=1", "data.echo=1.5", "train.ema=0.9")
    for name in ("model", "step", "ema"):
        for on_nan in ("skip_step", "rewind"):
            assert_same(*(weights_of(folder / "runs" / run, name) for run in ("stop", on_nan)))


@pytest.mark.parametrize(  # met by a report, and by the check before a save
    ("every_steps", "met"), [((5, 8), 15), ((100_000, 4), 12)]
)
@pytest.mark.parametrize("background", ["false", "true"])
def test_a_run_goes_back_to_its_last_checkpoint_and_on_with_the_next_rows(
    folder, monkeypatch, capsys, every_steps, met, background
):
    poison(monkeypatch, 11, 33)
    log_every, save_every = every_steps
    options = (f"log.every_steps={log_every}", f"run.checkpoint_every_steps={save_every}", "train.ema=0.9")
    train("train.on_nan=rewind", f"run.save_in_background={background}", "train.epochs=2", *options)
    run = folder / "runs/a"
    assert_finite(run)
    assert (state_of(run)["rewinds"], state_of(run)["step"]) == (2, 42)  # no row came twice
    lines = [line for line in capsys.readouterr().out.splitlines() if "back to the weights of step" in line]
    assert lines[0].endswith(
        f"at step {met}: back to the weights of step 8, without the last {met - 8} steps ({32 * (met - 8)} rows)"
    )
    assert len(lines) == 2


def test_the_weights_after_a_rewind_are_those_of_the_checkpoint(folder, monkeypatch):
    """Steps 9 to 12 of the run with NaN never happened: training the other steps gives the same weights."""
    options = ("run.checkpoint_every_steps=4", "train.epochs=1", "log.every_steps=4")
    with monkeypatch.context() as patch:
        poison(patch, 10)
        train("run.name=rewound", "train.on_nan=rewind", *options)
    step = script.train_step
    calls = 0

    def train_step_but_for_four(*arguments: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return torch.tensor(0.5) if 9 <= calls <= 12 else step(*arguments)

    monkeypatch.setattr(script, "train_step", train_step_but_for_four)
    train("run.name=plain", *options)
    assert same_weights(folder / "runs/rewound", folder / "runs/plain")


def test_without_a_checkpoint_there_is_nothing_to_go_back_to(folder, monkeypatch):
    poison(monkeypatch, 3)
    with pytest.raises(UserError, match="the loss is nan at step 5, and there is no checkpoint to go back to; lower"):
        train("train.on_nan=rewind")


@pytest.mark.parametrize("policy", ["stop", "skip_step", "rewind"])
def test_rows_that_are_not_finite_are_named(folder, capsys, policy):
    """Not the learning rate is wrong then."""
    with h5py.File(folder / "rows.h5", "a") as file:
        bad = [350] if policy == "stop" else range(700) if policy == "skip_step" else [0, 350]
        file["train/x"][bad, 2] = torch.inf
    row = r"x of rows.h5::/train has NaN or infinity in \d+ of \d+ rows around this step, such as row \d+"
    messages = {
        "stop": "the loss is nan at step",
        "skip_step": "the last 20 steps",
        "rewind": "the loss is nan at step",
    }
    with pytest.raises(UserError, match=f"{messages[policy]}.*; {row}: .*; lower optim.lr"):
        train(f"train.on_nan={policy}", "train.epochs=1")


def test_rewinds_without_progress_end(folder, monkeypatch):
    poison(monkeypatch, *range(22, 100))
    message = "the loss is nan at step 37, after 3 rewinds without a new checkpoint; lower optim.lr"
    with pytest.raises(UserError, match=message):
        train("train.on_nan=rewind", "log.every_steps=4")


@pytest.mark.slow
def test_two_ranks_go_back_together(folder):
    options = ("run.resume=auto", "log.every_steps=5", "run.checkpoint_every_steps=4", "train.precision=bf16")
    assert run_train("train.epochs=1", *options, ranks=2, cwd=folder).returncode == 0
    with h5py.File(folder / "rows.h5", "a") as file:
        file["train/x"][350] = torch.nan  # in one batch of an epoch, on one rank
    done = run_train("train.epochs=2", "train.on_nan=rewind", *options, ranks=2, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "x of rows.h5::/train has NaN or infinity in 1 of " in done.stdout  # one rank has found it
    assert_finite(folder / "runs/a")
    assert state_of(folder / "runs/a")["rewinds"] == 1
