import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness import run_train, write_minimal
from pydantic import Field

from fastgpu.process.config import Config, Count, Section
from fastgpu.process.config_loader import FindOptions, keys, load_config, read_options
from fastgpu.process.launch import UserError

BASE = "workload: minimal\ndata: {train: a.h5, val: b.h5, fields: {x: x, y: y}}\n"
"""The keys that are required."""


class Options(Section):
    """Settings of a made-up workload."""

    width: Count = 32
    """Channels of the first stage."""
    flip: bool = False
    """Mirror at random."""


class NoOptions(Section):
    """A workload without settings."""


def load(folder: Path, *texts: str, overrides: tuple[str, ...] = ()) -> Config:
    """The required keys, then the files 0.yaml, 1.yaml, ... with these texts, then the command line."""
    arguments = ["--config", str(folder / "base.yaml")]
    (folder / "base.yaml").write_text(BASE)
    for number, text in enumerate(texts):
        path = folder / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        arguments += ["--config", str(path)]
    return load_config([*arguments, *overrides])


def error_of(
    folder: Path, text: str = "", overrides: tuple[str, ...] = (), options: type[Section] | None = None
) -> str:
    """The message about a wrong file or command line; with `options`, about the section `model`."""
    try:
        config = load(folder, text, overrides=overrides)
        read_options(config, options or Options)
    except UserError as error:
        return str(error)
    pytest.fail("nothing was refused")


# ---------------------------------------------------------------------------------------------- what wins


def test_later_files_win_and_the_command_line_wins_over_all(tmp_path):
    config = load(
        tmp_path,
        "data: {batch_size: 8, echo: 2}",
        "data: {batch_size: 16}",
        overrides=("data.tier=disk", "optim.lr=1e-3", "data.echo=2.5"),
    )
    assert (config.data.batch_size, config.data.echo, config.data.tier, config.optim.lr) == (16, 2.5, "disk", 1e-3)


def test_a_mapping_is_replaced_and_not_mixed_with_the_one_before(tmp_path):
    by_file = load(tmp_path, "data: {echo: 2}", "data: {fields: {items: z}}")
    by_word = load(tmp_path, "data: {echo: 2}", overrides=("data.fields={items: z}",))
    assert by_file.data == by_word.data
    assert by_file.data.fields == {"items": "z"}


def test_the_settings_of_the_workload_are_merged_key_by_key(tmp_path):
    config = load(tmp_path, "model: {width: 8, flip: true}", "model: {width: 16}", overrides=("model.flip=false",))
    assert config.model == {"width": 16, "flip": False}


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", "0.001", ".001", "+1e-03"])
def test_numbers_with_an_exponent_are_numbers(tmp_path, text):
    assert load(tmp_path, f"optim: {{lr: {text}}}").optim.lr == 1e-3


def test_the_current_folder_has_the_config_if_none_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(BASE)
    assert load_config(["data.batch_size=8"]).data.train == "a.h5"


def test_origins_say_where_a_key_was_set_last(tmp_path):
    config = load(tmp_path, "data:\n  echo: 2\n  tier: disk", overrides=("data.tier=host",))
    assert config.origins["data.echo"].endswith("0.yaml:2")
    assert config.origins["data.tier"] == "command line"


