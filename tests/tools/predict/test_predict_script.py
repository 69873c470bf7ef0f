"""predict.py as a user runs it, on models of the three workloads; its lines, and what it says about mistakes."""

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from scipy import sparse
from torch import nn

from fastgpu.convert import command as convert
from fastgpu.predict import program
from fastgpu.predict.answers import Answers, to_columns, write_rows
from fastgpu.predict.command import Predict
from fastgpu.predict.inputs import open_inputs
from fastgpu.predict.model import Trained, load_model
from fastgpu.process.launch import UserError
from fastgpu.rows.rows import Rows
from support import PROJECT
from support.ranks import CPU, printed_by, run_to_end
from support.runs import metrics_of, train, val_points
from workloads import minimal

PROBABILITY = {"probability": torch.tensor([[0.25, 0.75], [0.9, 0.1]])}
SCORES = {"scores": torch.tensor([[0.5, -torch.inf, 2.0], [1.0, 3.0, 2.0]])}
CAT_DOG = {"class_names": ["cat", "dog"]}
EVENTS = {"columns": ["who", "what", "stars", "when"], "above": 3.5, "unrated": "refuse", "repeats": "last"}
MESSAGES = Path(__file__).with_name("messages.yaml")
"""A case that begins with RUN or TMP is the command line itself."""


def test_messages_of_predict(compare_messages, run, minimal_run, model_of, ragged_file, tmp_path):
    np.save(tmp_path / "five.npy", np.zeros((3, 5), np.float32))
    (tmp_path / "pickle.npy").write_bytes(np.array([None, {}]).dumps())
    np.savez(tmp_path / "few.npz", x=np.zeros((3, 6), np.float32), id=np.zeros(2))
    np.savez(tmp_path / "one.npz", x=np.float32(1), rate=8)
    sparse.save_npz(tmp_path / "sparse.npz", sparse.eye(6, format="csr"))
    for name in ("old.csv", "old.pt2"):
        (tmp_path / name).write_text("old")
    (tmp_path / "run").symlink_to(minimal_run.parents[1])
    calls = {}
    for words in [case for case in yaml.safe_load(MESSAGES.read_text()) if case.startswith(("RUN", "TMP"))]:
        full = words.replace("RUN", "TMP/run/runs/a").replace("ROWS", "TMP/run/rows.h5").replace("TMP", str(tmp_path))
        calls[words] = partial(run, *full.split())
    items = {"items": {"dtype": "int32", "is_ragged": True, "n_items": 60}}
    calls["other items"] = partial(open_inputs, [ragged_file(50)], model_of(items))
    calls["ragged id"] = partial(open_inputs, [ragged_file(50)], model_of({"number": {}}), ids=["items"])
    image = {"shape": [3, 6, 6]}
    floats = model_of({"images": image | {"dtype": "float32"}})
    calls["float images"] = partial(open_inputs, ["a.png"], floats)
    calls["images to evaluate"] = partial(open_inputs, ["a.png"], model_of({"images": image}), labels=True)
    with h5py.File(tmp_path / "named.h5", "w") as file:
        file["y"] = np.arange(5)
        file.attrs["class_names"] = ["dog", "cat"]
        file.attrs["item_ids"] = [1, 0]
    for name, names in {"class_names": ["cat", "dog"], "item_ids": ["0", "1"]}.items():
        model = model_of({"y": {}}, **{name: names})
        calls[f"other {name}"] = partial(open_inputs, [f"{tmp_path}/named.h5"], model, labels=name == "class_names")
    compare_messages(calls | of_users(tmp_path, model_of(items, item_ids=range(60), events=json.dumps(EVENTS))))
    assert (tmp_path / "old.csv").read_text() == (tmp_path / "old.pt2").read_text() == "old"


def of_users(folder: Path, trained: Trained) -> dict[str, Callable[[], object]]:
    texts: dict[str, str | bytes] = {
        "no column": "who,item\nu,1\n",
        "a column twice": "who,what,what\nu,1,2\n",
        "no lines": "who,what\n",
        "empty": "",
        "a long line": "who,what\nu,1\n\nu,1,2\n",
        "no item": "who,what\nu,\n",
        "a rating": "who,what,stars\nu,1,many\n",
        "a time": "who,what,when\nu,1,soon\n",
        "nothing known": "who,what\nu,x\nv,y\n",
        "not UTF-8": "who,what\nu,고양이\n".encode("cp949"),
    }
    calls: dict[str, Callable[[], object]] = {}
    for name, text in texts.items():
        path = folder / f"{name.replace(' ', '-')}.csv"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        calls[f"users, {name}"] = partial(open_inputs, [str(path)], trained)
    (folder / "users.csv").write_text("who,what\nu,1\n")
    calls["users, with labels"] = partial(open_inputs, [f"{folder}/users.csv"], trained, labels=True)
    calls["users, without scores"] = lambda: open_inputs([f"{folder}/users.csv"], trained).hide_seen({}, range(1))
    return calls


