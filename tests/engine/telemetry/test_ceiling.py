"""A later run uses a diagnosis if, and only if, it is about the same step, machine and feed."""

import json

import pytest

from fastgpu.process.config_loader import keys
from fastgpu.telemetry.ceiling import (
    FEED_SECTIONS,
    FILE,
    STEP_KEYS,
    feed_identity,
    read_ceiling,
    read_summary,
    step_identity,
)

MACHINE = {"device": "GPU X", "world_size": 8, "local_world_size": 8, "row_bytes": 72}
CONFIG = {
    "workload": "mine",
    "data.train": ["a.h5", "b.h5"],
    "data.batch_size": 64,
    "data.tier": "disk",
    "loader.num_readers": 2,
    "model.width": 32,
    "model.shape": (1, 2),
    "optim.lr": 0.1,
    "train.precision": "fp32",
    "train.epochs": 3,
}
DIAGNOSIS = {
    "machine": MACHINE,
    "step": step_identity(CONFIG),
    "feed": feed_identity(CONFIG),
    "compute_rows_per_s": 6400,
    "is_conclusive": True,
    "summary": "READ: the loop waits",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / FILE).write_text(json.dumps(DIAGNOSIS))
    return tmp_path


def test_keys_exist():
    assert set(STEP_KEYS) <= keys().keys()
    assert set(FEED_SECTIONS) <= {key.partition(".")[0] for key in keys()}


def test_the_same_step_on_the_same_machine_has_this_ceiling(folder):
    assert read_ceiling(folder, MACHINE, CONFIG) == 6400


@pytest.mark.parametrize("key", ["optim.lr", "train.epochs", "loader.num_readers", "data.tier", "data.train"])
def test_settings_that_do_not_change_the_step_do_not_matter(folder, key):
    assert read_ceiling(folder, MACHINE, CONFIG | {key: "other"}) == 6400


@pytest.mark.parametrize("key", ["workload", "model.width", "data.batch_size", "train.precision"])
def test_another_step_has_no_ceiling(folder, key):
    assert read_ceiling(folder, MACHINE, CONFIG | {key: "other"}) is None
    assert read_summary(folder, CONFIG | {key: "other"}) == ""


def test_a_setting_that_the_diagnosis_does_not_know_makes_another_step(folder):
    assert read_ceiling(folder, MACHINE, CONFIG | {"model.depth": 3}) is None


@pytest.mark.parametrize("field", MACHINE)
def test_another_machine_has_no_ceiling(folder, field):
    assert read_ceiling(folder, MACHINE | {field: "other"}, CONFIG) is None


@pytest.mark.parametrize("key", ["loader.num_readers", "data.tier", "data.train"])
def test_the_verdict_on_another_feed_is_not_shown(folder, key):
    assert read_summary(folder, CONFIG) == "READ: the loop waits"
    assert read_summary(folder, CONFIG | {key: "other"}) == ""


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "null", json.dumps({"machine": MACHINE}), json.dumps(DIAGNOSIS | {"is_conclusive": False})],
    ids=["cut", "list", "null", "incomplete", "inconclusive"],
)
def test_an_unusable_file_is_as_none(folder, text):
    (folder / FILE).write_text(text)
    assert read_ceiling(folder, MACHINE, CONFIG) is None
    assert read_summary(folder, CONFIG) == ""
    (folder / FILE).unlink()
    assert read_ceiling(folder, MACHINE, CONFIG) is None
    assert read_summary(folder, CONFIG) == ""