# ---------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  batch_siz: 5", r"0\.yaml:2: unknown key data.batch_siz \(did you mean data.batch_size\?\)"),
        ("batch_size: 5", r"0\.yaml:1: unknown key batch_size \(did you mean data.batch_size\?\)"),
        ("optm: {lr: 5}", r"0\.yaml:1: unknown key optm \(did you mean optim\?\)"),
        ("data:\n  zzz: 5", r"0\.yaml:2: unknown key data.zzz \(allowed are: data.train, .*data.echo.*\)"),
        ("log:\n  zzz: 5", r"0\.yaml:2: unknown key log.zzz \(allowed are: log.every_steps, log.wandb\)"),
        ("data: {batch_size: 0}", "data.batch_size is 0; it should be greater than or equal to 1"),
        ("data: {batch_size: abc}", 'data.batch_size is "abc"; it should be a valid integer'),
        ("data: {batch_size: '512'}", 'data.batch_size is "512"; it should be a valid integer'),
        ("data: {batch_size: true}", "data.batch_size is true; it should be a valid integer"),
        ("data: {batch_size: 1.5}", "data.batch_size is 1.5; it should be a valid integer"),
        ("data: {tier: devic}", r"should be 'device', 'host' or 'disk' or be 'auto' \(did you mean \"device\"\?\)"),
        ("data: {pool_batches: x}", "pool_batches is \"x\"; it should be a valid integer or be 'auto'"),
        ("data: {echo: 0.5}", "data.echo is 0.5; it should be greater than or equal to 1"),
        ("optim: {lr: .nan}", "optim.lr is NaN"),
        ("optim: {lr: -1}", "optim.lr is -1; it should be greater than 0"),
        ("data: 5", "data is 5; it should hold keys of its own"),
        ("data:", "data is null; it should hold keys of its own"),
        ("model: 5", "model is 5; it should hold keys of its own"),
        ("run: {name: ../x}", 'run.name is "../x"; it should match pattern'),
        ("data:\n  echo: 1\n  echo: 2", r"0\.yaml:3: data.echo stands twice, first in line 2"),
        ("data: {echo: 1}\ndata: {echo: 2}", r"0\.yaml:2: data stands twice"),
        ("data: [", r"0\.yaml:1: is not YAML"),
        ("data: {batch_size: 2147483648}", "it should be less than or equal to 2147483647"),
        ("- a", r"0\.yaml: holds \['a'\]; allowed are sections"),
        ("data: {fields: {images: 3}}", "data.fields is 3; it should be a valid string"),
        ("workload: Images", 'workload is "Images"; it should match pattern'),
    ],
)
def test_a_mistake_in_a_file_names_place_key_value_and_cure(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model:\n  a: &a [*a]", r"0\.yaml(:\d+)?: is not YAML: "),
        ("workload: minimal\n? [a, b]\n: 1", r"0\.yaml"),
        ("run:\n  seed: 2026-13-45", r"0\.yaml: is not YAML: month must be in 1..12"),
        ("data: {batch_size: " + "9" * 5000 + "}", r"0\.yaml: is not YAML: "),
        ("run: {folder: !!python/object:os.system x}", r"0\.yaml:1: is not YAML: could not determine a constructor"),
        ("run: {seed: !!int abc}", r"0\.yaml: is not YAML: .*abc"),
        ("a: \0", "0.yaml: is not YAML: unacceptable character"),
    ],
)
def test_what_is_no_value_is_one_short_line(tmp_path, text, message):
    with pytest.raises(UserError, match=message) as caught:
        load(tmp_path, text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_anchors_and_merge_keys_of_ordinary_size_work(tmp_path):
    config = load(tmp_path, "data: &data {batch_size: 8}\nmodel: {a: &a [1, 2], b: *a, c: {<<: *data, echo: 2}}")
    assert config.model == {"a": [1, 2], "b": [1, 2], "c": {"batch_size": 8, "echo": 2}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.batch_siz=3"], r"command line: unknown key data.batch_siz \(did you mean data.batch_size\?\)"),
        (["foo"], '"foo" is not understood'),
        (["--data.batch_size=3"], "is not understood: use --config FILE"),
        (["--config"], "is not understood"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["--config", "."], r"\.: is not a file"),
        (["--config", "/dev/zero"], "/dev/zero: is not a file"),
        (["data.echo={a: 1, a: 2}"], "data.echo.a stands twice"),
        (["=1"], "unknown key"),
        (["optm.lr=3"], r"command line: unknown key optm \(did you mean optim\?\)"),
        (["optim.lr=1", "optim.name=sgd", "optim.lr=2"], "command line: optim.lr is given twice: keep one"),
        (["--nproc-per-node=gpu"], "--nproc-per-node=gpu is a flag of torchrun, .*: torchrun --standalone --nproc-per"),
        (["data.val=10"], r"data.val is 10; .* \(did you mean 10%\?\)"),
        (["data.val=0.25"], r"data.val is 0.25; .* \(did you mean 25%\?\)"),
        (["--nproc_per_node", "2"], "--nproc_per_node is a flag of torchrun"),
    ],
)
def test_a_mistake_on_the_command_line(tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(BASE)
    with pytest.raises(UserError, match=message):
        load_config(words)


def test_a_file_that_is_not_text(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"is not UTF-8|is not YAML"):
        load_config(["--config", str(tmp_path / "x.yaml")])


def test_a_path_that_is_not_utf8_is_told_as_such(tmp_path):
    (tmp_path / "x.yaml").write_text("")
    with pytest.raises(UserError, match=r"data\.train is .*which is not UTF-8; rename the file"):
        load_config(["--config", str(tmp_path / "x.yaml"), "data.train=/data/\udcff.h5"])


def test_required_keys_that_are_missing_are_named(tmp_path):
    (tmp_path / "x.yaml").write_text("data: {train: a.h5}")
    with pytest.raises(UserError) as error:
        load_config(["--config", str(tmp_path / "x.yaml")])
    lines = str(error.value).splitlines()
    for line, key in zip(lines, ("workload", "data.val", "data.fields"), strict=True):
        assert f"{key} is missing; set it in the file or on the command line" in line


def test_a_section_with_required_keys_that_is_missing_is_named(tmp_path):
    (tmp_path / "x.yaml").write_text("workload: minimal")
    with pytest.raises(UserError, match="data is missing"):
        load_config(["--config", str(tmp_path / "x.yaml")])


def test_each_mistake_has_its_own_line(tmp_path):
    message = error_of(tmp_path, "data: {batch_size: 0}\nlog: {every: 3}")
    first, second = message.splitlines()
    assert re.search(r"0\.yaml:1: data.batch_size is 0", first)
    assert re.search(r"0\.yaml:2: unknown key log.every", second)


# ---------------------------------------------------------------------------------------------- of the workload


def test_settings_of_the_workload_are_read_and_typed(tmp_path):
    options = read_options(load(tmp_path, "model: {width: 8}", overrides=("model.flip=true",)), Options)
    assert (options.width, options.flip) == (8, True)


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("model:\n  widht: 3", (), r"0\.yaml:2: unknown key model.widht \(did you mean model.width\?\)"),
        ("", ("model.widht=3",), r"command line: unknown key model.widht \(did you mean model.width\?\)"),
        ("model: {lr: 1}", (), r"0\.yaml:1: unknown key model.lr \(did you mean optim.lr\?\)"),
        ("model: {batch_size: 1}", (), r"0\.yaml:1: unknown key model.batch_size \(did you mean data.batch_size\?\)"),
        (
            "model:\n  latent_dim: 8",
            (),
            r"0\.yaml:2: unknown key model.latent_dim \(allowed are: model.width, model.flip",
        ),
        ("model:\n  width: wide", (), r'0\.yaml:2: model.width is "wide"; it should be a valid integer$'),
        ("", ("model.width=0",), r"command line: model.width is 0; it should be greater than or equal to 1$"),
        ("model: {flip: 1}", (), r"0\.yaml:1: model.flip is 1; it should be a valid boolean$"),
    ],
)
def test_a_mistake_in_the_settings_of_the_workload_has_the_same_form(tmp_path, text, overrides, message):
    line = error_of(tmp_path, text, overrides)
    assert len(line.splitlines()) == 1
    assert re.search(message, line)


