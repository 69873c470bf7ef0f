"""Users and items: rows of any length, through predict.py."""

import io
import json
import shutil

import h5py
import numpy as np
import predict as script
import pytest
import scipy.sparse
import train
import yaml
from harness import ALONE, ROOT, metrics_of

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    """The folder of a run of one epoch on the rows that the project comes with."""
    data = {"train": str(tmp_path / "train.h5"), "val": str(ROOT / "data/interactions-val.h5")}
    shutil.copy(ROOT / "data/interactions-train.h5", data["train"])
    with h5py.File(data["train"], "r+") as file:
        file.attrs["item_ids"] = np.arange(1000)
    data |= {"fields": {"items": "items"}, "val_fields": {"items": "items", "held_out": "held_out"}, "batch_size": 600}
    config = {"workload": "recsys", "data": data, "model": {"hidden_dim": 8, "latent_dim": 4}, "train": {"epochs": 1}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    monkeypatch.chdir(tmp_path)
    train.train(train.build(load_config(["run.name=a", "dist.device=cpu"]), ALONE), ALONE)
    return tmp_path / "runs/a"


def run(*arguments) -> str:
    terminal = io.StringIO()
    script.main(script.parse([str(each) for each in arguments]), ALONE, terminal)
    return terminal.getvalue()


def test_predictions_and_metrics_of_a_checkpoint(run_folder, tmp_path):
    val = ROOT / "data/interactions-val.h5"
    logged = metrics_of(run_folder)[-1]
    metrics = json.loads(run(run_folder, "--evaluate", val, "--json"))
    assert metrics == {name: logged[f"val/{name}"] for name in ("ndcg_at_100", "recall_at_20", "recall_at_50")}
    run(run_folder, val, "-o", tmp_path / "x.jsonl", "--top", 3)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert len(lines) == 600
    assert all(
        len(set(line["items"])) == 3 and line["scores"] == sorted(line["scores"], reverse=True) for line in lines
    )


def test_ragged_rows_are_exported_for_two_users_or_more(run_folder, tmp_path, capsys):
    run(run_folder, "--export", tmp_path / "model.pt2")
    assert "takes two or more rows" in capsys.readouterr().out


def test_more_items_than_there_are_cannot_be_ranked(run_folder):
    val = ROOT / "data/interactions-val.h5"
    with pytest.raises(UserError, match="--top is 1001, but .*allowed is 1 to 1000"):
        run(run_folder, val, "--top", 1001)


def test_users_of_another_conversion_are_refused(run_folder, tmp_path):
    """Their items have other numbers, so the predictions would be those of other items."""
    other = tmp_path / "other.h5"
    shutil.copy(ROOT / "data/interactions-val.h5", other)
    with h5py.File(other, "r+") as file:
        file.attrs["item_ids"] = np.arange(1000)[::-1]
    with pytest.raises(
        UserError, match=r"INPUT: number 0 of the items is 999 in .*other.h5 and 0 in the training rows"
    ):
        run(run_folder, other)
    (tmp_path / "r.csv").write_text("user,item,stars\n")
    with pytest.raises(UserError, match="r.csv is not an HDF5 or NumPy file; the model takes items"):
        run(run_folder, tmp_path / "r.csv")
    scipy.sparse.save_npz(tmp_path / "m.npz", scipy.sparse.eye_array(1000, format="csr"))
    with pytest.raises(UserError, match="m.npz is a sparse matrix; convert it once: .* arrays items=.*m.npz x.h5"):
        run(run_folder, tmp_path / "m.npz")


def test_a_field_says_which_user_a_line_is_of(run_folder, tmp_path):
    """Rows lie in random order, so the number of a row says nothing about its user."""
    path = tmp_path / "named.h5"
    shutil.copy(ROOT / "data/interactions-val.h5", path)
    users = np.random.default_rng(0).permutation(600) + 10_000
    with h5py.File(path, "r+") as file:
        file["user"] = users
        file["pair"] = np.zeros((600, 2))
    run(run_folder, path, "-o", "x.csv", "--id", "user", "--batch-size", 64)
    header, *lines = (tmp_path / "x.csv").read_text().splitlines()
    assert header.startswith("row,user,items_0,")
    assert [tuple(map(int, line.split(",")[:2])) for line in lines] == list(enumerate(users.tolist()))
    plain = run(run_folder, path).splitlines()
    assert [line.split(",")[2:] for line in lines] == [line.split(",")[1:] for line in plain[1:]]
    for field, message in (
        ("names", "names is missing; there is .*, user"),
        ("items", r"--id is items, int32 .*; it should be one number for each row"),
        ("pair", r"--id is pair, float64 \(N, 2\); it should be one number for each row"),
    ):
        with pytest.raises(UserError, match=message):
            run(run_folder, path, "--id", field)
