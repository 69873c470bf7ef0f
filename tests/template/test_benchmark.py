"""The benchmarks: contenders deliver the rows of the file, numbers follow their formulas, and each command runs."""

import itertools
import json
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import contenders
import data
import jpegs
import numpy as np
import order
import processes
import publish
import pytest
import tables
import worker
from contenders import H5PY, MEMCPY, OURS
from data import DataSpec
from harness import run_to_end
from peers import FIXED, Task, fixed_batch

TINY = DataSpec("tiny", 1800, (3, 8, 9), 32)
TABLE = publish.Table("targets", ["what", "measured", "required / goal"], [["a|b", "0.5", "0.9"]], "A note.")


@pytest.fixture
def tiny(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    data.make(TINY)
    return TINY


# ---------------------------------------------------------------------------------------------- contenders


@pytest.mark.slow
@pytest.mark.parametrize("name", contenders.CONTENDERS)
def test_a_contender_delivers_every_row_at_most_once_an_epoch(name, tiny):
    contender = worker.find(name)(Task(tiny.h5, tiny.folder, tiny.batch_size, n_workers=1))
    stream = worker.endless(contender)
    checked = worker.check(stream, (tiny.n_rows, *tiny.shape), 60)
    assert checked["checked_rows"] == tiny.n_rows // tiny.batch_size * tiny.batch_size
    assert worker.check(stream, (tiny.n_rows, *tiny.shape), 60) == checked
    assert all(path.is_file() for path in contender.files)


@pytest.mark.slow
def test_contenders_of_jpeg_files_deliver_whole_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    spec = DataSpec("jpeg", 20, (3, 48, 64), 8)
    data.make_jpegs(spec)
    for name in (jpegs.OURS, jpegs.PILLOW, "DataLoader + simplejpeg"):
        contender = worker.find(name)(Task(spec.h5, spec.folder, spec.batch_size, n_workers=1))
        batches = [images for (images,) in contender.epoch(0)]
        assert [len(images) for images in batches] == [8, 8], name
        assert {image.shape for images in batches for image in images} == {(3, 224, 224)}, name


IMAGES = np.pad(np.arange(4, dtype=np.uint8).reshape(4, 1, 1, 1), ((0, 0), (0, 0), (0, 1), (0, 1)))


@pytest.mark.parametrize(
    ("message", "batches"),
    [
        ("the label of another image", [(IMAGES, [3, 2, 1, 0])]),
        ("twice", [(IMAGES, range(4)), (IMAGES, range(4))]),
        ("float", [(IMAGES.astype(float), range(4))]),
        ("no rows", []),
    ],
)
def test_the_check_finds_each_kind_of_error(message, batches):
    with pytest.raises(ValueError, match=message):
        worker.check(iter([*batches, None]), IMAGES.shape, 60)


def test_a_span_ends_with_an_epoch_or_at_its_cap():
    batch = np.zeros((5, 1)), np.arange(5)
    stream = itertools.cycle([batch, batch, None])
    assert [worker.advance(stream, *span) for span in ((0, 60), (0, 0), (60, 0))] == [10, 5, 5]


def test_a_paced_stream_takes_no_less_than_the_device(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    stream = fixed_batch(Task(Path(), Path(), 4, 1)).epoch(0)
    assert len(list(worker.paced(iter(stream), 0.5))) == 10
    assert now[0] == pytest.approx(9 * 0.5)  # the last step has begun


def test_a_process_answers_and_says_what_went_wrong(tiny):
    with processes.Process(OURS, tiny, 1) as process:
        assert process.ask("files")["files"] == [str(tiny.h5)]
        with pytest.raises(publish.FailedError, match="failed: TypeError"):
            process.ask("check")
    with pytest.raises(publish.FailedError, match="it ended with status -9, see fastgpu-disk.log"):
        process.ask("files")


def test_evicted_files_are_not_in_the_page_cache(tiny):
    assert processes.make_cold([tiny.h5]) <= 1
    with processes.kept_warm([tiny.h5]):
        assert processes.cached_bytes([tiny.h5]) >= tiny.h5.stat().st_size


# ---------------------------------------------------------------------------------------------- numbers


def test_turns_are_taken_and_a_failure_ends_those_of_one_way():
    way = Mock(side_effect=["a1", publish.FailedError("why"), "b1", "b2", "a2"])
    ways = {name: partial(way, name) for name in ("a", "bad", "b")}
    assert publish.take_turns("title", ways, 2) == {"a": ["a1", "a2"], "bad": "why", "b": ["b1", "b2"]}
    assert [each.args[0] for each in way.mock_calls] == ["a", "bad", "b", "b", "a"]


def test_ratios_are_taken_within_a_round():
    def rounds(*speeds: float) -> list[dict[str, float]]:
        return [{"rows": speed, "seconds": 1, "cpu_s": 1} for speed in speeds]

    celeba = {OURS: rounds(4, 8, 9), H5PY: rounds(2, 2, 3), MEMCPY: rounds(8, 8, 9), "spdl": "not installable: no"}
    by_load = {load: {OURS: rounds(9, 9), FIXED: rounds(10, 20)} for load in ("0.87", "2.00")}
    results = {"data": {"celeba": TINY._asdict()}, "warm": {"celeba": celeba}, "cold": {}}
    page = tables.tables("loader", results | {"accelerator": {"celeba": by_load}})
    cells = {row[0]: row[1] for row in page[0].rows}
    assert cells["CelebA rows, warm: disk tier / best h5py + DataLoader"] == f"3.00x [2.00-4.00] ({H5PY})"
    assert cells["CelebA rows, warm: disk tier / best peer"] == "not measured"
    assert cells["worst feed ratio where supply >= 1.15 x demand"] == "0.675 [0.450-0.900]"
    assert page[1].rows[3][:2] == ["spdl", "not installable: no"]


def test_chi2_is_that_of_its_formula():
    labels = np.random.default_rng(0).integers(0, 5, 103)
    batches = [labels[start : start + 20] for start in range(0, 100, 20)]
    slow = [sum(((batch == k).sum() - 4) ** 2 / 4 for k in range(5)) / 4 for batch in batches]
    assert order.chi2_per_df(labels, 20, 5) == pytest.approx(np.mean(slow))


@pytest.mark.slow
def test_pools_of_many_blocks_or_a_file_in_random_order_look_shuffled():
    *pools, full = order.qualities(order.QUICK[0], 16)
    near_1 = [*(each["chi2_random"] for each in (*pools, full)), full["chi2_sorted"]]
    assert near_1 == pytest.approx([1.0] * len(near_1), abs=0.08)
    sizes = [each["chi2_sorted"] for each in pools]
    assert sizes == sorted(sizes, reverse=True)


# ---------------------------------------------------------------------------------------------- pages


def test_a_result_is_a_page_and_json_of_one_line_of_which_the_readme_shows_the_newest(tmp_path):
    page = publish.write_result("loader", [TABLE], {"rates": [1.5, 2]}, Namespace(out=tmp_path, quick=False))
    (line,) = page.with_suffix(".json").read_text().splitlines()
    content = json.loads(line)
    assert content["data"] == {"rates": [1.5, 2]}
    text = page.read_text()
    parts = ("# loader\n", f"`{content['command']}`", "## targets\n", "| a\\|b | 0.5 | 0.9 |\n", "\nA note.\n")
    assert all(part in text for part in (*parts, *content["machine"].values()))
    for date, measured in (("2026-01-02", "1"), ("2036-02-01", "2"), ("2026-01-31", "3")):
        content |= {"machine": {"date": date}, "tables": [TABLE._replace(rows=[["what", measured, "9"]])._asdict()]}
        (tmp_path / f"loader_{date}.json").write_text(json.dumps(content))
    assert publish.targets(tmp_path).splitlines()[2:] == [
        "| what | 2 | 9 | [loader_2036-02-01](results/loader_2036-02-01.md) |"
    ]


def test_the_readme_is_up_to_date():
    assert publish.MARKERS.findall(publish.README.read_text()) == [publish.targets()], "run python bench/publish.py"


COMMANDS = [
    *(f"run.py {suite}" for suite in ("loader --peers", "encoded", "layouts", "idle", "recsys")),
    "gpu.py --device cpu --seconds 0.1",
    "order.py",
    "start.py",
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs_on_small_data(command, tmp_path, template):
    words = [*f"bench/{command}".split(), "--quick", "--rounds", "1", "--out", str(tmp_path)]
    done = run_to_end([sys.executable, *words], template)
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.glob("*.json")
    for table in json.loads(page.read_text())["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        for row in table["rows"]:
            assert "failed" not in row[1], row
