import json
import re
from math import nan

import pytest
from written_run import write_points, write_run

from fastgpu.report.results import (
    as_text,
    best,
    charts,
    differing_settings,
    differing_values,
    feed_verdict,
    read_config,
    read_metrics,
    run_verdict,
    summary,
    table,
)
from fastgpu.telemetry.clock import Throughput

# ---------------------------------------------------------------------------------------------- the summary


def test_means_of_a_run_are_sums_over_sums():
    """Rows per second times the time of a step is the batch size, however uneven the points are."""
    batch_size = 64
    intervals = [
        Throughput(seconds=9.0, wait_s=8.0, fresh_rows=32 * 5, trained_rows=64 * 5, steps=5),  # the start: left out
        Throughput(seconds=0.5, wait_s=0.0, fresh_rows=64 * 50, trained_rows=64 * 50, steps=50),
        Throughput(seconds=20.0, wait_s=5.0, fresh_rows=32 * 40, trained_rows=64 * 40, steps=40),
        Throughput(seconds=0.1, wait_s=0.1, fresh_rows=16 * 1, trained_rows=64 * 1, steps=1),
    ]
    values = [1.0, 2.0, 30.0, 4.0]
    points = []
    for interval, value in zip(intervals, values, strict=True):
        of_gpu = {"gpu0/util_min_pct": value, "gpu0/mem_peak_gib": value}
        points.append({"step": 1, "time_s": 1.0} | interval._asdict() | interval.scalars() | of_gpu)

    values = summary(points)
    seconds = 0.5 + 20.0 + 0.1
    fresh_rows = 64 * 50 + 32 * 40 + 16
    trained_rows = 64 * (50 + 40 + 1)
    assert values["data/fresh_rows_per_s"] == pytest.approx(fresh_rows / seconds)
    assert values["train/trained_rows_per_s"] == pytest.approx(trained_rows / seconds)
    assert values["data/wait_pct"] == pytest.approx(100 * 5.1 / seconds)
    assert values["train/step_ms"] == pytest.approx(1000 * seconds / 91)
    assert values["train/trained_rows_per_s"] * values["train/step_ms"] / 1000 == pytest.approx(batch_size)
    assert values["gpu0/util_min_pct"] == 2
    assert values["gpu0/mem_peak_gib"] == 30


def test_the_start_of_every_part_is_left_out_of_means():
    parts = [(1, 9.0), (1, 1.0), (1, 2.0), (2, 9.0), (2, 3.0)]
    points = [{"step": 1, "time_s": 1.0, "part": part, "seconds": 1.0, "data/wait_pct": wait} for part, wait in parts]
    assert summary(points) == {"data/wait_pct": pytest.approx((1 + 2 + 3) / 3)}


@pytest.mark.parametrize(("pool_batches", "wait_pct"), [(10, 1.0), (11, 100 * 9.1 / 20)])
def test_the_start_counts_if_the_rest_is_less_than_a_pool(tmp_path, pool_batches, wait_pct):
    """All waiting for the rows of a pool lies in its first point."""
    config = {"data": {"pool_batches": pool_batches, "batch_size": 8}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    intervals = [Throughput(10.0, 9.0, fresh_rows=8, trained_rows=8, steps=1), Throughput(10.0, 0.1, 80, 80, 10)]
    points = [{"step": step, "time_s": 1.0} | each._asdict() | each.scalars() for step, each in enumerate(intervals)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(point)}\n" for point in points))
    values = summary(read_metrics(tmp_path))
    assert values["data/wait_pct"] == pytest.approx(wait_pct)


def test_a_run_without_points_or_with_a_cut_line_is_no_error(tmp_path):
    assert table([]) == ""
    assert run_verdict([]) is None
    path = write_run(tmp_path) / "metrics.jsonl"
    path.write_text(path.read_text()[:-20])
    assert len(read_metrics(tmp_path)) == 5


def test_last_values_and_peaks_are_those_of_all_points():
    """A run that is resumed for one epoch has a single point of them in its new part."""
    logged = [(1, 9.0, 3.0), (1, 2.0, 1.0), (2, 1.0, 2.0)]
    points = [{"step": 1, "part": part, "val/loss": loss, "gpu0/mem_peak_gib": peak} for part, loss, peak in logged]
    assert summary(points) == {"val/loss": 1.0, "gpu0/mem_peak_gib": 3.0}


@pytest.mark.parametrize(("metric", "direction", "step"), [("a", "higher", 3), ("a", "lower", 4), ("b", "lower", 3)])
def test_the_best_value_is_that_of_the_metric_that_chooses_checkpoints(tmp_path, metric, direction, step):
    points = [{"step": n, "val/a": value, "val/b": -value} for n, value in enumerate((nan, 2.0, 3.0, 5.0, 1.0, 5.0))]
    assert best(points, tmp_path) is None
    (tmp_path / "run.json").write_text(json.dumps({"best": [metric, direction]}))
    found = best(points, tmp_path)
    assert (found.metric, found.value, found.step) == (metric, points[step][f"val/{metric}"], step)
    assert best([], tmp_path) is None


def test_the_summary_has_every_gpu_and_the_last_validation(tmp_path):
    points = read_metrics(write_run(tmp_path))
    values = summary(points)
    assert values["data/fresh_rows_per_s"] == pytest.approx(12_345.6 * 1.0025)  # of the last four of five points
    assert values["gpu0/util_pct"] == pytest.approx(97 * 1.0025)
    assert values["gpu1/util_pct"] == pytest.approx(50 * 1.0025)
    assert (values["val/top1_pct"], values["val/loss"]) == (99, 0.25)
    assert "host/cpu_system_pct" not in values  # not measured, so not there
    lines = table(points).splitlines()
    assert len(lines) == len(values)
    assert re.fullmatch(r"  data/fresh_rows_per_s +12,376", next(line for line in lines if "fresh" in line))
    assert re.fullmatch(r"  data/wait_pct +3\.01", next(line for line in lines if "wait" in line))


def test_the_lines_of_a_chart_have_one_group_and_one_unit():
    names = ["train/loss", "gpu0/util_pct", "gpu1/sm_active_pct", "gpu0/power_w", "val/top1_pct", "val/loss", "val/mse"]
    assert charts([*names, "train/lr", "mine/gradient_norm"]) == {
        "loss": ["train/loss", "val/loss"],
        "gpu, %": ["gpu0/util_pct", "gpu1/sm_active_pct"],
        "gpu, W": ["gpu0/power_w"],
        "val, %": ["val/top1_pct"],
        "val/mse": ["val/mse"],
        "train/lr": ["train/lr"],
        "mine/gradient_norm": ["mine/gradient_norm"],
    }


# ---------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("wait_pct", "util_pct", "verdict"),
    [
        (75, None, "input-bound: 75 % of the time was spent waiting for data; run `python diagnose.py`"),
        (75, 10, "input-bound: 75 % of the time was spent waiting for data; run `python diagnose.py`"),
        (0.2, 40, "fed, but the GPU was idle 60 % of the time; `python diagnose.py` tells why"),
        (0.2, 97, "fed: 0.2 % of the time was spent waiting for data"),
        (0.2, None, "fed: 0.2 % of the time was spent waiting for data"),
    ],
)
def test_a_verdict_in_one_line(wait_pct, util_pct, verdict):
    assert feed_verdict(wait_pct, util_pct).text == verdict