def test_predict_needs_declared_inputs(run, minimal_run, rows, monkeypatch):
    monkeypatch.setattr(minimal.Workload, "inputs", ())
    with pytest.raises(UserError, match=r"workloads/minimal.py declares no `inputs`"):
        run(minimal_run, rows)


def lines_of_values(values, *, is_csv=True, top=None, every=False, **attributes):
    """The lines for two batches of the same two rows. Of the second one only its first row is written."""
    file = io.StringIO()
    columns = {"row": [0, 1]} | to_columns(values, attributes, top, every=every)
    titles = write_rows(file, columns, [True, True], is_csv=is_csv)
    write_rows(file, columns, [True, False], is_csv=is_csv, titles=titles)
    *lines, again = file.getvalue().splitlines()
    assert lines[-2] == again
    return lines if is_csv else [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        (PROBABILITY, {}, "row,class,probability 0,1,0.75 1,0,0.9"),
        (PROBABILITY, CAT_DOG, "row,class,class_name,probability 0,1,dog,0.75 1,0,cat,0.9"),
        (
            PROBABILITY,
            {"class_names": ["cat", "=A,1"], "every": True},  # which is no formula behind the name of the column
            'row,class,class_name,probability,probability_cat,"probability_=A,1" '
            '0,1,"\'=A,1",0.75,0.25,0.75 1,0,cat,0.9,0.9,0.1',
        ),
        (PROBABILITY, {"class_names": ["cat", "cat"]}, "row,class,probability 0,1,0.75 1,0,0.9"),
        (SCORES, {"top": 2}, "row,items_0,items_1,scores_0,scores_1 0,2,0,2.0,0.5 1,1,2,3.0,2.0"),
        ({"class": torch.tensor([0.5, torch.nan])}, {"class_names": ["class"]}, "row,class 0,0.5 1,"),
        ({"=y": torch.tensor([1, 2])}, {}, "row,'=y 0,1 1,2"),
        ({"probability": torch.full((2, 2), torch.nan)}, CAT_DOG, "row,class,class_name,probability 0,-1,, 1,-1,,"),
    ],
)
def test_predict_csv_lines(values, options, expected):
    assert lines_of_values(values, **options) == expected.split(" ")


def test_predict_json_lines():
    assert lines_of_values(SCORES, is_csv=False, item_ids=[7, 8, 9], top=5) == [
        {"row": 0, "items": [2, 0, -1], "item_ids": [9, 7, None], "scores": [2.0, 0.5, None]},
        {"row": 1, "items": [1, 2, 0], "item_ids": [8, 9, 7], "scores": [3.0, 2.0, 1.0]},
    ]
    mask = torch.zeros(2, 2, 2, dtype=torch.uint8)
    assert lines_of_values({"mask": mask}, is_csv=False)[0]["mask"] == [[0, 0], [0, 0]]
    assert lines_of_values(PROBABILITY, is_csv=False, class_names=["=1", "cat"])[1]["class_name"] == "=1"
    y = torch.from_numpy(np.random.default_rng(0).standard_normal(2).astype(np.float32))
    assert torch.equal(torch.tensor([line["y"] for line in lines_of_values({"y": y}, is_csv=False)]), y)


def test_predict_csv_has_one_width(run, minimal_run, rows, tmp_path, monkeypatch):
    """A number of values that depends on the batch, as of padded sequences. JSON lines hold them."""
    widths = iter((2, 3, 3) * 2)
    monkeypatch.setattr(minimal.Workload, "predict", lambda _, __, batch: {"y": torch.zeros(len(batch), next(widths))})
    words = (minimal_run, rows, "--batch-size", 16, "-o")
    with pytest.raises(
        UserError, match="the first rows have 3 columns, and later ones 4, such as y_2 in some only: .*"
    ):
        run(*words, tmp_path / "y.csv")
    assert not (tmp_path / "y.csv").exists()
    widths = iter((2, 3) * 9)
    run(*words, tmp_path / "y.jsonl")
    assert {len(line["y"]) for line in lines_of(tmp_path / "y.jsonl")} == {2, 3}


