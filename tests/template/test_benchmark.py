"""The benchmarks: a wrong row is found, numbers follow their formulas, and each command runs."""

import json
import re
import runpy
import sys
import time
from pathlib import Path
from statistics import median

import data
import h5py
import numpy as np
import order
import publish
import pytest
import tables
import timeline
import windows
import worker
from contenders import H5PY, MEMCPY, OURS, PLAIN_H5PY
from data import DataSpec
from peers import FIXED, PEERS, Task, fixed_batch, h5py_batches, h5py_rows
from scipy.stats import chisquare

from support import ROOT
from support.ranks import printed_by
from tools.facts import tracked

SUITES = runpy.run_path(str(ROOT / "bench/run.py"))["SUITES"]
"""{name of a page: its data sets and contenders}"""

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
    for date, measured in (("2026-01-02", "1"), ("2036-02-01", "2|3"), ("2026-01-31", "9")):
        table = publish.Table("targets", publish.TARGET_COLUMNS, [["what", measured, "9"]])
        content = {"machine": {"date": date}, "tables": [table._asdict()]}
        (tmp_path / f"loader_{date}.json").write_text(json.dumps(content))
    (row,) = publish.targets(tmp_path).splitlines()[2:]
    assert row == "| what | 2\\|3 | 9, **missed** | [loader_2036-02-01](results/loader_2036-02-01.md) |"


@pytest.mark.parametrize(
    ("measured", "required", "is_missed"),
    [
        ("0.80x [0.70-0.96] (grain)", "1.2x / 2x", True),
        ("1.20x [0.70-0.96]", "1.2x / 2x", False),
        ("1.71x [1.0-2.0]", "<= 1.7x", True),
        ("1.2 s, 280 MB", "< 2 s, < 300 MB", False),
        ("0.72 [0.49-0.86]", "<= 1 / 0.8", False),
        ("1.01 [0.49-0.86]", "<= 1 / 0.8", True),
        ("1.000 to 1.003", "a full shuffle's: 0.999 to 1.003", False),
        ("not measured", "0.9", False),
    ],
)
def test_benchmark_missed_targets_are_marked(measured, required, is_missed):
    assert publish.is_missed(measured, required) == is_missed


def test_benchmark_links_are_to_the_newest_results():
    for name in tracked():
        if name.endswith(".md") and not name.startswith("bench/results/"):
            for page in re.findall(r"results/([\w-]+)\.md", (ROOT / name).read_text()):
                assert [page] == [newest for _, newest in publish.newest(page.split("_")[0])], name


def test_benchmark_captions_are_of_the_result_in_their_table():
    """Below each filled table, or above it, are the machine, the date and the command of the same result."""
    for page in publish.PAGES.rglob("*.md"):
        text = page.read_text()
        for _, table, _ in publish.NUMBERS.findall(text):
            assert f"<!-- words: made-{publish.FILLS[table].what} -->" in text, (page, table)


@pytest.mark.parametrize("usual", publish.USUAL, ids=lambda usual: usual.text)
def test_benchmark_readme_names_contenders(usual):
    names = SUITES[usual.what].names
    for kind in (*usual.items, *usual.batches, usual.ours):
        assert [name for name in names if name.startswith(kind)], kind


def test_benchmark_readme_shows_the_best_dataloader():
    """Of rows that are read by h5py, the same ratio as in bench/README.md."""
    (usual,) = (each for each in publish.USUAL if "h5py" in each.text)
    ((result, _),) = publish.newest("loader")
    (targets,) = (table["rows"] for table in result["tables"] if table["title"] == "targets")
    (best,) = (row[1] for row in targets if row[0].startswith("CelebA rows, warm: disk tier / best h5py"))
    assert best.startswith(f"{usual.cells()[-1]}x ")


@pytest.mark.parametrize(("what", "own", "name"), [(what, own, name) for _, what, _, own, name in publish.BESIDE])
def test_benchmark_readme_names_peers(what, own, name):
    names = SUITES[what].names
    assert own in names
    assert [each for peer in PEERS for each in names if each.startswith(name.format(peer))]


def test_benchmark_readme_shows_the_fastest_way():
    ways = {"ffcv, images": [30, 60], "ffcv, arrays": [40, 50], "ffcv, other": "not installable", "dali": [90]}
    warm = {
        name: rates if isinstance(rates, str) else [{"rows": rate, "seconds": 1} for rate in rates]
        for name, rates in ways.items()
    }
    result = {"data": {"warm": {"celeba": warm}}}
    assert publish.speeds(result, "celeba", ["ffcv"]) == [30, 60]
    assert publish.speeds(result, "celeba", ["spdl"]) == []


def write_gpu_result(folder: Path, gpu: str, command: str, date: str = "2036-01-02", name: str = "gpu_x") -> None:
    rows = [["feed ratio, a", "0.9951 (host tier)", ""], ["data wait, a", "0.40 % (disk tier)", ""]]
    rows += [["feed ratio, b", "0.9912 (disk tier)", ""], ["data wait, b", "0.20 % (disk tier)", ""]]
    table = publish.Table("targets", publish.TARGET_COLUMNS, rows)._asdict()
    content = {"machine": {"gpu": gpu, "date": f"{date} 03:04 UTC"}, "command": command, "tables": [table]}
    (folder / f"{name}.json").write_text(json.dumps(content))