def test_a_workload_without_settings_says_so(tmp_path):
    message = error_of(tmp_path, "model: {zzz: 8}", options=NoOptions)
    assert message.endswith("0.yaml:1: unknown key model.zzz (this workload has no settings)")


def test_two_mistakes_in_the_settings_of_the_workload_are_two_lines(tmp_path):
    first, second = error_of(tmp_path, "model:\n  width: wide\n  flop: true").splitlines()
    assert re.search(r"0\.yaml:2: model.width is", first)
    assert re.search(r"0\.yaml:3: unknown key model.flop \(did you mean model.flip\?\)", second)


# ---------------------------------------------------------------------------------------------- help


@pytest.fixture
def help_of(tmp_path, monkeypatch, capsys) -> Callable[..., str]:
    """help_of(find_options) returns what --help prints with a config.yaml of the required keys."""

    def read(find_options: FindOptions | None = None, text: str = BASE) -> str:
        monkeypatch.chdir(tmp_path)
        Path("config.yaml").write_text(text)
        with pytest.raises(SystemExit) as end:
            load_config(["--help"], find_options)
        assert end.value.code == 0
        return capsys.readouterr().out

    return read


def test_help_explains_every_key_and_its_default(help_of):
    text = help_of()
    words = " ".join(text.split())
    for key, (default, description) in keys().items():
        assert f"  {key}={default}\n" in text
        assert description
        assert " ".join(description.split()) in words
    assert "data.train=(required)" in text
    assert "None" not in text


def test_help_lists_the_settings_of_the_workload_with_their_docstrings(help_of):
    names = []

    def find_options(name: str) -> type[Section]:
        names.append(name)
        return Options

    text = help_of(find_options)
    assert names == ["minimal"]
    assert "  model.width=32\n      Channels of the first stage." in text
    assert "  model.flip=false\n      Mirror at random." in text


def test_help_works_before_a_workload_is_chosen(help_of):
    text = help_of(pytest.fail, "data: {batch_size: 3}")
    assert "data.batch_size=64" in text


def test_help_shows_defaults_of_any_type(help_of):
    class Strange(Section):
        folder: Path = Path("here")
        widths: list[int] = Field(default_factory=lambda: [1, 2])
        anything: Any = None

    text = help_of(lambda _: Strange)
    assert 'model.folder="here"' in text
    assert "model.widths=[1, 2]" in text
    assert "model.anything=null" in text


def test_a_typo_ends_the_program_before_torch_is_imported(tmp_path):
    write_minimal(tmp_path)
    trap = tmp_path / "trap"
    trap.mkdir()
    (trap / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = run_train("data.batch_siz=3", cwd=tmp_path, PYTHONPATH=str(trap))
    assert done.returncode == 2
    assert done.stderr == "error: command line: unknown key data.batch_siz (did you mean data.batch_size?)\n"
    done = run_train("data.batch_size=32", cwd=tmp_path, PYTHONPATH=str(trap))
    assert done.stderr == "torch was imported\n"  # the trap works


def test_a_run_is_resumed_with_the_config_that_it_recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded = Config.model_validate(yaml.safe_load(BASE)).resolved(run={"name": "other"}, optim={"lr": 0.5})
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump(recorded.resolved(optim={"lr": 0.1}).model_dump()))
    (run / "config-2.yaml").write_text(yaml.safe_dump(recorded.model_dump()))
    config = load_config(["run.resume=runs/a", "train.epochs=7"])
    assert (config.run.folder, config.run.name, config.run.resume) == ("runs", "a", "auto")
    assert (config.optim.lr, config.train.epochs) == (0.5, 7)
    with pytest.raises(
        UserError, match="run.resume is runs/b, which is no run with a config.yaml; use its folder, or auto"
    ):
        load_config(["run.resume=runs/b"])
