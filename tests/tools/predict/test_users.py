"""Users in a CSV file, by the ids of the file that the model was trained on."""

import csv
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fastgpu.convert import command as convert
from fastgpu.predict.inputs import open_inputs
from fastgpu.predict.program import write_predictions
from fastgpu.predict.users import read_users
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store
from support import PROJECT
from support.ranks import CPU
from support.rows import read_rows
from support.runs import train

EVENTS = {"columns": ["who", "what", "stars", "when"], "above": 3.5, "unrated": "drop", "repeats": "last"}
NAMES = ["a", "007", "7", "Ω", "b c"]


def attributes(**changes: object) -> dict[str, object]:
    return {"item_ids": NAMES, "events": json.dumps(EVENTS | changes)}


def numbers_of(names: str) -> list[int]:
    return [NAMES.index(name) for name in names.split("|")] if names else []


TABLES = {
    "who,what\nu,7\nv,a\nu,007\n": {"u": ("7|007", "7|007"), "v": ("a", "a")},
    "when;what;who\n3;a;u\n1;Ω;u\n2;b c;u\n": {"u": ("Ω|b c|a", "a|Ω|b c")},
    "who,what,when\nu,a,2026-01-02\nu,7,2026-01-01T23:00\nu,Ω,2026-01-02 00:30:00+01:00\n": {"u": ("7|Ω|a", "7|Ω|a")},
    "who,what,stars\nu,a,4\nu,7,3\nu,Ω,\nu,b c,-1\n": {"u": ("a", "a|7|Ω|b c")},
    "who,what,stars,when\nu,a,5,1\nu,a,1,2\nu,7,5,3\nu,Ω,5,1\nu,Ω,5,9\n": {"u": ("7|Ω", "a|7|Ω")},
    "who,what,stars,when\nu,a,5,2\nu,a,,3\nu,7,5,1\n": {"u": ("7|a", "7|a")},
    '﻿what,who\n a ,"u, v"\n\nnone,"u, v"\n': {"u, v": ("a", "a")},
}


@pytest.mark.parametrize("text", TABLES)
def test_users_have_their_items(tmp_path, text):
    (tmp_path / "users.csv").write_text(text, encoding="utf-8")
    found = read_users(str(tmp_path / "users.csv"), 5, attributes())
    assert {user: items.liked for user, items in found.items()} == {
        user: numbers_of(liked) for user, (liked, _) in TABLES[text].items()
    }
    for user, (_, seen) in TABLES[text].items():
        assert sorted(found[user].seen) == sorted(numbers_of(seen))


def test_users_of_a_model_without_names_have_numbers(tmp_path):
    (tmp_path / "users.csv").write_text("user,item,stars\nu,4,1\nu,0,5\n")
    assert read_users(str(tmp_path / "users.csv"), 5, {})["u"].liked == [4, 0]


def test_users_of_a_table_without_a_header(tmp_path):
    (tmp_path / "users.csv").write_text("a,u,4\n7,u,1\n")
    known = attributes(columns=["2", "1", "3", ""])
    assert read_users(str(tmp_path / "users.csv"), 5, known)["u"] == ([0], [0, 2])


@pytest.mark.parametrize("repeats", ["last", "first", "all"])
def test_users_have_the_rows_that_convert_writes(tmp_path, monkeypatch, repeats):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["who,what,stars,when"]
    for user, item, stars, time in zip(*(rng.integers(0, n, 600) for n in (20, 30, 7, 90)), strict=True):
        lines.append(f"user {user},tt{item:03},{stars - 1 or ''},{time}")
    Path("x.csv").write_text("\n".join(lines))
    flags = f"--split-by-time 90 --min-items 1 --unrated drop --repeats {repeats} --columns who,what,stars,when"
    Path("more.csv").write_text("\n".join([*lines, "last,tt000,5,90", "last,tt001,5,1"]))
    convert.run(convert.parse(f"events more.csv y.h5 {flags}".split()))
    store = open_store("x", "y-train.h5", {"items": "items"})
    items = read_rows(store)["items"]
    expected = {
        user: items.values[slice(*items.offsets[row : row + 2])].tolist() for row, user in enumerate(store.origins())
    }
    expected.pop("last")
    found = read_users("x.csv", store.fields["items"].n_items or 0, store.attributes)
    assert {user: each.liked for user, each in found.items()} == expected


def scores_of(model: nn.Module, batch: Rows) -> dict[str, Tensor]:
    """Item n has the score n, but for the last item of the user, which has 100."""
    items = batch["items"]
    scores = torch.arange(5.0).repeat(len(items), 1)
    scores[torch.arange(len(items)), items.values[items.offsets[1:].long() - 1].long()] = 100
    return {"scores": scores}


ITEMS = {"items": {"dtype": "int32", "is_ragged": True, "n_items": 5}}


def test_users_get_items_that_they_have_not_seen(tmp_path, model_of, capsys):
    """In names; also those that they have rated, but do not like, are left out, and what is unknown is told."""
    (tmp_path / "users.csv").write_text("who,what,stars\nu,a,4\nv 2,7,5\nu,b c,1\nw,a,1\nx,none,5\nv 2,none,5\n")
    trained = model_of(ITEMS, predict=scores_of, **attributes())
    trained.card.update(precision="fp32", batch_size=1)
    rows = open_inputs([str(tmp_path / "users.csv")], trained)
    file = io.StringIO()
    asked = SimpleNamespace(output="-", batch_size=None, id=(), top=3, all=False)
    write_predictions(trained, rows, asked, file, device=CPU)
    table = [*csv.DictReader(io.StringIO(file.getvalue()))]
    assert [[row["user"], *(row[f"item_ids_{n}"] for n in range(3))] for row in table] == [
        ["u", "Ω", "7", "007"],
        ["v 2", "b c", "Ω", "007"],
    ]
    told = capsys.readouterr().out
    assert "users.csv: 6 lines, 4 users" in told
    assert "2 lines of" in told
    assert "their items, such as none" in told
    assert "2 of 4 users of" in told
    assert "they are left out: w, x" in told


@pytest.mark.slow
def test_users_with_text_ids_from_ratings_to_answers(tmp_path, monkeypatch, run):
    """Users of two tastes, by the commands of the page: all that they get is of their taste, and new to them."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["user,item,stars,when"]
    for user in range(400):
        taste = "ab"[user % 2]
        for item in rng.permutation(30)[:12]:
            lines.append(f"user-{user},{taste}{item:02},5,2026-01-{rng.integers(1, 29):02}")
    Path("ratings.csv").write_text("\n".join(lines))
    convert.run(
        convert.parse(["events", "ratings.csv", "x.h5", "--columns", "user,item,stars,when", "--split-by-time", "0.8"])
    )
    words = "data.train=x-train.h5 data.val=x-val.h5 data.batch_size=40 train.epochs=40 optim.lr=0.01 run.name=a"
    train("--config", f"{PROJECT}/config.recsys.yaml", *words.split(), "model.hidden_dim=0", "model.kl_anneal_steps=0")
    Path("users.csv").write_text("\n".join(["user,item", "new,a01", "new,a02", "user-1,b03", "new,a05"]))
    table = [*csv.DictReader(io.StringIO(run("runs/a", "users.csv", "--top", 10)))]
    found = {row["user"]: [row[f"item_ids_{n}"] for n in range(10)] for row in table}
    assert {user: {item[0] for item in items} for user, items in found.items()} == {"new": {"a"}, "user-1": {"b"}}
    assert not {"a01", "a02", "a05"} & {*found["new"]}
