import json
import re
import shlex
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pytest
import yaml
from pydantic import AfterValidator, Field

from fastgpu.process.config import Config, Count, Section
from fastgpu.process.config_loader import keys, load_config, read_options
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
    "data: {train: &all [*all]}",
    'data: {train: "a\\0.h5"}',
    'run: {folder: "\\ud800"}',
    "run: {seed: !!timestamp x}",
    "data: {train: {a.h5: 1.0e+308, b.h5: 1.0e-308}}",
    "data: {train: {./~: 1, a.h5: 1}, fields: {x: null}}",
    "model: {label: on, width: 1e3, note: 2024}",
    "model: {day: 2025-01-01, shares: [.5, .6], widths: [1, x], flip: 1}",
    "model: {day: soon, shares: [.1, .2, .3]}",
    "data: {val: {}}",
    "data: {val: {a.h5: 2, b.h5: 0.5}}",
    "data: {val: {day: 10%, night: 20%}}",
    "data: {val: {day: [a.h5, [b.h5]]}}",
    "data: {val: {day:a.h5, night:b.h5}}",
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
    "--epochs 3 data.echo=2",
    "--batch-size=64",
    "--compile data.echo=2",
    "--compile --seed 3",
    "--width 8",
    "--config",
    "--config nowhere.yaml",
    "--config binary.yaml",
    "--config bare.yaml",
    "--config empty.yaml",
)


def one_in_all(shares: list[float]) -> list[float]:
    """A check of a workload's own."""
    if sum(shares) > 1:
        raise ValueError("{shares} have a sum of at most 1")
    return shares


class Options(Section):
    """Settings of a made-up workload, with defaults of several types."""

    width: Count = 32
    flip: bool = False
    widths: list[int] = Field(default_factory=lambda: [1, 2])
    anything: Any = None
    note: str | None = "x"
    label: str | int = 0
    day: Annotated[date, Field(ge=date(2026, 1, 1))] = date(2026, 1, 1)
    shares: Annotated[list[float], Field(max_length=2), AfterValidator(one_in_all)] = Field(default_factory=list)


