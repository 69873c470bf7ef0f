"""The config files and the page of keys agree with the classes that declare the keys."""

import config_page
import pytest
from template import PROJECT

import workloads
from fastgpu.process.config import Config
from fastgpu.process.config_loader import keys, load_config, read_options

SHIPPED = {"config.yaml": "images", "config.own.yaml": "minimal", "config.recsys.yaml": "recsys"}
"""{file: its workload}"""
REQUIRED = {"workload", "data.train", "data.val", "data.fields"}
CHANGED = {
    *("data.batch_size", "data.val_fields", "log.every_steps", "optim.lr", "optim.weight_decay", "train.epochs"),
    *("model.hidden_dim", "model.kl_anneal_steps", "model.latent_dim"),
}
"""Keys of config.recsys.yaml whose value is not the default."""
NOT_SHIPPED = {
    *("run.check", "log.wandb", "loader.num_workers", "loader.timeout_s", "model.timm", "model.pretrained"),
    *("data.val_fields", "data.balance", "data.dataset", "data.image_size", "data.min_crop_scale", "data.pool_batches"),
    *("dist.strategy", "dist.device", "dist.find_unused_parameters", "dist.timeout_s"),
}
"""Keys whose defaults are right for most, or that belong on a command line: docs/config.md has them."""


def load(name: str) -> Config:
    """A config file of the project."""
    return load_config(["--config", str(PROJECT / name)])


def flat(name: str) -> dict[str, object]:
    """{dotted key that a file names: value}"""
    tree = load(name).model_dump(exclude_unset=True)
    workload = {"workload": tree.pop("workload")}
    return workload | {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


def layout(name: str) -> list[str]:
    """The keys that all files have, in the order of this one."""
    return [key for key in flat(name) if not key.startswith(("model.", "data.val_fields"))]


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_file_names_every_key_with_its_default_in_the_same_order(name):
    declared = keys() | keys(workloads.load(SHIPPED[name]).Options, "model.")
    values = flat(name)
    changed = CHANGED if name == "config.recsys.yaml" else set()
    assert values.keys() - changed == declared.keys() - NOT_SHIPPED - changed
    assert values["workload"] == SHIPPED[name]
    assert {key for key, field in declared.items() if field.is_required()} == REQUIRED
    others = {key for key, value in values.items() if value != declared[key].get_default(call_default_factory=True)}
    assert others == REQUIRED | changed
    assert layout(name) == layout("config.yaml")


def test_the_file_of_a_recsys_project_trains_as_its_recipe_does():
    shipped, recipe = (load(name) for name in ("config.recsys.yaml", "configs/recsys.yaml"))
    options = workloads.load("recsys").Options
    assert read_options(shipped, options) == read_options(recipe, options)
    assert shipped.model_dump(exclude={"model"}) == recipe.model_dump(exclude={"model"})


def test_the_page_of_keys_is_up_to_date(capsys):
    config_page.main()
    assert capsys.readouterr().out == (PROJECT / "docs/config.md").read_text()
