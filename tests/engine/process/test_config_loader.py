import re
import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import Field

from fastgpu.process.config import Config, Count, Section
from fastgpu.process.config_loader import PROJECT, load_config, read_options
from fastgpu.process.launch import SharedError
from support.ranks import run_train
from support.runs import write_minimal

BASE = "workload: minimal\ndata: {train: a.h5, val: b.h5, fields: {x: x, y: y}}\n"
"""The keys that are required."""
MISTAKES_IN_A_FILE = (
    "batch_size: 5\noptm: {lr: 5}\nlog:\n  zzz: 5\noptim: {lr: .nan}\nrun: {name: ../x}",
    "data: {batch_siz: 5, batch_size: true, echo: '2', tier: devic, pool_batches: x, fields: {images: 3}}",
    "model: {widht: 3, lr: 1, latent_dim: 8, width: wide}",
    "data: 5\nmodel: 5\noptim:",
    "data:\n  echo: 1\n  echo: 2",
    "- a",
    "data: [",
    "run:\n  seed: 2026-13-45",
    "run: {folder: !!python/object:os.system x}",
)
MISTAKES_IN_WORDS = (
    "data.echo=0.5 data.val=10 optim.lr=-1 optim.warmup_share=2 train.epochs=-1 run.seed=-1 workload=Mine",
    "data.batch_siz=3 zzz.lr=3 run.resume= data.batch_size=0 data.fields.x=y =1",
    'data.echo={"a":1,"a":2}',
    "optim.lr=1 optim.lr=2",
    "run.resume=runs/b",
    "model.width=0",
    "foo",
    "--nproc-per-node=gpu",
    "--config",
    "--config nowhere.yaml",
    "--config binary.yaml",
    "--config bare.yaml",
    "--config empty.yaml",
)


class Options(Section):
    """Settings of a made-up workload, with defaults of several types."""

    width: Count = 32
    flip: bool = False
    widths: list[int] = Field(default_factory=lambda: [1, 2])
    anything: Any = None
    note: str | None = "x"
    label: str | int = 0


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Config]:
    """load(text, ..., words=(...)): BASE, then the files 0.yaml, 1.yaml, ... with these texts, then these words."""
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(BASE)

    def load(*texts: str, words: tuple[str, ...] = ()) -> Config:
        arguments = ["--config", "config.yaml"]
        for number, text in enumerate(texts):
            Path(f"{number}.yaml").write_text(text)
            arguments += ["--config", f"{number}.yaml"]
        return load_config([*arguments, *words])

    return load


def test_config_later_files_and_words_win(load):
    words = ("data.tier=disk", "optim.lr=1e-3", "data.echo=2.5", "model.flip=false")
    texts = (
        "data:\n  batch_size: 8\n  echo: 2\nmodel: {width: 8, flip: true}",
        "data: {batch_size: 16}\nmodel: {width: 16}",
    )
    config = load(*texts, words=words)
    assert (config.data.batch_size, config.data.echo, config.data.tier, config.optim.lr) == (16, 2.5, "disk", 1e-3)
    options = read_options(config, Options)  # those of the workload are merged and typed like the others
    assert (options.width, options.flip) == (16, False)
    by_file = load("data: {echo: 2}", "data: {fields: {items: z}}")
    by_word = load("data: {echo: 2}", words=("data.fields={items: z}",))
    assert by_file.data == by_word.data
    assert by_file.data.fields == {"items": "z"}


@pytest.mark.parametrize("text", ["20241127", "1e5", "on", "null", "2024-11-27", "007", ".5", "~"])
def test_config_words_for_text_stay_text(load, text):
    keys = ("run.folder", "data.train", "data.val", "log.wandb", "model.note")
    config = load(words=tuple(f"{key}={text}" for key in keys))
    note = None if text in ("null", "~") else text
    values = (config.run.folder, config.data.train, config.data.val, config.log.wandb)
    assert (*values, read_options(config, Options).note) == (text,) * 4 + (note,)
    if text[0].isalnum():
        assert load(words=(f"run.name={text}",)).run.name == text
    config = load(words=("data.train=[1.h5, b]", "run.folder='1'", "log.wandb=", "model.label=5", "model.anything=5"))
    options = read_options(config, Options)
    assert (config.data.train, config.run.folder, config.log.wandb) == (["1.h5", "b"], "1", "")
    assert (options.label, options.anything) == (5, 5)


