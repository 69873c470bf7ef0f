"""predict.py as a user runs it, on models of the three workloads."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import predict as script
import pytest
import torch
import train
import yaml
from harness import ALONE, ROOT, TIMEOUT_S, convert, metrics_of
from PIL import Image

from fastgpu.predict.inputs import open_inputs
from fastgpu.predict.model import find_checkpoint, load_model, make_workload
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.storage.arrays import ArrayDataset
from workloads import minimal

N_ROWS = 100
"""Validation rows of `minimal_run`."""


def run(*arguments: str | Path | int) -> str:
    """`python predict.py` in this process. Returns what it prints to the terminal."""
    terminal = io.StringIO()
    script.main(script.parse([str(each) for each in arguments]), ALONE, terminal)
    return terminal.getvalue()


def start(*arguments: str | Path, program=(str(ROOT / "predict.py"),)) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *program, *map(str, arguments)],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


@pytest.fixture
def rows(minimal_run: Path) -> str:
    """The validation rows, as an argument."""
    return f"{minimal_run.parents[1]}/rows.h5::/val"


@pytest.fixture
def x(minimal_run: Path) -> np.ndarray:
    """The inputs of the validation rows."""
    with h5py.File(minimal_run.parents[1] / "rows.h5") as file:
        return file["val/x"][:]


def check(lines: list[dict], run: Path, x: np.ndarray) -> None:
    """The lines have the predictions of the model for all rows at once, in plain torch."""
    model, _, _ = load_model(find_checkpoint(run))
    expected = model(torch.from_numpy(x)).detach().flatten().tolist()
    assert [int(line["row"]) for line in lines] == list(range(N_ROWS))
    np.testing.assert_allclose([float(line["prediction"]) for line in lines], expected, rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- predictions


def test_every_kind_of_input_gives_the_predictions_of_the_model(tmp_path, minimal_run, rows, x, capsys):
    check(list(csv.DictReader(io.StringIO(run(minimal_run, rows)))), minimal_run, x)
    model, n_rows = capsys.readouterr().out.splitlines()
    assert model.startswith(f"model: {find_checkpoint(minimal_run)}, of epoch 2, mse ")
    assert n_rows == f"{N_ROWS} rows"
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", other=np.zeros(3), x=x)
    with h5py.File(tmp_path / "own.hdf5", "w") as file:
        file["x"] = x
    copy = tmp_path / "copy"  # two files of a checkpoint are enough
    copy.mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(find_checkpoint(minimal_run) / name, copy)
    for number, source in enumerate(("x.npy", "x.npz", "own.hdf5")):
        target = tmp_path / f"{number}.jsonl"
        assert run(copy, tmp_path / source, "-o", target, "--batch-size", 7) == ""
        check([json.loads(line) for line in target.read_text().splitlines()], minimal_run, x)


def test_an_error_leaves_no_output_behind(tmp_path, minimal_run, rows, monkeypatch):
    monkeypatch.setattr(minimal.Workload, "predict", lambda *_: 1 / 0)
    (tmp_path / "x.csv").write_text("old")
    with pytest.raises(ZeroDivisionError):
        run(minimal_run, rows, "-o", tmp_path / "x.csv", "--force", "--batch-size", 7)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.csv": "old"}


@pytest.mark.parametrize("task", [["{rows}", "-o", "{tmp}/a.csv"], ["--export", "{tmp}/a.pt2"]])
def test_nothing_is_replaced_without_force_and_a_folder_never(tmp_path, minimal_run, rows, task):
    words = [word.format(rows=rows, tmp=tmp_path) for word in task]
    target = Path(words[-1])
    target.write_text("old")
    with pytest.raises(UserError, match=f"{target.name} exists; --force"):
        run(minimal_run, *words)
    assert target.read_text() == "old"
    run(minimal_run, *words, "--force")
    assert target.stat().st_size > 3
    target.unlink()
    (target / "inside").mkdir(parents=True)
    with pytest.raises(UserError, match=f"{target.name} exists"):
        run(minimal_run, *words, "--force")
    assert [path.name for path in tmp_path.rglob("*")] == [target.name, "inside"]


@pytest.mark.slow
def test_the_script_prints_rows_alone_and_leaves_nothing_when_it_is_asked_to_end(tmp_path, minimal_run, rows, x):
    check(list(csv.DictReader(start(minimal_run, rows).stdout.splitlines())), minimal_run, x)
    program = f"""
