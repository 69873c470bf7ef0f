"""predict.py as a user runs it, on a model of the workload `minimal`."""

import csv
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import h5py
import numpy as np
import predict as script
import pytest
import torch
import train
from harness import ALONE, ROOT, TIMEOUT_S, metrics_of, newest, write_minimal
from torch import nn

from fastgpu.predict.model import load_model
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from workloads import minimal

N_ROWS = 100
"""Validation rows."""


@pytest.fixture(scope="module")
def trained_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows.h5 and a run in runs/a."""
    folder = tmp_path_factory.mktemp("trained")
    write_minimal(folder, n_rows=320)
    with chdir(folder):
        train.train(train.build(load_config(["train.epochs=2"]), ALONE), ALONE)
    return folder


@pytest.fixture(autouse=True)
def inside(trained_folder: Path) -> Iterator[None]:
    with chdir(trained_folder):
        yield


def run(*arguments: str | Path) -> str:
    """`python predict.py` in this process. Returns what it prints to the terminal."""
    terminal = io.StringIO()
    script.main(script.parse([str(each) for each in arguments]), ALONE, terminal)
    return terminal.getvalue()


def val_rows() -> np.ndarray:
    with h5py.File("rows.h5") as file:
        return file["val/x"][:]


def expected() -> list[float]:
    """The predictions for all validation rows at once, in plain torch."""
    model, _, _ = load_model(next(Path("runs/a/checkpoints").glob("best-*")))
    return model(torch.from_numpy(val_rows())).detach().flatten().tolist()


def check(lines: list[dict]) -> None:
    assert [int(line["row"]) for line in lines] == list(range(N_ROWS))
    np.testing.assert_allclose([float(line["prediction"]) for line in lines], expected(), rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------- predictions


def test_every_kind_of_input_gives_the_predictions_of_the_model(tmp_path):
    check(list(csv.DictReader(io.StringIO(run("runs/a", "rows.h5::/val")))))
    np.save(tmp_path / "x.npy", val_rows())
    np.savez(tmp_path / "x.npz", other=np.zeros(3), x=val_rows())
    with h5py.File(tmp_path / "own.hdf5", "w") as file:
        file["x"] = val_rows()
    for number, source in enumerate(("x.npy", "x.npz", "own.hdf5")):
        target = tmp_path / f"{number}.jsonl"
        assert run("runs/a", tmp_path / source, "-o", target, "--batch-size", 7) == ""
        check([json.loads(line) for line in target.read_text().splitlines()])


def test_rows_with_nan_are_told(tmp_path, capsys):
    rows = val_rows()
    rows[[3, 70]] = np.nan
    np.save(tmp_path / "x.npy", rows)
    lines = list(csv.DictReader(io.StringIO(run("runs/a", tmp_path / "x.npy"))))
    assert [int(line["row"]) for line in lines if not line["prediction"]] == [3, 70]
    assert "the model gives NaN for 2 rows" in capsys.readouterr().out


def test_the_checkpoint_in_use_is_named(capsys):
    (best,) = Path("runs/a/checkpoints").glob("best-*")
    run("runs/a", "rows.h5::/val")
    assert capsys.readouterr().out.splitlines() == [f"model: {best}", f"{N_ROWS} rows"]


def test_a_copy_of_a_checkpoint_is_enough(tmp_path):
    (best,) = Path("runs/a/checkpoints").glob("best-*")
    (tmp_path / "copy").mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(best / name, tmp_path / "copy")
    with chdir(tmp_path):
        np.save("x.npy", np.ones((3, 6), np.float32))
        lines = run("copy", "x.npy").splitlines()
    assert len(lines) == 4
    assert len(set(lines[1:])) == 3  # three row numbers, one prediction
    assert len({line.split(",")[1] for line in lines[1:]}) == 1


def test_an_error_leaves_no_output_behind(tmp_path, monkeypatch):
    calls = []

    def fail_later(workload: minimal.Workload, model: nn.Module, batch: Rows) -> dict[str, torch.Tensor]:
        calls.append(batch)
        if len(calls) == 4:
            raise RuntimeError("stopped")
        return {"prediction": batch["x"][:, 0]}

    monkeypatch.setattr(minimal.Workload, "predict", fail_later)
    (tmp_path / "x.csv").write_text("old")
    with pytest.raises(RuntimeError, match="stopped"):
        run("runs/a", "rows.h5::/val", "-o", tmp_path / "x.csv", "--force", "--batch-size", 7)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"x.csv": "old"}


@pytest.mark.slow
def test_a_process_that_is_asked_to_end_leaves_no_output_behind(tmp_path):
    program = f"""
import os, runpy, signal, sys
from workloads import minimal
minimal.Workload.predict = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
sys.argv = ["predict.py", "runs/a", "rows.h5::/val", "-o", "{tmp_path}/x.csv"]
runpy.run_path("{ROOT}/predict.py", run_name="__main__")
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 143
    assert not list(tmp_path.iterdir())