def bomb(form: str) -> str:
    """YAML of 600 bytes with 10 ** 15 values. form: of a collection with ten members."""
    lines = ["a0: &a0 {x: 1}"]
    lines += [f"a{n}: &a{n} {form.format(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 16)]
    return "\n".join(lines)


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


@pytest.mark.parametrize("form", ["[{}]", "{{<<: [{}], y: 2}}", "{{? [{}] : 1}}"])
def test_config_aliases_are_counted_before_they_are_read(load, form):
    with pytest.raises(SharedError, match="0.yaml: expands to more than 100,000 keys and values"):
        load(bomb(form))
    many = ", ".join(["*x"] * 900)  # aliases that stand for little are read
    assert load(f"model: {{a: &x [1, 2], b: [{many}]}}").model["b"][899] == [1, 2]


ABSURD = "1.0e+308 | -1 | '' | .nan | .inf | [] | {} | null | on | [[[]]] | {{}: 1} | {1: {}} | [null] | {null: null}"
ABSURD += " | {2024-01-01: .inf} | !!binary aGk= | !!set {x} | !!timestamp x | *x | ~nobody/x | 2024-11-27 | 1e-308"
ABSURD += r''' | 'https://a/x?b="c"\' | "\0" | "\ud800" | "\udcff" | "\e[31m"'''
ABSURD += f" | 1{'0' * 400} | 0x{'f' * 3400} | 1:{'01:' * 2000}01 | {'x' * 5000} | {'x' * 300}"
"""Values that hardly a key allows, as YAML."""


@pytest.mark.parametrize("key", [*keys(), "model.width", "model.anything", "model", "data", "zzz", "0", "null"])
def test_config_absurd_values_are_one_line(load, key):
    """Each is refused with its place, or has a text that can be written and read again, and sizes that can be used."""
    section, _, name = key.partition(".")
    for value in ABSURD.split(" | "):
        text = f"{section}: {{{name}: {value}}}" if name else f"{key}: {value}"
        try:
            config = load(text)
            read_options(config, Options)
        except SharedError as error:
            message = str(error)
        else:
            if section != "model":  # what the class of a workload allows is its own matter
                flat = config.flat()
                assert load(yaml.safe_dump(config.model_dump(), allow_unicode=True)).flat() == flat, text
                assert all(number <= 2**63 for number in flat.values() if type(number) is int), text
            continue
        assert message.startswith(("0.yaml:1: ", "0.yaml: ", "config: ")), text
        assert len(message) < 1500, text


@pytest.mark.parametrize("text", ["20241127", "1e5", "on", "null", "2024-11-27", "007", ".5", "~"])
def test_config_words_for_text_stay_text(load, text):
    keys = ("run.folder", "data.train", "data.val", "log.wandb", "model.note")
    config = load(words=tuple(f"{key}={text}" for key in keys))
    note = None if text in ("null", "~") else text
    values = (config.run.folder, config.data.train, config.data.val, config.log.wandb)
    path = str(Path(text).expanduser())
    assert (*values, read_options(config, Options).note) == (path, path, path, text, note)
    if text[0].isalnum():
        assert load(words=(f"run.name={text}",)).run.name == text
    config = load(words=("data.train=[1.h5, b]", "run.folder='1'", "log.wandb=", "model.label=5", "model.anything=5"))
    options = read_options(config, Options)
    assert (config.data.train, config.run.folder, config.log.wandb) == (["1.h5", "b"], "1", "")
    assert (options.label, options.anything) == (5, 5)


def test_config_names_that_yaml_reads_as_others_are_text(load):
    config = load(
        "workload: on\nrun: {folder: 2024-11-27}\ndata: &data {fields: {on: no, 1: 1e3}, train: [2024, ~x, .5]}",
        "data: {<<: {fields: {yes: 007}}, val: 1_000, train: {2024: 2, on: 1}}",
    )
    assert (config.workload, config.run.folder, config.data.val) == ("on", "2024-11-27", "1_000")
    assert (config.data.fields, config.data.train) == ({"yes": "007"}, {"2024": 2, "on": 1})
    assert load("data: {train: [2024, on, no.h5], fields: {on: no, 1: 1e3}}").data.train == ["2024", "on", "no.h5"]
    words = ("data.train=[2024, on]", "data.fields={x: on, y: no}", "workload=no")
    config = load(words=words)
    assert (config.workload, config.data.train, config.data.fields) == ("no", ["2024", "on"], {"x": "on", "y": "no"})


@pytest.mark.parametrize("kind", ["file", "word"])
def test_config_paths_begin_in_the_home_folder(load, monkeypatch, kind):
    monkeypatch.setenv("HOME", "/home/me")
    paths = {"train": "~/a.h5::/train", "val": ["~/b-*.h5", "c/~.h5", "https://a/~b"], "cache": "~/cache"}
    trees = {"data": paths, "run": {"folder": "~"}}, {"data": {"train": {"~/a.h5": 1, "b.h5": 2}}}
    for tree in trees:
        pairs = [(f"{name}.{key}", value) for name, section in tree.items() for key, value in section.items()]
        words = tuple(f"{key}={json.dumps(value)}" for key, value in pairs)
        config = load(yaml.safe_dump(tree)) if kind == "file" else load(words=words)
        if len(tree) == 2:
            assert (config.data.train, config.data.cache) == ("/home/me/a.h5::/train", "/home/me/cache")
            assert config.data.val == ["/home/me/b-*.h5", "c/~.h5", "https://a/~b"]
            assert config.run.folder == "/home/me"
    assert config.data.train == {"/home/me/a.h5": 1, "b.h5": 2}
    with pytest.raises(SharedError, match="data.train is .*; it should name each file once"):
        load("data: {train: {~/a.h5: 1, /home/me/a.h5: 2}}")


def test_config_share_of_a_long_number_is_a_name(load):
    assert load("data: {val: 12.5 %, train: [s3://a/" + "b" * 300 + "]}").data.val_share == 0.125
    assert load(words=(f"data.val={'9' * 200}%",)).data.val_share is None


def test_config_help_shows_the_examples_of_the_script(load, capsys, monkeypatch):
    monkeypatch.setattr(sys.modules["__main__"], "__doc__", "Train.\n\npython train.py data.echo=2   an example")
    with pytest.raises(SystemExit, match="0"):
        load_config(["--help"])
    assert "\npython train.py data.echo=2   an example\n" in capsys.readouterr().out


def test_config_flag_of_the_old_launcher_is_ignored(load):
    assert load(words=("--local-rank=1", "optim.lr=1")).optim.lr == 1


def test_config_tasks_of_srun_train_only_with_torchrun(load, monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "2")
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert load(words=("run.check=true",)).run.check  # as launch/node.sh on each node
    with pytest.raises(SharedError, match="srun started 2 tasks"):
        load()


def test_config_missing_names_the_folder_of_the_project(load):
    Path("config.yaml").unlink()
    with pytest.raises(
        SharedError, match=rf"config.yaml does not exist .*; start it in {re.escape(str(Path.cwd()))}, or"
    ):
        load_config([])


def test_config_of_another_workload_is_one_line(load):
    text = "workload: images\nmodel: {a: 1, b: 2, note: 3}"
    with pytest.raises(SharedError, match=r"^workload=other has no model.a, model.b of the file; add 'model=\{\}' to"):
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
    told = "runs/7/config-10.yaml is resumed; the code that will be imported: workload=minimal data.dataset=mine:Rows\n"
    assert capsys.readouterr().out == told
    assert (resumed.run.folder, resumed.run.name, resumed.run.resume) == ("runs", "7", "auto")
    assert (resumed.optim.lr, resumed.train.epochs, resumed.data.batch_size) == (0.5, 7, 8)


def test_messages_of_config(compare_messages, load):
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    Path("bare.yaml").write_text("data: {train: a.h5}")
    Path("empty.yaml").touch()

    calls = {text: partial(load, text) for text in MISTAKES_IN_A_FILE}
    calls["nested too deeply"] = partial(load, "{" * 1000)
    calls["long names"] = partial(load, f"run: {{folder: {'x' * 256}}}\ndata: {{cache: {'é' * 128}}}")
    calls["too large"] = partial(load, "#" * 2**20 + "#")
    calls["aliases of aliases"] = partial(load, bomb("[{}]"))
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
