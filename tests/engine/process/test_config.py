import subprocess
import sys

import pytest
from harness import ROOT

from fastgpu.process.config import SECTIONS, Config, Data, Optim, Section
from fastgpu.process.config_loader import keys


@pytest.fixture
def config() -> Config:
    data = Data(train="a.h5", val="b.h5", fields={"x": "x"}, pool_batches="auto")
    return Config(workload="minimal", data=data, model={"width": 3})


def test_a_config_and_its_sections_are_frozen(config):
    with pytest.raises(ValueError, match="frozen"):
        config.data.batch_size = 3
    with pytest.raises(ValueError, match="frozen"):
        config.workload = "other"


def test_a_section_by_itself_has_defaults_that_a_function_can_take():
    assert Optim(lr=0.1).weight_decay == Optim().weight_decay
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Optim(rate=0.1)


def test_required_keys_have_no_default():
    required = {key for key, (default, _) in keys().items() if default == "(required)"}
    assert required == {"workload", "data.train", "data.val", "data.fields"}


def test_resolved_replaces_the_values_of_sections_and_leaves_the_original(config):
    config.origins["data.train"] = "command line"
    resolved = config.resolved(
        data={"tier": "disk", "pool_batches": 7}, model={"width": 4, "depth": 2}, train={"precision": "bf16"}
    )
    assert (resolved.data.tier, resolved.data.pool_batches, resolved.data.train) == ("disk", 7, "a.h5")
    assert resolved.model == {"width": 4, "depth": 2}
    assert resolved.train.precision == "bf16"
    assert resolved.optim == config.optim
    assert resolved.origins == config.origins
    assert (config.data.tier, config.data.pool_batches, config.model) == ("auto", "auto", {"width": 3})


def test_resolved_keeps_the_settings_of_the_model_that_are_not_named(config):
    assert config.resolved(model={"depth": 2}).model == {"width": 3, "depth": 2}


def test_flat_holds_every_key_once(config):
    values = config.flat()
    assert set(values) == {*keys(), "model.width"}
    assert values["workload"] == "minimal"
    assert values["data.fields"] == {"x": "x"}
    assert values["optim.lr"] == Optim().lr
    assert values["model.width"] == 3


def test_every_section_but_that_of_the_workload_is_typed():
    for name in SECTIONS:
        kind = Config.model_fields[name].annotation
        assert name == "model" or issubclass(kind, Section)


def test_reading_a_config_needs_no_torch():
    code = "import sys, fastgpu.process.config_loader, fastgpu.process.launch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
