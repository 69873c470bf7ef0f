"""Keys are the same in the classes that declare them, in config files, in their page and schema, and in all texts."""

import ast
import json
import re
import runpy
from pathlib import Path

import jsonschema
import pytest

import workloads
from fastgpu.process.config import Config
from fastgpu.process.config_loader import keys, load_config
from support import PROJECT, ROOT
from support.projects import EXAMPLES
from tools import config_page, config_schema
from tools.facts import tracked

NOT_SHIPPED = {
    *("run.check", "run.deterministic", "log.wandb", "loader.num_workers", "loader.timeout_s"),
    *("data.val_fields", "data.balance", "data.dataset", "data.image_size", "data.min_crop_scale"),
    *(
        "data.window",
        "data.stride",
        "data.pool_batches",
        "data.canonical_ranks",
        "data.cache",
        "model.timm",
        "model.pretrained",
    ),
    *("dist.strategy", "dist.device", "dist.find_unused_parameters", "dist.timeout_s"),
}
"""Keys whose defaults are right for most, or that belong on a command line: docs/config.md has them."""


def named_in(name: str) -> dict[str, object]:
    """{dotted key that a file names: value}"""
    tree = load_config(["--config", str(PROJECT / name)]).model_dump(exclude_unset=True)
    workload = {"workload": tree.pop("workload")}
    return workload | {f"{name}.{key}": value for name, section in tree.items() for key, value in section.items()}


@pytest.mark.parametrize(
    ("name", "workload", "recipe"),
    [
        ("config.yaml", "images", ""),
        ("config.own.yaml", "minimal", ""),
        ("config.recsys.yaml", "recsys", "configs/recsys.yaml"),
    ],
)
def test_keys_of_a_shipped_file(name, workload, recipe):
    declared = keys() | keys(workloads.load(workload).Options, "model.")
    values = named_in(name)
    of_recipe = named_in(recipe) if recipe else {}
    assert values["workload"] == workload
    assert values.keys() == (declared.keys() - NOT_SHIPPED) | of_recipe.keys()
    assert values | of_recipe == values
    for key in values.keys() - of_recipe.keys():
        assert declared[key].is_required() or values[key] == declared[key].get_default(call_default_factory=True), key
    shared = [key for key in named_in("config.yaml") if not key.startswith("model.")]
    assert [key for key in values if not key.startswith(("model.", "data.val_fields"))] == shared


def test_keys_page_is_up_to_date(capsys):
    config_page.main()
    assert capsys.readouterr().out == (PROJECT / "docs/config.md").read_text()


def test_keys_schema_is_up_to_date_and_fits(capsys):
    """It is the file that the first line of each config names, and fits each of them. The section `model` is open."""
    config_schema.main()
    schema = json.loads((PROJECT / "docs/config.schema.json").read_text())
    assert json.loads(capsys.readouterr().out) == schema
    for path in [*PROJECT.glob("config*.yaml"), *PROJECT.glob("configs/*.yaml")]:
        (named,) = re.findall(r"\A# yaml-language-server: \$schema=(.+)\n", path.read_text())
        assert (path.parent / named).resolve() == PROJECT / "docs/config.schema.json"
        jsonschema.validate(load_config(["--config", str(path)]).model_dump(exclude_unset=True), schema)
    jsonschema.validate({"model": {"mine": [1]}, "data": {"tier": "disk"}}, schema)
    for mistake in ({"modell": {}}, {"data": {"tear": "disk"}}, {"data": {"tier": "disc"}}, {"train": {"epochs": 0}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(mistake, schema)


OPTIONS = [workloads.load(path.stem).Options for path in sorted(PROJECT.glob("workloads/[a-z]*.py"))]
OPTIONS += [
    runpy.run_path(str(path))["Workload"].Options
    for path in sorted(EXAMPLES.glob("*.py"))
    if "class Workload" in path.read_text()
]
KNOWN_KEYS = {"workload", *keys()} | {key for options in OPTIONS for key in keys(options, "model.")}
FILE_SUFFIX = re.compile("py|h5|hdf5|yaml|yml|json|jsonl|html|npy|npz|txt|md|pt|pt2|onnx|safetensors|png|csv|bin")
HISTORY = ("CHANGELOG.md", "bench/results/", "tests/goldens/", "tests/faults/")
"""These name keys of before, and wrong ones."""
NOT_KEYS = {"model.freeze", "model.freez", "model.dropuot", "train.build"}
"""Keys of the workloads that docs/tutorial.md writes, a misspelt one, and a function."""


def text_of(path: Path) -> str:
    """What a file says to people: a document or config file as a whole, of code the strings and comments."""
    if path.suffix != ".py":
        return path.read_text() if path.suffix in (".md", ".yaml", ".yml", ".sh") else ""
    nodes = ast.walk(ast.parse(path.read_text()))
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*strings, *re.findall(r"(?m)#.*$", path.read_text())])


def test_keys_named_in_text_exist():
    """Keys are words like `data.tier`, but no tags (`data/tier`), file names, attributes (`cfg.data.tier`) or calls."""
    key = re.compile(rf"(?<![\w./-])((?:{'|'.join(Config.model_fields)})\.[a-z][a-z0-9_]*)(?![\w(/-]|\.\w)")
    for name in tracked():
        if not name.startswith(HISTORY) and not re.search("/test_|/messages.yaml", name):  # wrong keys on purpose
            words = {*key.findall(text_of(ROOT / name))} - KNOWN_KEYS - NOT_KEYS
            assert [word for word in words if not FILE_SUFFIX.fullmatch(word.split(".")[1])] == [], name
