import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import ROOT, run_train, write_minimal
from pydantic import Field

from fastgpu.process.config import Config, Count, Section
from fastgpu.process.config_loader import keys, load_config, read_options
from fastgpu.process.launch import UserError

BASE = "workload: minimal\ndata: {train: a.h5, val: b.h5, fields: {x: x, y: y}}\n"
"""The keys that are required."""


class Options(Section):
    """Settings of a made-up workload, with defaults of several types."""

    width: Count = 32
    """Channels of the first stage."""
    flip: bool = False
    """Mirror at random."""
    folder: Path = Path("here")
    widths: list[int] = Field(default_factory=lambda: [1, 2])
    anything: Any = None


class NoOptions(Section):
    """A workload without settings."""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def load(*texts: str, words: tuple[str, ...] = ()) -> Config:
    """The required keys in config.yaml, then the files 0.yaml, 1.yaml, ... with these texts, then the command line."""
    Path("config.yaml").write_text(BASE)
    arguments = ["--config", "config.yaml"]
    for number, text in enumerate(texts):
        Path(f"{number}.yaml").write_text(text)
        arguments += ["--config", f"{number}.yaml"]
    return load_config([*arguments, *words])


# ---------------------------------------------------------------------------------------------- what wins


def test_later_files_win_and_the_command_line_wins_over_all():
    words = ("data.tier=disk", "optim.lr=1e-3", "data.echo=2.5")
    config = load("data:\n  batch_size: 8\n  echo: 2", "data: {batch_size: 16}", words=words)
    assert (config.data.batch_size, config.data.echo, config.data.tier, config.optim.lr) == (16, 2.5, "disk", 1e-3)


def test_a_mapping_is_replaced_and_not_mixed_with_the_one_before():
    by_file = load("data: {echo: 2}", "data: {fields: {items: z}}")
    by_word = load("data: {echo: 2}", words=("data.fields={items: z}",))
    assert by_file.data == by_word.data
    assert by_file.data.fields == {"items": "z"}


def test_settings_of_the_workload_are_merged_key_by_key_and_typed():
    config = load("model: {width: 8, flip: true}", "model: {width: 16}", words=("model.flip=false",))
    options = read_options(config, Options)
    assert (options.width, options.flip) == (16, False)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", "0.001", ".001", "+1e-03"])
def test_numbers_with_an_exponent_are_numbers(text):
    assert load(f"optim: {{lr: {text}}}").optim.lr == 1e-3


def test_the_current_folder_has_the_config_if_none_is_named():
    Path("config.yaml").write_text(BASE)
    assert load_config(["data.batch_size=8"]).data.train == "a.h5"


def test_anchors_and_merge_keys_work():
    config = load("data: &data {batch_size: 8}\nmodel: {a: &a [1, 2], b: *a, c: {<<: *data, echo: 2}}")
    assert config.model == {"a": [1, 2], "b": [1, 2], "c": {"batch_size": 8, "echo": 2}}