import os, runpy, signal
from workloads import minimal
minimal.Workload.predict = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
runpy.run_path("{ROOT}/predict.py", run_name="__main__")
"""
    done = start(minimal_run, rows, "-o", tmp_path / "x.csv", program=("-c", program))
    assert done.returncode == 143, done.stderr
    assert not list(tmp_path.iterdir())
    done = start(minimal_run, rows, "-o", tmp_path / "none/x.csv")
    assert done.returncode == 2
    assert done.stderr.splitlines()[1].startswith("error: [Errno 2] No such file or directory: ")


# ---------------------------------------------------------------------------------------------- metrics


def test_evaluate_gives_the_metrics_of_the_run_for_any_batch_size(minimal_run, rows):
    logged = [point["val/mse"] for point in metrics_of(minimal_run) if "val/mse" in point]
    last = max(minimal_run.glob("checkpoints/last-*"))
    assert run(last, "--evaluate", rows) == f"mse {logged[-1]:.6g}\n"
    assert {run(minimal_run, "--evaluate", rows, "--batch-size", n) for n in (7, 32, 100)} == {
        f"mse {min(logged):.6g}\n"
    }
    card = json.loads((last / "model.json").read_text())
    assert (card["metrics"], card["epoch"], card["step"]) == ({"mse": logged[-1]}, 2, 20)


def test_labels_are_evaluated_as_the_classes_that_the_model_knows(tmp_path, minimal_run, rows, capsys):
    card = load_model(find_checkpoint(minimal_run)).card
    card["attributes"]["class_names"] = ["cat", "dog"]
    open_inputs([rows], card, ["x", "y"], labels=True)
    told = "has no class_names; its labels 0, 1, 2... are taken for cat, dog as in the training rows"
    assert told in capsys.readouterr().out
    shutil.copy(rows.removesuffix("::/val"), tmp_path)
    with h5py.File(tmp_path / "rows.h5", "r+") as file:
        file["val"].attrs["class_names"] = ["dog", "cat"]
    with pytest.raises(UserError, match="INPUT: number 0 of the labels is dog in .* and cat in the training rows"):
        open_inputs([f"{tmp_path}/rows.h5::/val"], card, ["x", "y"], labels=True)


def test_labels_are_checked_by_the_workload_as_in_training():
    field = {"is_ragged": False, "n_items": None}
    fields = {
        "images": field | {"dtype": "uint8", "shape": [3, 8, 8]},
        "labels": field | {"dtype": "int64", "shape": []},
    }
    card = {"workload": "images", "options": {"width": 4}, "attributes": {"n_classes": 4}, "fields": fields}
    images = np.zeros((2, 3, 8, 8), np.uint8)
    for dtype in (np.int64, np.uint8):
        make_workload(card, ArrayDataset("made up", {"images": images, "labels": np.array([0, 3], dtype)}))
    with pytest.raises(UserError, match=r"made up: labels are . to 9; allowed are 0 to 3"):
        make_workload(card, ArrayDataset("made up", {"images": images, "labels": np.array([0, 9])}))


# ---------------------------------------------------------------------------------------------- export


LOAD = """
import sys
import numpy as np
import torch

program = torch.export.load(sys.argv[1]).module()
x = torch.from_numpy(np.load(sys.argv[2]))
for n in (1, 7, 100):
    print(*program(x[:n]).flatten().tolist())
