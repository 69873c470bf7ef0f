"""The config files and the page of keys agree with the classes that declare the keys."""

import subprocess
import sys
from typing import Any

import pytest
from pydantic.fields import FieldInfo
from template import PROJECT, ROOT

import workloads
from fastgpu.process.config import Config, Section
from fastgpu.process.config_loader import load_config, read_options

SHIPPED = {
    "config.yaml": {"workload": "images", "required": {"data.train", "data.val", "data.fields"}, "changed": set()},
    "config.own.yaml": {"workload": "minimal", "required": {"data.train", "data.val", "data.fields"}, "changed": set()},
    "config.recsys.yaml": {
        "workload": "recsys",
        "required": {"data.train", "data.val", "data.fields"},
        "changed": {
            "data.batch_size",
            "data.val_fields",
            "log.every_steps",
            "model.hidden_dim",
            "model.kl_anneal_steps",
            "model.latent_dim",
            "optim.lr",
            "optim.weight_decay",
            "train.epochs",
        },
    },
}
"""{file: its workload, the keys that have no default, the keys whose value is not the default}."""
RECIPES = sorted(path.relative_to(PROJECT).as_posix() for path in (PROJECT / "configs").glob("*.yaml"))


def load(name: str) -> Config:
    """A config file of the project."""
    return load_config(["--config", str(PROJECT / name)])


def tree_of(name: str) -> dict[str, Any]:
    """The keys that a config file names, as nested dicts."""
    return load(name).model_dump(exclude_unset=True)


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """{dotted key: value}."""
    values = {"workload": tree["workload"]}
    for section, content in tree.items():
        if isinstance(content, dict):
            values |= {f"{section}.{key}": value for key, value in content.items()}
    return values


def declared_keys(root: type[Section], prefix: str = "") -> dict[str, FieldInfo]:
    """{dotted key: its declaration}, without the section `model`, which the workload declares."""
    declared = {}
    for name, field in root.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            declared |= declared_keys(field.annotation, f"{name}.")
        elif name != "model":
            declared[prefix + name] = field
    return declared


NOT_SHIPPED = {
    "run.check",
    *("data.val_fields", "data.balance", "data.dataset", "data.image_size", "data.min_crop_scale", "data.pool_batches"),
    *("loader.num_workers", "loader.timeout_s"),
    *("model.timm", "model.pretrained"),
    *("dist.strategy", "dist.device", "dist.find_unused_parameters", "dist.timeout_s"),
    "log.wandb",
}
"""Keys whose defaults are right for most, or that belong on a command line: docs/config.md has them."""


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_names_every_key_with_its_default(name):
    shipped = SHIPPED[name]
    declared = declared_keys(Config) | declared_keys(workloads.load(shipped["workload"]).Options, "model.")
    values = flat(tree_of(name))
    assert values.keys() - shipped["changed"] == declared.keys() - NOT_SHIPPED - shipped["changed"]
    assert len(values) <= 36
    assert values["workload"] == shipped["workload"]
    required = {key for key, field in declared.items() if field.is_required()}
    assert required == {"workload", *shipped["required"]}
    changed = {key for key, value in values.items() if value != declared[key].get_default(call_default_factory=True)}
    assert changed == {*required, *shipped["changed"]}


def test_both_files_have_the_same_layout():
    own = ("model.", "data.val_fields")
    layouts = [[key for key in flat(tree_of(name)) if not key.startswith(own)] for name in SHIPPED]
    assert layouts[0] == layouts[1]


def test_the_file_of_a_recsys_project_trains_as_its_recipe_does():
    shipped, recipe = (load(name) for name in ("config.recsys.yaml", "configs/recsys.yaml"))
    options = workloads.load("recsys").Options
    assert read_options(shipped, options) == read_options(recipe, options)
    assert shipped.model_dump(exclude={"model"}) == recipe.model_dump(exclude={"model"})


def test_the_page_of_keys_is_up_to_date():
    command = [sys.executable, ROOT / "tools/config_page.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == (PROJECT / "docs/config.md").read_text()