def test_gpu_words_go_with_the_first_result(tmp_path):
    page = "<!-- words: gpu --><!-- words:end -->\nCounters<!-- words: gpu-counters --><!-- words:end -->."
    without = publish.fill_words(page, publish.gpu_words(tmp_path))
    assert "**Not measured on a GPU yet**" in without
    assert "Counters<!-- words: gpu-counters -->, and not on a real GPU yet<!-- words:end -->." in without
    write_gpu_result(tmp_path, "NVIDIA X", "python bench/gpu.py")
    # A later result of a CPU does not bring them back.
    write_gpu_result(tmp_path, "none", "python bench/gpu.py --device cpu", "2036-01-03", "gpu_y")
    assert publish.fill_words(without, publish.gpu_words(tmp_path)) == (
        "<!-- words: gpu -->\nOn one NVIDIA X, the lowest feed ratio of 2 cases is 0.9912 (disk tier), and the longest "
        "data wait 0.40 % (disk tier) ([2036-01-02](bench/results/gpu_x.md)).\n<!-- words:end -->\n"
        "Counters<!-- words: gpu-counters --><!-- words:end -->."
    )


@pytest.mark.parametrize(
    ("gpu", "command"), [("none", "python bench/gpu.py --device cpu"), ("NVIDIA X", "python bench/gpu.py --quick")]
)
def test_gpu_words_stay_without_a_real_result(tmp_path, gpu, command):
    write_gpu_result(tmp_path, gpu, command)
    assert "Not measured on a GPU yet" in publish.gpu_words(tmp_path)["gpu"]


@pytest.mark.parametrize(("page", "suffix"), [("README.md", ""), ("docs/ko/README.md", "-ko")])
def test_gpu_words_are_on_the_first_screen(template, page, suffix):
    first_screen = (template / page).read_text().split("\n## ")[0]
    assert f"<!-- words: gpu{suffix} -->" in first_screen
    assert f"<!-- words: timeline{suffix} -->" in first_screen


def test_picture_calls_its_device_simulated(template):
    words = publish.timeline_words()
    assert words["timeline"].count("simulated") == 2  # in the alternative text, and in the caption
    assert words["timeline-ko"].count("시뮬레이션") == 2
    svg = (template / "docs" / "pictures" / "timeline.svg").read_text()
    assert svg.count(">simulated device<") == 2
    assert "Not a GPU" in svg


@pytest.fixture
def make_task(tmp_path, monkeypatch):
    """Makes the file of a task in a temporary folder."""
    monkeypatch.setattr(data, "FOLDER", tmp_path)

    def make(shape: tuple[int, int, int]) -> Task:
        spec = DataSpec("rows", 256, shape, 64)
        data.make(spec)
        return Task(spec.h5, spec.folder, spec.batch_size, 2)

    return make


@pytest.mark.parametrize("rows", [h5py_rows, timeline.usual_rows, h5py_batches], ids=lambda rows: rows.__name__)
def test_baseline_keeps_its_dataset_open(make_task, monkeypatch, rows):
    dataset = rows(make_task((3, 8, 9)))
    key = [[3, 1]] if rows is h5py_batches else [1]
    n_lookups = []
    look_up = h5py.File.__getitem__
    monkeypatch.setattr(h5py.File, "__getitem__", lambda *args: n_lookups.append(1) or look_up(*args))
    for _ in range(10):
        dataset[key[0]]
    assert len(n_lookups) == 1


@pytest.mark.slow
def test_baseline_of_the_picture_is_the_contender(make_task):
    """CPU time of a row, within a factor of 1.5 of the contender of the same name in bench/run.py."""
    task = make_task((3, 218, 178))
    datasets = [timeline.usual_rows(task), worker.find(PLAIN_H5PY)(task).epoch(0).dataset]
    order = np.random.default_rng(0).permutation(len(datasets[0])).tolist()
    ratios = []
    for _ in range(7):
        seconds = []
        for dataset in datasets:
            t0 = time.process_time()
            for row in order:
                dataset[row]
            seconds.append(time.process_time() - t0)
        ratios.append(seconds[0] / seconds[1])
    assert 1 / 1.5 < median(ratios) < 1.5


@pytest.mark.slow
def test_picture_is_kept_by_a_quick_run(tmp_path, template):
    picture = template / "docs" / "pictures" / "timeline.json"
    before = picture.read_bytes()
    printed_by([sys.executable, "bench/timeline.py", "--quick", "--out", str(tmp_path)], template)
    result = json.loads((tmp_path / "timeline.json").read_text())
    assert {who for who, *_ in result["ours"]} >= {"device", "reader 1"}
    assert {who for who, *_ in result["usual"]} >= {"device", "worker 1"}
    assert picture.read_bytes() == before


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