def test_config_missing_names_the_folder_of_the_project(load):
    Path("config.yaml").unlink()
    with pytest.raises(SharedError, match=rf"config.yaml cannot be read .*; start it in {re.escape(str(PROJECT))}, or"):
        load_config([])


def test_config_of_another_workload_is_one_line(load):
    text = "workload: images\nmodel: {a: 1, b: 2, note: 3}"
    with pytest.raises(SharedError, match=r"^workload=other has no model.a, model.b of the file; write 'model=\{\}' "):
        read_options(load(text, words=("workload=other",)), Options)
    config = load(text, words=("workload=other", "model={}", "model.flip=true"))
    assert read_options(config, Options) == Options(flip=True)


def test_config_yaml_exponents_anchors_and_merge_keys(load):
    numbers = "[1e-3, 1.0e-3, 1.E-3, .001, +1e-03]"
    config = load(f"data: &data {{batch_size: 8}}\nmodel: {{a: &a {numbers}, b: *a, c: {{<<: *data, echo: 2}}}}")
    assert config.model == {"a": [1e-3] * 5, "b": [1e-3] * 5, "c": {"batch_size": 8, "echo": 2}}


def test_config_of_a_resumed_run_is_the_recorded_one(load, capsys):
    config = load_config(["data.batch_size=8"])  # without --config, config.yaml is read
    run = Path("runs/7")
    run.mkdir(parents=True)
    for name, lr in (("config", 0.1), ("config-2", 0.2), ("config-10", 0.5)):
        recorded = config.resolved(run={"name": "other"}, optim={"lr": lr}, data={"dataset": "mine:Rows"})
        (run / f"{name}.yaml").write_text(yaml.safe_dump(recorded.model_dump()))
    assert capsys.readouterr().out == ""
    resumed = load_config(["run.resume=runs/7", "train.epochs=7"])
    told = "runs/7/config-10.yaml names the code that will be imported: workload=minimal data.dataset=mine:Rows\n"
    assert capsys.readouterr().out == told
    assert (resumed.run.folder, resumed.run.name, resumed.run.resume) == ("runs", "7", "auto")
    assert (resumed.optim.lr, resumed.train.epochs, resumed.data.batch_size) == (0.5, 7, 8)


def test_messages_of_config(compare_messages, load):
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    Path("bare.yaml").write_text("data: {train: a.h5}")
    Path("empty.yaml").touch()

    calls = {text: partial(load, text) for text in MISTAKES_IN_A_FILE}
    calls["nested too deeply"] = partial(load, "{" * 2000)
    calls |= {words: partial(load_config, words.split()) for words in MISTAKES_IN_WORDS}
    checks = {mistake: lambda read=read: read_options(read(), Options) for mistake, read in calls.items()}
    checks["model: {zzz: 1}, of a workload without settings"] = lambda: read_options(load("model: {zzz: 1}"), Section)
    compare_messages(checks)


@pytest.mark.parametrize("text", ["*.h5", "[ab]-*.h5", "{a}.h5", "@x.h5"])
def test_config_text_that_yaml_cannot_read_is_quoted(load, text):
    with pytest.raises(SharedError, match="quote it twice: data.train=") as told:
        load("", words=(f"data.train={text}",))
    (quoted,) = shlex.split(str(told.value).rpartition("quote it twice: ")[2])
    assert load("", words=(quoted,)).data.train == text


def test_config_typo_ends_before_torch_is_imported(tmp_path):
    write_minimal(tmp_path)
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    words = ("data.batch_siz=3", "data.batch_size=3")
    misspelt, right = (run_train(word, cwd=tmp_path, PYTHONPATH=str(tmp_path)) for word in words)
    assert misspelt.returncode == 2
    assert misspelt.stderr == "error: command line: unknown key data.batch_siz (did you mean data.batch_size?)\n"
    assert right.stderr == "torch was imported\n"
