"""What predict.py says about mistakes."""

from functools import partial

import h5py
import numpy as np
import pytest
import torch
from predict import to_columns

from fastgpu.predict.model import open_inputs
from workloads import minimal

COMMANDS = """
RUN
RUN x.npy --export a.pt2
RUN x.npy -o a.txt
RUN x.npy --top 0
RUN --evaluate x.h5 -o x.csv
RUN --export a.pt2 --id user
TMP/none ROWS::/val
RUN ROWS
RUN TMP/none.npy
RUN ROWS::/val --top 3
RUN a.png
RUN ROWS::/val -o TMP/old.csv
RUN --export TMP/old.csv
RUN TMP/five.npy
RUN TMP/double.npy
RUN TMP/pickle.npy
RUN TMP/crc.npz
RUN TMP/few.npz --id id
RUN TMP/five.npy --id id
RUN TMP/five.npy TMP/five.npy
RUN TMP/five.npz --evaluate
"""
NAMED = {"class_names": ["cat", "dog"], "item_ids": ["0", "1"]}


def test_messages(compare_messages, run, minimal_run, model_of, write_ragged, tmp_path):
    np.save(tmp_path / "five.npy", np.zeros((3, 5), np.float32))
    np.save(tmp_path / "double.npy", np.zeros((3, 6)))
    (tmp_path / "pickle.npy").write_bytes(np.array([None, {}]).dumps())
    np.savez(tmp_path / "five.npz", x=np.zeros((3, 5), np.float32))
    np.savez(tmp_path / "few.npz", x=np.zeros((3, 6), np.float32), id=np.zeros(2))
    content = (tmp_path / "few.npz").read_bytes()
    (tmp_path / "crc.npz").write_bytes(content.replace(bytes(72), b"1" * 72))
    (tmp_path / "old.csv").write_text("old")
    (tmp_path / "run").symlink_to(minimal_run.parents[1])
    calls = {}
    for words in COMMANDS.strip().split("\n"):
        full = words.replace("RUN", "TMP/run/runs/a").replace("ROWS", "TMP/run/rows.h5").replace("TMP", str(tmp_path))
        calls[words] = partial(run, *full.split())
    calls["nothing is ranked"] = partial(to_columns, {"y": torch.zeros(2)}, {}, None, every=True)
    items = {"items": {"dtype": "int32", "is_ragged": True, "n_items": 60}}
    calls["other items"] = partial(open_inputs, [write_ragged(50)], model_of(items))
    calls["ragged id"] = partial(open_inputs, [write_ragged(50)], model_of({"number": {}}), ids=["items"])
    image = {"shape": [3, 6, 6]}
    for name, field in {"float images": image | {"dtype": "float32"}, "no images": {"shape": [6]}}.items():
        calls[name] = partial(open_inputs, ["a.png"], model_of({"images": field}))
    calls["images to evaluate"] = partial(open_inputs, ["a.png"], model_of({"images": image}), labels=True)
    with h5py.File(tmp_path / "named.h5", "w") as file:
        file["y"] = np.arange(5)
        file.attrs["class_names"] = ["dog", "cat"]
        file.attrs["item_ids"] = [1, 0]
    for name, names in NAMED.items():
        model = model_of({"y": {}}, **{name: names})
        calls[f"other {name}"] = partial(open_inputs, [f"{tmp_path}/named.h5"], model, labels=name == "class_names")
    compare_messages(calls)
    assert (tmp_path / "old.csv").read_text() == "old"


def test_a_workload_declares_its_inputs(run, minimal_run, monkeypatch):
    monkeypatch.setattr(minimal.Workload, "inputs", ())
    with pytest.raises(ValueError, match=r"workloads/minimal.py declares no `inputs`"):
        run(minimal_run, "x.npy")
