"""The benchmarks: a wrong row is found, numbers follow their formulas, and each command runs."""

import json
import sys
import time
from pathlib import Path

import data
import numpy as np
import order
import publish
import pytest
import tables
import windows
import worker
from contenders import H5PY, MEMCPY, OURS
from data import DataSpec
from peers import FIXED, Task, fixed_batch
from scipy.stats import chisquare

from support.ranks import printed_by

IMAGES = np.pad(np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1), ((0, 0), (0, 0), (0, 1), (0, 1)))


@pytest.mark.parametrize("shape", [(32,), (8, 3)], ids=str)
@pytest.mark.parametrize("name", windows.CONTENDERS)
def test_benchmark_windows_are_neighbouring_steps(tmp_path, monkeypatch, name, shape):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    spec = DataSpec("4 KiB", 64, shape, 4)
    windows.make(spec)
    batches = [*windows.CONTENDERS[name](Task(spec.h5, spec.folder, 4, 0)).epoch(0)]
    n_values = np.prod(shape)
    for (batch,) in batches:
        values = np.asarray(batch).reshape(4, n_values).astype(int)
        np.testing.assert_array_equal(values, values[:, :1] + np.arange(n_values))
        assert (values[:, 0] % np.prod(shape[1:], dtype=int) == 0).all()
    assert len(batches) >= 16


@pytest.mark.parametrize(
    ("message", "batches"),
    [
        ("the label of another image", [(IMAGES, [3, 2, 1, 0])]),
        ("twice", [(IMAGES, range(4)), (IMAGES, range(4))]),
        ("float", [(IMAGES.astype(float), range(4))]),
        ("no rows", []),
    ],
)
def test_benchmark_check_finds_errors(message, batches):
    with pytest.raises(ValueError, match=message):
        worker.check(iter([*batches, None]), IMAGES.shape, 60)


def test_benchmark_stream_is_paced(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    stream = fixed_batch(Task(Path(), Path(), 4, 1)).epoch(0)
    assert len(list(worker.paced(iter(stream), 0.5))) == 10
    assert now[0] == pytest.approx(9 * 0.5)  # the last step has begun


def test_benchmark_ratios_within_a_round():
    def rounds(*speeds: float) -> list[dict[str, float]]:
        return [{"rows": speed, "seconds": 1, "cpu_s": 1} for speed in speeds]

    celeba = {OURS: rounds(4, 8, 9), H5PY: rounds(2, 2, 3), MEMCPY: rounds(8, 8, 9), "spdl": "not installable: no"}
    by_load = {load: {OURS: rounds(9, 9), FIXED: rounds(10, 20)} for load in ("0.87", "2.00")}
    spec = DataSpec("celeba", 1800, (3, 8, 9), 32)._asdict()
    measured = {"warm": {"celeba": celeba}, "accelerator": {"celeba": by_load}, "cold": {}}
    page = tables.tables("loader", {"data": {"celeba": spec}} | measured)
    cells = {row[0]: row[1] for row in page[0].rows}
    assert cells["CelebA rows, warm: disk tier / best h5py + DataLoader"] == f"3.00x [2.00-4.00] ({H5PY})"
    assert cells["CelebA rows, warm: disk tier / best peer"] == "not measured"
    assert cells["worst feed ratio where supply >= 1.15 x demand"] == "0.675 [0.450-0.900]"
    assert page[1].rows[3][:2] == ["spdl", "not installable: no"]


def test_benchmark_chi2_formula():
    labels = np.random.default_rng(0).integers(0, 5, 103)
    batches = [labels[start : start + 20] for start in range(0, 100, 20)]
    expected = np.mean([chisquare(np.bincount(batch, minlength=5)).statistic / 4 for batch in batches])
    assert order.chi2_per_df(labels, 20, 5) == pytest.approx(expected)


def test_benchmark_readme_shows_the_newest(tmp_path):
    for date, measured in (("2026-01-02", "1"), ("2036-02-01", "2|3"), ("2026-01-31", "4")):
        table = publish.Table("targets", publish.TARGET_COLUMNS, [["what", measured, "9"]])
        content = {"machine": {"date": date}, "tables": [table._asdict()]}
        (tmp_path / f"loader_{date}.json").write_text(json.dumps(content))
    (row,) = publish.targets(tmp_path).splitlines()[2:]
    assert row == "| what | 2\\|3 | 9 | [loader_2036-02-01](results/loader_2036-02-01.md) |"


def test_benchmark_readme_is_up_to_date():
    assert all(page.read_text() == text for page, text in publish.publish().items()), "run python bench/publish.py"


COMMANDS = [*(f"run.py {suite}" for suite in ("loader --peers", "encoded", "layouts", "idle", "recsys", "windows"))]
COMMANDS += ["gpu.py --device cpu --seconds 0.1", "order.py", "start.py", "echo.py"]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_benchmark_runs_on_small_data(command, tmp_path, template):
    words = [*f"bench/{command}".split(), "--quick", "--rounds", "1", "--out", str(tmp_path)]
    printed_by([sys.executable, *words], template)
    (page,) = tmp_path.glob("*.json")
    for table in json.loads(page.read_text())["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        for row in table["rows"]:
            assert "failed" not in row[1], row