def test_predict_evaluates_one_number_of_classes(run, minimal_run, rows, monkeypatch):
    numbers = iter(range(2, 99))

    def ask(_, batch):
        zeros = np.zeros(len(batch), int)
        return Answers([*map(str, range(next(numbers)))], zeros, zeros, zeros)

    monkeypatch.setattr(program, "ask", ask)
    with pytest.raises(UserError, match="gives another number of classes for other rows"):
        run(minimal_run, rows, "--evaluate", "--batch-size", 16)


def test_predict_of_broken_images_writes_nothing(tmp_path, model_of):
    (tmp_path / "a.png").write_text("no image")
    trained = model_of({"images": {"shape": [3, 6, 6]}}, predict=lambda _, batch: {"x": batch["images"][:, 0, 0, 0]})
    trained.card.update(precision="fp32", batch_size=4)
    asked = Predict(checkpoint=str(tmp_path), inputs=(f"{tmp_path}/a.png",))
    file = io.StringIO()
    with pytest.raises(UserError, match="1 of 1 images are left out"):
        program.write_predictions(trained, open_inputs(asked.inputs, trained), asked, file, device=CPU)
    assert file.getvalue() == ""


class TwiceTheSum(nn.Module):
    """Counts its passes."""

    n_passes = 0

    def forward(self, *inputs, factor=2):
        self.n_passes += 1
        return factor * sum(inputs)


def test_predict_computes_an_output_once():
    model, x, y = TwiceTheSum(), torch.ones(3), torch.ones(3)
    with program.one_pass(model), torch.no_grad():
        first = model(x, y)
        assert model(x, y) is first
        assert model.n_passes == 1
        for change in (first.zero_, x.zero_):  # in place: neither the inputs nor the output are those of before
            n_passes = model.n_passes
            change()
            assert torch.equal(model(x, y), 2 * (x + y))
            assert model.n_passes == n_passes + 1
        assert torch.equal(model(x), 2 * x)
        assert torch.equal(model(x, factor=3), 3 * x)
        assert torch.equal(model(x.clone()), 2 * x)
        assert model.n_passes == 6
    assert "forward" not in vars(model)


def test_predict_evaluates_in_one_pass(model_of):
    """`predict` and `score` of a workload call the model for the same images."""
    model = TwiceTheSum()
    trained = model_of({"x": {}}, model, lambda model, batch: {"probability": model(batch["x"]).softmax(1)})
    trained.workload.score = lambda model, batch: {"top": model(batch["x"]).max()}
    examiner = program.Examiner(trained)
    for labels in ([0, 1], [1, 1]):
        batch = Rows({"x": torch.tensor([[1.0, 0.0], [0.0, 3.0]]), "labels": torch.tensor(labels)})
        assert examiner.score(model, batch) == {"top": 6}
    assert model.n_passes == 2
    assert [answer.chosen.tolist() for answer in examiner.answers] == [[0, 1], [0, 1]]


MISTAKES = """
import sys
from fastgpu.predict.command import Predict
from fastgpu.process.commands import parse

for words in ("", "x y --id", "x y --top 0", "none x", ". none.png", ". x-*.h5", ". . -o none/x.csv", ". . -o old.csv"):
    try:
        parse(Predict, words.split(), program="predict.py")
    except ValueError as error:
        print(error)
sys.exit("torch" in sys.modules)
"""


def test_predict_mistakes_need_no_torch(tmp_path):
    (tmp_path / "old.csv").touch()
    assert printed_by([sys.executable, "-c", MISTAKES], tmp_path, PYTHONPATH=str(PROJECT)).splitlines() == [
        "the following arguments are required: CHECKPOINT; python predict.py --help lists what it takes",
        "--id: expected one argument; python predict.py --help lists what it takes",
        "--batch-size and --top should be at least 1",
        f"none does not exist (looked in {tmp_path}); name the folder of a run, such as runs/mine, or of a checkpoint",
        f"none.png does not exist (looked in {tmp_path})",
        f"x-*.h5 does not exist (looked in {tmp_path})",
        "none/x.csv cannot be written: there is no folder none",
        "old.csv exists; --force replaces a file",
    ]


@pytest.fixture
def rows(minimal_run: Path) -> str:
    """The validation rows, as an argument."""
    return f"{minimal_run.parents[1]}/rows.h5::/val"