"""


@pytest.mark.slow
def test_an_exported_program_runs_in_a_fresh_process(tmp_path, minimal_run, x):
    run(minimal_run, "--export", tmp_path / "model.pt2")
    np.save(tmp_path / "x.npy", x)
    done = start(tmp_path / "model.pt2", tmp_path / "x.npy", program=("-c", LOAD))
    expected = load_model(find_checkpoint(minimal_run)).model(torch.from_numpy(x)).detach().flatten().numpy()
    for n, line in zip((1, 7, 100), done.stdout.splitlines(), strict=True):
        np.testing.assert_allclose([float(each) for each in line.split()], expected[:n], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- mistakes


def test_flags_may_stand_before_the_input():
    args = script.parse(["runs/a", "--top", "3", "x.npy", "-o", "x.csv", "y.npy"])
    assert (args.checkpoint, args.inputs, args.top, args.output) == ("runs/a", ["x.npy", "y.npy"], 3, "x.csv")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give INPUT or --export FILE, one of them"),
        ("x.npy --export a.pt2", "one of them"),
        ("x.npy -o a.txt", "-o is a.txt; it should end in .csv or .jsonl"),
        ("x.npy --top 0", "should be at least 1"),
        ("--evaluate x.h5 -o x.csv", "-o, --id, --top and --all are for predictions"),
        ("--export a.pt2 --id user", "-o, --id, --top and --all are for predictions"),
    ],
)
def test_flags_that_do_not_fit_are_told(words, message):
    with pytest.raises(UserError, match=message):
        script.parse(["runs/a", *words.split()])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("{run}/none {rows}", "none is neither a run nor a checkpoint"),
        ("{run} {file}", "rows.h5 has no dataset x; it has train, val"),
        ("{run} none.npy", "none.npy should hold NumPy arrays x of equal length: .*No such file"),
        ("{run} {rows} --top 3", "this workload ranks nothing"),
        ("{run} {rows} --id y", None),
        ("{run} a.png", r"a.png is not an HDF5 file, nor a single NumPy file, with x"),
        ("{run} {tmp}/five.npy", r"x is float32 \(N, 5\); the model was trained on float32 \(N, 6\)"),
        ("{run} {tmp}/double.npy", r"x is float64 \(N, 6\); the model was trained on float32 \(N, 6\)"),
        ("{run} {tmp}/text.npy", "x is <U1"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, minimal_run, rows, words, message):
    np.save(tmp_path / "five.npy", np.zeros((3, 5), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((3, 6)))
    np.save(tmp_path / "text.npy", np.array(["a"]))
    places = {"run": minimal_run, "rows": rows, "file": rows.removesuffix("::/val"), "tmp": tmp_path}
    arguments = words.format(**places).split()
    if message is None:
        assert run(*arguments).startswith("row,y,prediction\n")
        return
    with pytest.raises(UserError, match=message) as caught:
        run(*arguments)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------------------------------------- users and items


@pytest.fixture(scope="module")
def recsys_run(tmp_path_factory) -> Path:
    """The folder of a run of one epoch on the rows that the project comes with; named.h5 has validation rows."""
    folder = tmp_path_factory.mktemp("recsys")
    for name, new in (("train", "train.h5"), ("val", "named.h5")):
        shutil.copy(ROOT / f"data/interactions-{name}.h5", folder / new)
        with h5py.File(folder / new, "r+") as file:
            file.attrs["item_ids"] = np.arange(1000)
            file["user"] = np.arange(len(file["items/indptr"]) - 1)[::-1]
    data = {"train": "train.h5", "val": "named.h5", "fields": {"items": "items"}, "batch_size": 600}
    data["val_fields"] = {"items": "items", "held_out": "held_out"}
    config = {"workload": "recsys", "data": data, "model": {"hidden_dim": 8, "latent_dim": 4}, "train": {"epochs": 1}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        train.train(train.build(load_config(["run.name=a", "dist.device=cpu"]), ALONE), ALONE)
    return folder / "runs/a"


def test_items_for_users(tmp_path, recsys_run):
    val = recsys_run.parents[1] / "named.h5"
    logged = metrics_of(recsys_run)[-1]
    metrics = dict(line.split() for line in run(recsys_run, "--evaluate", val).splitlines())
    assert metrics == {name: f"{logged[f'val/{name}']:.6g}" for name in ("ndcg_at_100", "recall_at_20", "recall_at_50")}
    run(recsys_run, val, "-o", tmp_path / "x.jsonl", "--top", 3, "--id", "user", "--batch-size", 64)
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [(line["row"], line["user"]) for line in lines] == [(row, 599 - row) for row in range(600)]
    for line in lines:
        assert len(set(line["items"])) == 3
        assert line["scores"] == sorted(line["scores"], reverse=True)
        assert line["item_ids"] == line["items"]
    with pytest.raises(UserError, match="--id items has any number of values in a row of .*named.h5"):
        run(recsys_run, val, "--id", "items")
    run(recsys_run, "--export", tmp_path / "model.pt2")
    assert (tmp_path / "model.pt2").exists()


def test_users_of_another_conversion_are_refused(recsys_run, tmp_path):
    """Their items have other numbers, so the predictions would be those of other items."""
    other = tmp_path / "other.h5"
    shutil.copy(recsys_run.parents[1] / "named.h5", other)
    with h5py.File(other, "r+") as file:
        file.attrs["item_ids"] = np.arange(1000)[::-1]
    with pytest.raises(
        UserError, match=r"INPUT: number 0 of the items is 999 in .*other.h5 and 0 in the training rows"
    ):
        run(recsys_run, other)


# ---------------------------------------------------------------------------------------------- photos


@pytest.mark.slow
def test_photos_are_predicted_as_the_rows_that_the_converter_made_of_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(40):
        folder = tmp_path / "photos" / "ab"[number % 2]
        folder.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (20 + number, 40 - number // 2, 3)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02d}.png")
    done = convert("images", "photos", "x.h5", "--size", "8", "--split", "0.5", "--keep-order", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    options = ["workload=images", "data.train=x-train.h5", "data.val=x-val.h5", "model.width=4", "data.batch_size=8"]
    (tmp_path / "empty.yaml").write_text("data: {fields: {images: images, labels: labels}}\n")
    config = load_config(["--config", "empty.yaml", *options, "run.name=a", "train.epochs=1", "dist.device=cpu"])
    train.train(train.build(config, ALONE), ALONE)
    (tmp_path / "photos/a/broken.png").write_text("no image")
    with pytest.raises(
        UserError, match=r"1 of 41 images are left out\n  photos/a/broken.png cannot be read: it is not"
    ):
        run("runs/a", "photos", "-o", "x.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "x.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == sorted(map(str, Path("photos").glob("?/[0-9]*.png")))
    assert {line["class_name"] for line in lines} <= {"a", "b"}
    Path("empty").mkdir()
    for name, reason in {"photos/a/broken.png": "it is not an image", "nowhere": "No such file", "empty": ""}.items():
        with pytest.raises(
            UserError, match=rf"(1 of 1|0 of 0) images are left out(\n  {name} cannot be read: )?.*{reason}"
        ):
            run("runs/a", name, "-o", "y.jsonl")
        assert not Path("y.jsonl").exists()
    model, _, _ = load_model(find_checkpoint(Path("runs/a")))
    converted = []
    for name in ("x-train.h5", "x-val.h5"):
        with h5py.File(name) as file:
            converted += model(torch.from_numpy(file["images"][:])).softmax(1).max(1).values.tolist()
    found = sorted(line["probability"] for line in lines)
    np.testing.assert_allclose(found, sorted(converted), rtol=1e-5)
