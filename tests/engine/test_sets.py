"""Several validation sets in one run: their metrics, the set that decides, what they share, and a resume."""

import json
import signal
import threading
from pathlib import Path

import h5py
import pytest
import torch

from fastgpu.feed import PrefetchLoader
from fastgpu.report.results import read_run, summary
from support.ranks import in_world
from support.runs import at_call, build, metrics_of, newest, same_weights, signalled, train, train_rank, val_points
from workloads import minimal

SETS = "data.val={day: rows.h5::/val, night: rows.h5::/night}"
THREE = "data.val={day: rows.h5::/val, night: rows.h5::/night, third: [rows.h5::/val]}"


@pytest.fixture(autouse=True)
def night(folder) -> None:
    """A second set of 60 rows, on which the model gets worse while it learns."""
    with h5py.File("rows.h5", "r+") as file:
        file["night/x"] = file["train/x"][:60]
        file["night/y"] = -file["train/y"][:60]


def errors_of(run: Path, tag: str) -> list[float]:
    """The values of a metric of a run, of all validations."""
    return [point[tag] for point in metrics_of(run) if tag in point]


def best_of(run: Path) -> dict[str, object]:
    """The model.json of the best checkpoint."""
    card: dict[str, object] = json.loads((newest(run, "best") / "model.json").read_text())
    return card


def test_sets_have_the_metrics_that_each_has_alone(folder):
    for name in ("val", "night"):
        train(f"run.name={name}", f"data.val=rows.h5::/{name}")
    train("run.name=both", SETS)
    run = folder / "runs/both"
    assert same_weights(folder / "runs/val", run)
    assert not val_points(run)
    for tag, alone in (("val/day/mse", "val"), ("val/night/mse", "night")):
        assert errors_of(run, tag) == errors_of(folder / "runs" / alone, "val/mse") != []


@pytest.mark.parametrize(("best", "name"), [("mse", "day/mse"), ("day/mse", "day/mse"), ("night/mse", "night/mse")])
def test_sets_the_first_or_the_named_one_decides(folder, monkeypatch, capsys, best, name):
    monkeypatch.setattr(minimal.Workload, "best", (best, "lower"))
    train(SETS)
    run, (decides, _) = folder / "runs/a", name.split("/")
    card = best_of(run)
    assert card["metrics"][name] == min(errors_of(run, f"val/{name}"))
    assert card["epoch"] == {"day": 3, "night": 1}[decides]
    assert (card["val_rows"].keys(), card["n_val_rows"]) == ({"day", "night"}, {"day": 100, "night": 60})
    n_rows = {"day": 100, "night": 60}[decides]
    printed = capsys.readouterr().out
    assert f"warning: the best checkpoint is chosen on {n_rows} validation rows" in printed
    assert "val/day/mse " in printed.splitlines()[-2]
    assert summary(read_run(run))[f"best {name}"] == card["metrics"][name]


def test_sets_are_validated_again_after_a_signal(folder, monkeypatch):
    train("run.name=whole", SETS)
    with monkeypatch.context() as patch:  # in the second of four validations: in the second set
        score = at_call(2 * 4 + 2 + 1, minimal.Workload.score, signalled(signal.SIGTERM))
        patch.setattr(minimal.Workload, "score", score)
        assert train(SETS) == 128 + signal.SIGTERM
    assert train("run.resume=auto", SETS) == 0
    whole, run = folder / "runs/whole", folder / "runs/a"
    assert same_weights(whole, run)
    for tag in ("val/day/mse", "val/night/mse"):
        assert errors_of(run, tag) == errors_of(whole, tag)


def test_sets_other_than_the_deciding_one_may_change(folder, monkeypatch, capsys):
    train(SETS, "train.epochs=1")
    with h5py.File("rows.h5", "r+") as file:
        file["night/y"][:] = 0
    train("run.resume=auto", SETS, "train.epochs=2", "optim.lr=1e-9")
    progress = json.loads((newest(folder / "runs/a") / "state.json").read_text())["progress"]
    assert progress["metric"].startswith("day/mse (lower) on ")
    train("run.resume=auto", "data.val={day: rows.h5::/night, night: rows.h5::/val}", "train.epochs=3")
    other = json.loads((newest(folder / "runs/a") / "state.json").read_text())["progress"]
    assert other["metric"] != progress["metric"]
    assert other["best_validation"] == 3  # of the only validation on these rows


@pytest.mark.parametrize("tier", ["disk", "host"])
def test_sets_share_the_memory_and_the_threads_of_one(tier):
    n_bytes = {}
    for name, words in (("one", ()), ("three", (THREE,))):
        before = threading.active_count()
        parts = build("data.pool_batches=3", f"data.tier={tier}", "loader.num_readers=4", *words)
        memory = {}  # that of all pools
        for loader in parts.val_loaders.values():
            assert isinstance(loader, PrefetchLoader)
            for epoch in range(2):
                n_rows = 0
                for pool in loader.pools(epoch):
                    n_rows += pool.plan.n_real_rows
                    storages = [column.untyped_storage() for column in pool.rows.columns.values()]
                    memory |= {storage.data_ptr(): storage.nbytes() for storage in storages}
                assert n_rows == len(loader.source)
        n_bytes[name] = sum(memory.values())
        # What one set has read ahead of its next validation is kept by its threads.
        assert threading.active_count() - before == {"one": 5, "three": 0}[name]
        parts.close()
    assert n_bytes["three"] == n_bytes["one"] > 0


def test_sets_may_have_one_share_of_the_training_rows():
    parts = build("data.val={held_out: 10%, night: rows.h5::/night}")
    assert {tag: len(rows) for tag, rows in parts.splits.val.items()} == {"val/held_out": 70, "val/night": 60}
    assert len(parts.splits.train) == 630
    parts.close()


@pytest.mark.slow
def test_sets_on_two_ranks(folder):
    train("run.name=one", SETS, "train.epochs=1")
    assert in_world(2, train_rank, SETS, "run.name=two", "train.epochs=1") == [0, 0]
    for tag in ("val/day/mse", "val/night/mse"):
        ours, expected = (errors_of(folder / "runs" / name, tag) for name in ("two", "one"))
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    other = SETS.replace("night:", "dusk:")
    first, second = in_world(2, train_rank_with, other, "run.name=three")
    assert (
        first
        == second
        == "data.val is val/day, val/dusk on rank 1 and val/day, val/night on rank 0; all ranks need the same"
    )


def train_rank_with(world, of_last: str, *words: str) -> int | str:
    """One rank of a run in which the last rank has another word."""
    return train_rank(world, of_last if world.rank else SETS, *words)