def test_a_run_is_resumed_with_the_config_that_it_recorded():
    recorded = Config.model_validate(yaml.safe_load(BASE)).resolved(run={"name": "other"}, optim={"lr": 0.5})
    run = Path("runs/7")
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(recorded.resolved(optim={"lr": 0.1}).model_dump()))
    (run / "config-2.yaml").write_text(yaml.safe_dump(recorded.model_dump()))
    config = load_config(["run.resume=runs/7", "train.epochs=7"])
    assert (config.run.folder, config.run.name, config.run.resume) == ("runs", "7", "auto")
    assert (config.optim.lr, config.train.epochs) == (0.5, 7)
    with pytest.raises(UserError, match="run.resume is runs/b, which is no run with a config.yaml; usage"):
        load_config(["run.resume=runs/b"])


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  batch_siz: 5", r"0.yaml:2: unknown key data.batch_siz \(did you mean data.batch_size\?\)"),
        ("batch_size: 5", r"0.yaml:1: unknown key batch_size \(did you mean data.batch_size\?\)"),
        ("optm: {lr: 5}", r"0.yaml:1: unknown key optm \(did you mean optim\?\)"),
        ("log:\n  zzz: 5", r"0.yaml:2: unknown key log.zzz \(allowed are: log.every_steps, log.wandb\)"),
        ("data: {batch_size: 0}", "0.yaml:1: data.batch_size is 0; it should be greater than or equal to 1"),
        ("data: {batch_size: '512'}", 'data.batch_size is "512"; it should be a valid integer'),
        ("data: {batch_size: true}", "data.batch_size is true; it should be a valid integer"),
        ("data: {batch_size: 1.5}", "data.batch_size is 1.5; it should be a valid integer"),
        ("data: {tier: devic}", r"data.tier is \"devic\"; it should be 'device', 'host' or 'disk' or be 'auto'$"),
        ("data: {pool_batches: x}", "pool_batches is \"x\"; it should be a valid integer or be 'auto'"),
        ("data: {fields: {images: 3}}", "data.fields is 3; it should be a valid string"),
        ("optim: {lr: .nan}", "optim.lr is NaN"),
        ("data: 5", "data is 5; it should be a valid dictionary"),
        ("data:", "data is null; it should be a valid dictionary"),
        ("model: 5", "model is 5; it should be a valid dictionary"),
        ("run: {name: ../x}", 'run.name is "../x"; it should match pattern'),
        ("data:\n  echo: 1\n  echo: 2", r"0.yaml:3: data.echo stands twice, first in line 2"),
        ("data: {echo: 1}\ndata: {echo: 2}", "0.yaml:2: data stands twice"),
        ("- a", r"0.yaml: holds \['a'\]; allowed are sections"),
        ("data: [", "0.yaml:1: expected the node content"),
        ("run:\n  seed: 2026-13-45", "0.yaml: month must be in 1..12"),
        ("run: {folder: !!python/object:os.system x}", "0.yaml:1: could not determine a constructor"),
        ("a: \0", "0.yaml: unacceptable character"),
        ("model: {widht: 3}", r"0.yaml:1: unknown key model.widht \(did you mean model.width\?\)"),
        ("model: {lr: 1}", r"0.yaml:1: unknown key model.lr \(did you mean optim.lr\?\)"),
        ("model: {latent_dim: 8}", r"unknown key model.latent_dim \(allowed are: model.width, model.flip"),
        ("model:\n  width: wide", '0.yaml:2: model.width is "wide"; it should be a valid integer$'),
    ],
)
def test_a_mistake_in_a_file_is_one_line_with_place_key_value_and_cure(text, message):
    with pytest.raises(UserError, match=message) as caught:
        read_options(load(text), Options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.batch_siz=3"], r"command line: unknown key data.batch_siz \(did you mean data.batch_size\?\)"),
        (["zzz.lr=3"], r"unknown key zzz \(allowed are: workload, run, data, loader, model, optim, train, dist, log\)"),
        (["run.resume="], "run.resume is null; it should be 'never' or 'auto'"),
        (["optm.lr=3"], r"command line: unknown key optm \(did you mean optim\?\)"),
        (["model.width=0"], "command line: model.width is 0; it should be greater than or equal to 1$"),
        (["foo"], r"command line: foo has no value; usage: \[--config FILE\]"),
        (["--nproc-per-node=gpu"], "arguments: --nproc-per-node=gpu; usage: .*, after the flags of torchrun$"),
        (["--config"], "--config: expected one argument; usage"),
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read .*No such file or directory"),
        (["--config", "."], r"\. cannot be read .*Is a directory"),
        (["--config", "binary.yaml"], "binary.yaml cannot be read .*utf-8"),
        (["data.echo={a: 1, a: 2}"], "data.echo.a stands twice"),
        (["=1"], "unknown key"),
        (["data.fields.x=y"], r"command line: unknown key data.fields.x \(did you mean data.fields\?\)"),
        (["optim.lr=1", "optim.name=sgd", "optim.lr=2"], "command line: optim.lr is given twice; usage"),
    ],
)
def test_a_mistake_on_the_command_line(words, message):
    Path("config.yaml").write_text(BASE)
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=message):
        read_options(load_config(words), Options)


def test_required_keys_and_sections_that_are_missing_are_named():
    Path("config.yaml").write_text("data: {train: a.h5}")
    with pytest.raises(UserError) as error:
        load_config([])
    for line, key in zip(str(error.value).splitlines(), ("workload", "data.val", "data.fields"), strict=True):
        assert f"{key} is missing; set it in the file or on the command line" in line
    Path("config.yaml").write_text("workload: minimal")
    with pytest.raises(UserError, match="data is missing"):
        load_config([])


def test_each_mistake_has_its_own_line():
    with pytest.raises(UserError) as error:
        load("data: {batch_size: 0}\nlog: {every: 3}")
    first, second = str(error.value).splitlines()
    assert re.search("0.yaml:1: data.batch_size is 0", first)
    assert re.search("0.yaml:2: unknown key log.every", second)


def test_a_workload_without_settings_allows_none():
    with pytest.raises(UserError, match=r"unknown key model.zzz \(allowed are: none\)"):
        read_options(load("model: {zzz: 8}"), NoOptions)


def test_a_typo_ends_the_program_before_torch_is_imported(folder):
    write_minimal(folder)
    trap = folder / "trap"
    trap.mkdir()
    (trap / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = run_train("data.batch_siz=3", cwd=folder, PYTHONPATH=str(trap))
    assert done.returncode == 2
    assert done.stderr == "error: command line: unknown key data.batch_siz (did you mean data.batch_size?)\n"
    done = run_train("data.batch_size=32", cwd=folder, PYTHONPATH=str(trap))
    assert done.stderr == "torch was imported\n"  # the trap works


# ---------------------------------------------------------------------------------------------- help


def test_help_names_the_page_of_all_keys(capsys):
    with pytest.raises(SystemExit) as end:
        load_config(["--help"])
    assert end.value.code == 0
    assert "docs/config.md explains every key" in capsys.readouterr().out
    assert (ROOT / "docs/config.md").exists()


def test_every_key_has_a_description_and_few_are_required():
    described = keys()
    assert all(field.description for field in described.values())
    required = {key for key, field in described.items() if field.is_required()}
    assert required == {"workload", "data.train", "data.val", "data.fields"}
    assert [*keys(Options, "model.")] == ["model.width", "model.flip", "model.folder", "model.widths", "model.anything"]