def check_lines(lines: list[dict], run: Path) -> np.ndarray:
    """The lines have the predictions of the model for all validation rows at once, in plain torch. Returns the rows."""
    with h5py.File(run.parents[1] / "rows.h5") as file:
        x = file["val/x"][:]
    expected = load_model(run).model(torch.from_numpy(x)).detach().flatten().tolist()
    assert [int(line["row"]) for line in lines] == list(range(len(x)))
    np.testing.assert_allclose([float(line["prediction"]) for line in lines], expected, rtol=1e-5, atol=1e-6)
    return x


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(errors="surrogateescape").splitlines()]


def test_predict_every_kind_of_input(tmp_path, run, minimal_run, copy_model, rows, capsys):
    x = check_lines([*csv.DictReader(run(minimal_run, rows).splitlines())], minimal_run)
    model, n_rows = capsys.readouterr().out.splitlines()
    assert model.startswith(f"model: {load_model(minimal_run).folder}, of epoch 2, mse ")
    assert n_rows == "100 rows"
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "x.npz", other=np.zeros(3), x=x)
    for name, options in (("own.hdf5", {}), ("matlab.mat", {"userblock_size": 512})):
        with h5py.File(tmp_path / name, "w", **options) as file:
            file["x"] = x
    copy = copy_model("copy")  # two files of a checkpoint are enough
    for source in ("x.npy", "x.npz", "own.hdf5", "matlab.mat", "*.mat"):
        target = tmp_path / f"{source}.jsonl"
        assert run(copy, "-o", target, tmp_path / source, "--batch-size", 7) == ""
        check_lines(lines_of(target), minimal_run)
    assert run(minimal_run, rows, "--id", "y").startswith("row,y,prediction\n0,")


@pytest.mark.parametrize("task", [["{rows}", "-o", "{tmp}/a.csv"], ["--export", "{tmp}/a.pt2"]])
def test_predict_force_replaces_a_file_whole(tmp_path, run, minimal_run, rows, task, monkeypatch):
    words = [word.format(rows=rows, tmp=tmp_path) for word in task]
    target = Path(words[-1])
    target.write_text("old")
    with monkeypatch.context() as patch:
        patch.setattr(minimal.Workload, "predict", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(minimal_run, *words, "--force")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {target.name: "old"}
    run(minimal_run, *words, "--force")
    assert target.stat().st_size > 3


ENDED = f"""
import os, runpy, signal
from workloads import minimal
minimal.Workload.predict = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
runpy.run_path("{PROJECT}/predict.py", run_name="__main__")
"""


@pytest.mark.slow
def test_predict_script_ends_cleanly(tmp_path, minimal_run, rows):
    command = [sys.executable, str(PROJECT / "predict.py"), str(minimal_run), rows]
    ended = run_to_end([sys.executable, "-c", ENDED, *command[2:], "-o", "x.csv"], tmp_path, PYTHONPATH=str(PROJECT))
    assert ended.returncode == 128 + signal.SIGTERM, ended.stderr
    assert not list(tmp_path.iterdir())
    failed = run_to_end([*command, "-o", "none/x.csv"], tmp_path)
    assert failed.returncode == 2
    assert failed.stderr.endswith("error: none/x.csv cannot be written: there is no folder none\n")
    read_end, write_end = os.pipe()
    os.close(read_end)  # as `| head` does, when it has seen enough
    closed = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, check=False)
    assert (closed.returncode, len(closed.stderr.splitlines())) == (-signal.SIGPIPE, 1)
    closed = subprocess.run([*command, "-o", "x.csv"], cwd=tmp_path, stderr=write_end, check=False)
    os.close(write_end)
    assert closed.returncode == 2
    assert not list(tmp_path.iterdir())


def test_predict_evaluate_for_any_batch_size(run, minimal_run, rows):
    logged = [point["val/mse"] for point in val_points(minimal_run)]
    last = max(minimal_run.glob("checkpoints/last-*"))
    assert run(last, "--evaluate", rows) == f"mse {logged[-1]:.6g}\n"
    for n in (7, 32, 100):
        assert run(minimal_run, "--evaluate", rows, "--batch-size", n) == f"mse {min(logged):.6g}\n"