def test_the_newest_config_counts(tmp_path):
    for number in ("", "-2", "-10"):
        (tmp_path / f"config{number}.yaml").write_text(f"workload: images\ndata: {{fields: {{a: 'b{number}'}}}}\n")
    assert read_config(tmp_path) == {"workload": "images", "data.fields": {"a": "b-10"}}
    (tmp_path / "config-10.yaml").write_text("{")
    assert read_config(tmp_path) == {}
    assert read_config(tmp_path / "none") == {}


# ---------------------------------------------------------------------------------------------- comparisons


def test_only_settings_that_differ_are_compared(tmp_path):
    runs = {}
    for name, text in (("a", "data: {batch_size: 64, tier: disk}"), ("b", "data: {batch_size: 128, tier: disk, x: é}")):
        runs[name] = write_run(tmp_path / name)
        (runs[name] / "config.yaml").write_text(f"run: {{name: {name}}}\n{text}\n")
    assert differing_settings(runs) == [["setting", "a", "b"], ["data.batch_size", "64", "128"], ["data.x", "-", '"é"']]


def test_settings_that_a_resumed_run_changed_are_shown(tmp_path):
    folder = write_run(tmp_path / "a")
    for number, size, tier in (("", 64, "disk"), ("-2", 64, "disk"), ("-10", 128, "disk")):
        (folder / f"config{number}.yaml").write_text(f"data: {{batch_size: {size}, tier: {tier}}}\n")
    assert differing_settings({"a": folder, "b": folder})[1:] == [["data.batch_size", "64, then 128", "64, then 128"]]


def test_values_are_compared_as_sums_over_sums_with_their_spread(tmp_path):
    intervals = {
        "a": [Throughput(9, 9, 9, 9, 9), Throughput(1, 0, 100, 100, 1), Throughput(3, 0, 900, 900, 3)],
        "b": [Throughput(9, 9, 9, 9, 9), Throughput(1, 0, 250, 500, 1)],
    }
    runs = {}
    for name, each in intervals.items():
        points = [{"step": n, "time_s": n} | i._asdict() | i.scalars() for n, i in enumerate(each)]
        runs[name] = write_points(tmp_path / name, points)
    runs["c"] = write_points(tmp_path / "c", [{"step": 0, "time_s": 0, "val/x": 2.0}])
    lines = {line[0]: line[1:] for line in differing_values(runs)}
    assert lines["data/fresh_rows_per_s"] == ["250 [100, 200, 300]", "250 = 1.00 x [250, 250, 250]", "-"]
    assert lines["train/trained_rows_per_s"] == ["250 [100, 200, 300]", "500 = 2.00 x [500, 500, 500]", "-"]
    assert lines["val/x"] == ["-", "-", "2 [2, 2, 2]"]
    (runs["a"] / "run.json").write_text('{"best": ["x", "lower"]}')
    assert "best" not in lines
    (runs["c"] / "run.json").write_text('{"best": ["x", "lower"]}')
    assert differing_values(runs)[1] == ["best", "-", "-", "x 2 at step 0"]


def test_the_columns_of_a_table_are_aligned():
    assert as_text([["a", "bb"], ["ccc", "d"]]) == "a    bb\nccc  d"
