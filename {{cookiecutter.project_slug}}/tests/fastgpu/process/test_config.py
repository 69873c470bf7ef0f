import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ROOT, run_train

from fastgpu.process.config import Config
from fastgpu.process.config_loader import describe, flat, keys, load_config
from fastgpu.process.launch import UserError


def load(tmp_path: Path, *texts: str, overrides: tuple[str, ...] = ()) -> Config:
    arguments = []
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text, encoding="utf-8")
        arguments += ["--config", str(path)]
    return load_config([*arguments, *overrides])


def test_schema_file_is_that_of_the_models():
    assert json.loads((ROOT / "config.schema.json").read_text()) == Config.model_json_schema()


def test_every_key_has_an_explanation_in_the_help():
    text = describe()
    assert all(f"{key}=" in text for key in keys())
    assert "None" not in text


def test_a_mapping_is_replaced_and_not_mixed_with_the_one_before(tmp_path):
    assert load(tmp_path, "data: {fields: {images: x, labels: y}, echo: 2}", "data: {fields: {items: z}}").data == (
        load(tmp_path, "data: {echo: 2}", overrides=("data.fields={items: z}",)).data
    )
    config = load(tmp_path, "data: {fields: {images: x, labels: y}}", overrides=("data.fields={items: z}",))
    assert config.data.fields == {"items": "z"}


def test_later_files_win_and_the_command_line_wins_over_all(tmp_path):
    config = load(
        tmp_path,
        "data: {batch_rows: 8, echo: 2}",
        "data: {batch_rows: 16}",
        overrides=("data.tier=disk", "optim.lr=1e-3", "data.echo=2.5"),
    )
    assert (config.data.batch_size, config.data.echo, config.data.tier, config.optim.lr) == (16, 2.5, "disk", 1e-3)


@pytest.mark.parametrize("text", ["1e-3", "1E-3", "1.0e-3", "1.e-3", "0.001", ".001", "+1e-03"])
def test_numbers_with_an_exponent_are_numbers(tmp_path, text):
    assert load(tmp_path, f"optim: {{lr: {text}}}").optim.lr == 1e-3


def test_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        Config().data.batch_size = 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("data:\n  batch_row: 5", r"0\.yaml:2: unknown key data.batch_row \(did you mean data.batch_size\?\)"),
        ("batch_rows: 5", r"0\.yaml:1: unknown key batch_rows \(did you mean data.batch_size\?\)"),
        ("data:\n  zzz: 5", r"0\.yaml:2: unknown key data.zzz \(allowed are: data.train, .*data.echo.*\)"),
        ("model: {lr: 1}", "unknown key model.lr .did you mean optim.lr"),
        ("data: {batch_rows: 0}", "data.batch_size is 0; it should be greater than or equal to 1"),
        ("data: {batch_rows: abc}", 'data.batch_size is "abc"; it should be a valid integer'),
        ("data: {batch_rows: '512'}", 'data.batch_size is "512"; it should be a valid integer'),
        ("data: {batch_rows: true}", "data.batch_size is true; it should be a valid integer"),
        ("data: {batch_rows: 1.5}", "data.batch_size is 1.5; it should be a valid integer"),
        ("data: {tier: devic}", r"should be 'auto', 'device', 'host' or 'disk' \(did you mean \"device\"\?\)"),
        ("data: {lanes: x}", "data.canonical_ranks is \"x\"; it should be a valid integer or be 'auto'"),
        ("data: {echo: 0.5}", "data.echo is 0.5; it should be greater than or equal to 1"),
        ("optim: {lr: .nan}", "optim.lr is NaN"),
        ("optim: {lr: -1}", "optim.lr is -1; it should be greater than 0"),
        ("data: 5", "data is 5; it should hold keys of its own"),
        ("data:", "data is null; it should hold keys of its own"),
        ("run: {name: ../x}", 'run.name is "../x"; it should match pattern'),
        ("data:\n  echo: 1\n  echo: 2", r"0\.yaml:3: data.echo stands twice, first in line 2"),
        ("data: {echo: 1}\ndata: {echo: 2}", r"0\.yaml:2: data stands twice"),
        ("data: [", r"0\.yaml:1: is not YAML"),
        ("a: &a [*a]", "unknown key a|is not YAML"),
        ("- a", r"0\.yaml: holds \['a'\]; allowed are sections"),
        ("data: {fields: {images: 3}}", "data.fields is 3; it should be a valid string"),
    ],
)
def test_bad_files_name_place_key_value_and_cure(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, text)


def test_all_mistakes_are_told_at_once(tmp_path):
    with pytest.raises(UserError) as error:
        load(tmp_path, "data: {batch_rows: 0, tier: x}\nlog: {every: 3}")
    assert all(key in str(error.value) for key in ("data.batch_size", "data.tier", "log.every"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["data.batch_row=3"], "command line: unknown key data.batch_row"),
        (["foo"], '"foo" is not understood'),
        (["--data.batch_size=3"], "is not understood: use --config FILE"),
        (["--config"], "is not understood"),
        (["--config", "nowhere.yaml"], "nowhere.yaml: No such file or directory"),
        (["--config", "."], "Is a directory"),
        (["data.echo={a: 1, a: 2}"], "data.echo.a stands twice"),
        (["=1"], "unknown key"),
    ],
)
def test_bad_arguments(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(UserError, match=message):
        load_config(arguments)


def test_not_text(tmp_path):
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"is not UTF-8|is not YAML"):
        load_config(["--config", str(tmp_path / "x.yaml")])


def test_a_typo_ends_the_program_before_torch_is_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = run_train("data.batch_row=3", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr == "error: command line: unknown key data.batch_row (did you mean data.batch_size?)\n"
    assert run_train("data.batch_size=32", PYTHONPATH=str(tmp_path)).stderr == "torch was imported\n"  # the trap works


def test_help_needs_no_torch(tmp_path):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    done = run_train("--help", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0
    assert "data.batch_size=64" in done.stdout


def test_module_prints_the_schema():
    done = subprocess.run(
        [sys.executable, "-m", "fastgpu.process.config"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == json.loads((ROOT / "config.schema.json").read_text())


def test_flat_holds_every_value():
    values = flat(Config())
    assert set(values) == set(keys())
    assert values["optim.lr"] == Config().optim.lr
