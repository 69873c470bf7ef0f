"""config.yaml and the recipes beside it."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import workloads
from fastgpu.process.config_loader import load_config, read_options

PROJECT = Path(__file__).parents[1]
RECIPES = ["config.yaml", *sorted(f"configs/{path.name}" for path in PROJECT.glob("configs/*.yaml"))]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_has_known_keys_and_allowed_values(recipe):
    config = load_config(["--config", recipe])
    read_options(config, workloads.load(config.workload).Options)


def test_a_misspelt_key_is_one_line_that_names_it(project, tmp_path):
    settings = yaml.safe_load((project / "config.yaml").read_text())
    settings["optim"] = {**(settings.get("optim") or {}), "learning_rte": 0.1}
    (tmp_path / "wrong.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    command = [sys.executable, "train.py", "--config", str(tmp_path / "wrong.yaml")]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "optim.learning_rte" in done.stderr
