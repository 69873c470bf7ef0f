import re

import psutil
import pytest
import torch
from fake_nvml import Nvml
from short_run import started_run, train_epoch
from torch import nn

from fastgpu.report.results import read_metrics
from fastgpu.report.tags import METRICS_PCT, TAGS, charts, find_tag
from fastgpu.telemetry.clock import Throughput
from fastgpu.telemetry.monitor import machine_counters


@pytest.fixture
def logged(tmp_path, monkeypatch) -> set[str]:
    """The names of all scalars of a short run, and of all counters of a machine with a GPU."""
    model = nn.Linear(2, 2)
    with started_run(tmp_path, model) as run:
        train_epoch(run, model)
        run.finish()
        points = read_metrics(run.folder)
    names = {name for point in points for name in point} - {"step", "time_s", "part", *Throughput._fields}

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: 1)
    counters = machine_counters(["a"], Nvml())
    for _ in range(3):
        names |= set(counters.read())
    return names


@pytest.mark.skipif(not psutil.LINUX, reason="other systems lack some counters")
def test_what_a_run_logs_is_the_table(logged):
    assert {name for name in logged if find_tag(name) is None} == set()
    assert [tag.name for tag in TAGS if not tag.names(logged)] == []


def test_names_are_of_the_form_group_name_unit():
    for tag in TAGS:
        assert re.fullmatch(r"(train|data|val|gpu<n>|host)/(<metric>|[a-z0-9_]+)", tag.name)
    assert len({tag.name for tag in TAGS}) == len(TAGS)


def test_tags_of_every_gpu_are_found():
    for name in ("gpu0/util_pct", "gpu11/util_pct", "host/rss_gib"):
        tag = find_tag(name)
        assert tag is not None
        assert tag.name.replace("<n>", "0").split("/")[-1] == name.split("/")[-1]
    assert find_tag("val/loss").title == "validation loss"
    assert find_tag("val/top1_pct").name == "val/<metric>"
    assert find_tag("steps") is None


def test_a_mean_over_the_run_is_weighted_by_a_sum_of_the_points():
    assert {tag.over_run for tag in TAGS} <= {*Throughput._fields, "minimum", "maximum", "last"}


def test_the_lines_of_a_chart_have_one_unit(logged):
    for title, names in charts(logged).items():
        assert len({find_tag(name).unit.split(" ")[0] for name in names}) == 1, title


def test_every_metric_is_in_a_chart():
    names = ["val/top5_pct", "val/loss", "val/recall_at_20", "val/top1_pct", "val/mse", "train/lr"]
    assert charts(names) == {
        "loss": ["val/loss"],
        METRICS_PCT: ["val/top5_pct", "val/top1_pct"],
        "validation recall_at_20": ["val/recall_at_20"],
        "validation mse": ["val/mse"],
    }
