"""The config files and the page of keys agree with the classes that declare the keys."""

import config_page
import pytest
from template import PROJECT

import workloads
from fastgpu.process.config_loader import keys, load_config

NOT_SHIPPED = {
    *("run.check", "log.wandb", "loader.num_workers", "loader.timeout_s", "model.timm", "model.pretrained"),
    *("data.val_fields", "data.balance", "data.dataset", "data.image_size", "data.min_crop_scale", "data.pool_batches"),
    *("dist.strategy", "dist.device", "dist.find_unused_parameters", "dist.timeout_s"),
}
"""Keys whose defaults are right for most, or that belong on a command line: docs/config.md has them."""


def named_in(name: str) -> dict[str, object]:
    """{dotted key that a file names: value}"""
    tree = load_config(["--config", str(PROJECT / name)]).model_dump(exclude_unset=True)
    workload = {"workload": tree.pop("workload")}
    return workload | {f"{section}.{key}": value for section, keys in tree.items() for key, value in keys.items()}


@pytest.mark.parametrize(
    ("name", "workload", "recipe"),
    [
        ("config.yaml", "images", ""),
        ("config.own.yaml", "minimal", ""),
        ("config.recsys.yaml", "recsys", "configs/recsys.yaml"),
    ],
)
def test_a_shipped_file_names_every_key_in_the_same_order_with_its_default_or_the_value_of_a_recipe(
    name, workload, recipe
):
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


def test_the_page_of_keys_is_up_to_date(capsys):
    config_page.main()
    assert capsys.readouterr().out == (PROJECT / "docs/config.md").read_text()