def test_several_processes_are_refused_at_once():
    done = subprocess.run(
        [sys.executable, ROOT / "predict.py", "runs/a", "rows.h5::/val"],
        env=os.environ | {"WORLD_SIZE": "2", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == "error: predict.py is one process; start it by python, once for each part of the files\n"


# ---------------------------------------------------------------------------------------------- metrics


def test_evaluate_gives_the_metrics_of_the_run_exactly():
    logged = [point["val/mse"] for point in metrics_of(Path("runs/a")) if "val/mse" in point]
    assert json.loads(run(str(newest(Path("runs/a"))), "--evaluate", "rows.h5::/val", "--json")) == {"mse": logged[-1]}
    assert run("runs/a", "--evaluate", "rows.h5::/val") == f"mse {min(logged):.6g}\n"
    card = json.loads((newest(Path("runs/a")) / "model.json").read_text())
    assert card["metrics"] == {"mse": logged[-1]}
    assert (card["epoch"], card["step"]) == (2, 20)


def test_labels_are_evaluated_as_the_classes_that_the_model_knows(tmp_path, capsys):
    args = script.parse(["runs/a", "--evaluate", "rows.h5::/val"])
    trained = script.load(args)
    script.open_rows(args, trained)
    assert capsys.readouterr().out == ""
    trained.card["attributes"]["class_names"] = ["cat", "dog"]
    script.open_rows(args, trained)
    warning = "rows.h5::/val has no class_names; its labels 0, 1, 2... would be cat, dog as in the training rows"
    assert capsys.readouterr().out == f"warning: --evaluate: {warning}, in this order\n"
    shutil.copy("rows.h5", tmp_path)
    with h5py.File(tmp_path / "rows.h5", "r+") as file:
        file["val"].attrs["class_names"] = ["dog", "cat"]
    args = script.parse(["runs/a", "--evaluate", f"{tmp_path}/rows.h5::/val"])
    with pytest.raises(UserError, match="--evaluate: number 0 of the labels is dog in .* and cat in the training rows"):
        script.open_rows(args, trained)


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
def test_an_exported_program_runs_in_a_fresh_process(tmp_path):
    run("runs/a", "--export", tmp_path / "model.pt2")
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt2"]
    np.save(tmp_path / "x.npy", val_rows())
    command = [sys.executable, "-c", LOAD, str(tmp_path / "model.pt2"), str(tmp_path / "x.npy")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    for n, line in zip((1, 7, 100), done.stdout.splitlines(), strict=True):
        np.testing.assert_allclose([float(each) for each in line.split()], expected()[:n], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------------------------------------- mistakes


def test_flags_may_stand_before_the_input():
    args = script.parse(["runs/a", "--top", "3", "x.npy", "-o", "x.csv", "y.npy"])
    assert (args.checkpoint, args.inputs, args.top, args.output) == ("runs/a", ["x.npy", "y.npy"], 3, "x.csv")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/a"], "give INPUT, --evaluate FILE.h5 or --export FILE, one of them"),
        (["runs/a", "x.npy", "--export", "a.pt2"], "one of them"),
        (["runs/a", "x.npy", "-o", "a.txt"], "-o is a.txt; it should end in .csv or .jsonl"),
        (["runs/a", "--export", "a.bin"], "--export is a.bin; it should end in .pt2 or .onnx"),
        (["runs/a", "x.npy", "--top", "0"], "should be at least 1"),
        (["runs/a", "x.npy", "--json"], "--json belongs to --evaluate"),
        (["runs/a", "--evaluate", "x.h5", "-o", "x.csv"], "-o, --id, --top and --all belong to INPUT"),
        (["runs/a", "--export", "a.pt2", "--id", "user"], "-o, --id, --top and --all belong to INPUT"),
    ],
)
def test_flags_that_do_not_fit_are_told_before_torch_is_imported(arguments, message):
    with pytest.raises(UserError, match=message):
        script.parse(arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["runs/b", "rows.h5"], "runs/b is neither a run nor a checkpoint"),
        (["runs/a", "rows.h5"], r"rows.h5: x is missing; there is train, val"),
        (["runs/a", "none.npy"], "none.npy does not exist"),
        (["runs/a", "rows.h5", "a.png"], "INPUT has HDF5 files and image files; give one kind at a time"),
        (["runs/a", "runs/a"], "INPUT is runs/a, a run or a checkpoint; name one CHECKPOINT"),
        (["{best}", "{last}", "rows.h5"], "INPUT is .*last-0.*, a run or a checkpoint; name one CHECKPOINT"),
        (["runs/a", "rows.h5::/val", "--top", "3"], "--top is 3, but `predict` of the workload ranks nothing"),
        (["runs/a", "a.png"], r"(the model takes|not an HDF5 or NumPy file).* float32 \(N, 6\)"),
        (["runs/a", "rows.h5::/val", "-o", "none/a.csv"], "none/a.csv was not written: .*No such file"),
    ],
)
def test_a_mistake_is_one_line(arguments, message):
    best, last = sorted(Path("runs/a/checkpoints").iterdir())[:2]
    with pytest.raises(UserError, match=message) as caught:
        run(*(argument.format(best=best, last=last) for argument in arguments))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((3, 5), np.float32), r"x is float32 \(N, 5\); the model was trained on float32 \(N, 6\)"),
        (np.zeros((3, 6), np.float64), r"x is float64 \(N, 6\); the model was trained on float32 \(N, 6\)"),
        (np.zeros((0, 6), np.float32), "at least one"),
        (np.array(["a"]), "x is <U1"),
    ],
)
def test_rows_of_another_kind_are_refused(tmp_path, array, message):
    np.save(tmp_path / "x.npy", array)
    with pytest.raises(UserError, match=message):
        run("runs/a", tmp_path / "x.npy")


@pytest.mark.slow
def test_the_script_prints_rows_only_to_the_terminal():
    done = subprocess.run(
        [sys.executable, ROOT / "predict.py", "runs/a", "rows.h5::/val"],
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=True,
    )
    check(list(csv.DictReader(done.stdout.splitlines())))