def test_predict_items_for_users(tmp_path, run, monkeypatch):
    """After an epoch on the rows that the project comes with; named.h5 has validation rows."""
    monkeypatch.chdir(tmp_path)
    for name, new in (("train", "train.h5"), ("val", "named.h5")):
        shutil.copy(PROJECT / f"data/interactions-{name}.h5", new)
        with h5py.File(new, "r+") as file:
            file.attrs["item_ids"] = np.arange(1000)
            file["user"] = np.arange(len(file["items/indptr"]) - 1)[::-1]
    words = "data.train=train.h5 data.val=named.h5 model.hidden_dim=8 run.name=a train.epochs=1 dist.device=cpu"
    train("--config", f"{PROJECT}/config.recsys.yaml", *words.split())
    logged = metrics_of(Path("runs/a"))[-1]
    metrics = dict(line.split() for line in run("runs/a", "--evaluate", "named.h5").splitlines())
    assert metrics == {name: f"{logged[f'val/{name}']:.6g}" for name in ("ndcg_at_100", "recall_at_20", "recall_at_50")}
    run("runs/a", "named.h5", "-o", "x.jsonl", "--top", 3, "--id", "user", "--batch-size", 64)
    lines = lines_of(Path("x.jsonl"))
    assert [(line["row"], line["user"]) for line in lines] == [(row, 599 - row) for row in range(600)]
    for line in lines:
        assert len(set(line["items"])) == 3
        assert line["scores"] == sorted(line["scores"], reverse=True)
        assert line["item_ids"] == line["items"]
    run("runs/a", "--export", "model.pt2")


@pytest.mark.slow
def test_predict_photos_as_converted(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for number in range(40):
        photo = Path(f"photos/{'ab'[number % 2]}/{number:02d}.png")
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (20 + number, 40 - number // 2, 3)).astype(np.uint8)).save(photo)
    words = ("images", "photos", "x.h5", "--size", "8", "--split", "0.5", "--keep-order")
    convert.run(convert.parse(words))
    words = "data.train=x-train.h5 data.val=x-val.h5 data.batch_size=8 model.width=4 run.name=a train.epochs=1"
    train("--config", f"{PROJECT}/config.yaml", *words.split(), "dist.device=cpu")
    # Rows know the photos that they were made of, and those that the model takes for another class are listed.
    told = run("runs/a", "x-train.h5", "x-val.h5", "--evaluate", "--errors", "wrong.csv")
    wrong = [*csv.DictReader(Path("wrong.csv").read_text().splitlines())]
    assert told.startswith("top1_pct ")
    assert len(wrong) == round(40 * (1 - float(told.split()[1]) / 100))
    assert all(line["source"] == f"photos/{line['label_name']}/{line['source'][9:]}" for line in wrong)
    run("runs/a", "x-train.h5", "x-val.h5", "-o", "rows.jsonl")
    rows = lines_of(Path("rows.jsonl"))
    assert sorted(line["source"] for line in rows) == sorted(map(str, Path("photos").glob("?/*.png")))
    chosen = {line["source"]: line["class_name"] for line in rows}
    assert {line["source"] for line in wrong} == {path for path, name in chosen.items() if path.split("/")[1] != name}
    Path("photos/a/broken.png").write_text("no image")
    photo.rename(os.fsdecode(b"photos/b/39\xff.png"))  # which is not UTF-8
    Path("empty").mkdir()
    for words, told in (
        (
            "photos -o x.jsonl",
            r"1 of 41 images are left out; the others are written, .*\n  photos/a/broken.png cannot be read",
        ),
        ("photos/a/broken.png -o y.jsonl", r"1 of 1 images are left out\n  photos/a/broken.png cannot be read"),
        ("empty -o y.jsonl", "there is no image file in empty"),
    ):
        with pytest.raises(UserError, match=told):
            run("runs/a", *words.split())
    assert not Path("y.jsonl").exists()
    lines = lines_of(Path("x.jsonl"))
    assert [line["file"] for line in lines] == sorted(map(str, Path("photos").glob("?/[0-9]*.png")))
    assert {line["class_name"] for line in lines} <= {"a", "b"}
    converted = []
    for name in ("x-train.h5", "x-val.h5"):
        with h5py.File(name) as file:
            scores = load_model("runs/a").model(torch.from_numpy(file["images"][:]))
            converted += scores.softmax(1).max(1).values.tolist()
    np.testing.assert_allclose(sorted(line["probability"] for line in lines), sorted(converted), rtol=1e-5)
    with h5py.File("x-val.h5", "r+") as file:
        file["labels"][...] = 7
    with pytest.raises(UserError, match=r"labels are 7 to 7, .*; allowed are 0 to 1"):
        run("runs/a", "x-val.h5", "--evaluate")
