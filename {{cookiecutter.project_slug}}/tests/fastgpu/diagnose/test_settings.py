import re

import pytest
from harness import ROOT

import workloads
from fastgpu.diagnose.bench import as_sections
from fastgpu.diagnose.tune import format_overrides
from fastgpu.diagnose.verdict import Setting
from fastgpu.process.config import Config, Data
from fastgpu.process.config_loader import keys, load_config

CONFIG = Config(workload="mine", data=Data(train="a.h5", val="b.h5", fields={}), model={"width": 8, "depth": 2})


def test_messages_name_keys_of_the_config():
    sections = "|".join({key.partition(".")[0] for key in keys() if "." in key})
    for path in [ROOT / "diagnose.py", *(ROOT / "fastgpu" / "diagnose").glob("*.py")]:
        quoted = re.findall(rf"(?<![\w/.])(?:{sections})\.[a-z_0-9]+", "".join(re.findall(r'".*?"', path.read_text())))
        assert set(quoted) - {"train.py", "train.h5"} <= keys().keys(), path


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "workloads").glob("[a-z]*.py")))
def test_lighter_values_are_valid_options_of_the_workload(name):
    workload = workloads.load(name)
    workload.Options.model_validate(dict(workload.lighter))


def test_settings_are_words_of_the_command_line(tmp_path):
    overrides = {"data.echo": 2.5, "loader.pin_memory": False, "data.tier": "host", "loader.num_readers": 3}
    assert format_overrides(overrides) == "data.echo=2.5 loader.pin_memory=false data.tier=host loader.num_readers=3"
    (tmp_path / "config.yaml").write_text("workload: mine\ndata: {train: a.h5, val: b.h5, fields: {}}\n")
    words = [str(Setting(key, value)) for key, value in overrides.items()]
    given = load_config(["--config", str(tmp_path / "config.yaml"), *words])
    assert {key: given.flat()[key] for key in overrides} == overrides


def test_overrides_replace_their_keys_and_no_others():
    overrides = {"data.batch_size": 128, "model.width": 16, "hdf5.rdcc_nbytes": 1}
    assert as_sections(overrides) == {"data": {"batch_size": 128}, "model": {"width": 16}, "hdf5": {"rdcc_nbytes": 1}}
    changed = CONFIG.resolved(**as_sections(overrides))
    assert changed.data == Data(train="a.h5", val="b.h5", fields={}, batch_size=128)
    assert changed.model == {"width": 16, "depth": 2}
    assert changed.hdf5.rdcc_nbytes == 1
    assert (changed.loader, changed.optim, changed.run) == (CONFIG.loader, CONFIG.optim, CONFIG.run)
    assert CONFIG.data.batch_size == 64
