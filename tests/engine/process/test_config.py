import pytest

from fastgpu.process.config import Config, Data, Optim, Section
from fastgpu.process.config_loader import keys


@pytest.fixture
def config() -> Config:
    data = Data(train="a.h5", val="b.h5", fields={"x": "x"}, pool_batches="auto")
    return Config(workload="minimal", data=data, model={"width": 3})


def test_sections_are_typed_and_frozen_and_refuse_unknown_keys(config):
    kinds = [field.annotation for name, field in Config.model_fields.items() if name not in ("workload", "model")]
    assert all(issubclass(kind, Section) for kind in kinds)
    with pytest.raises(ValueError, match="frozen"):
        config.data.batch_size = 3
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        Optim(rate=0.1)


def test_resolved_replaces_the_values_of_sections_and_leaves_the_original(config):
    resolved = config.resolved(data={"tier": "disk", "pool_batches": 7}, model={"depth": 2})
    assert (resolved.data.tier, resolved.data.pool_batches, resolved.data.train) == ("disk", 7, "a.h5")
    assert resolved.model == {"width": 3, "depth": 2}
    assert resolved.optim == config.optim
    assert (config.data.tier, config.data.pool_batches, config.model) == ("auto", "auto", {"width": 3})


def test_flat_holds_every_key_once(config):
    values = config.flat()
    assert set(values) == {*keys(), "model.width"}
    assert (values["workload"], values["data.fields"], values["model.width"]) == ("minimal", {"x": "x"}, 3)
