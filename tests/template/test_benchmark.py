"""The benchmarks: contenders deliver the rows of the file, numbers follow their formulas, and each command runs."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import contenders
import data
import gpu
import h5py
import jpegs
import layouts
import numpy as np
import order
import processes
import publish
import pytest
import tables
import worker
from contenders import H5PY, MEMCPY, OURS
from data import DataSpec
from peers import FIXED, Task, fixed_batch

from fastgpu.rows.order import BlockSampler, Shard

TINY = DataSpec("tiny", 1800, (3, 8, 9), 32)
TABLE = publish.Table("targets", ["what", "measured", "required / goal"], [["a|b", "0.5", "0.9"]], "A note.")


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSpec:
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    data.make(TINY)
    return TINY


def task_of(spec: DataSpec) -> Task:
    return Task(spec.h5, spec.folder, spec.batch_size, n_workers=1, seed=0)


# ---------------------------------------------------------------------------------------------- contenders


@pytest.mark.slow
@pytest.mark.parametrize("name", [*contenders.CONTENDERS, *layouts.CONTENDERS])
def test_a_contender_delivers_every_row_at_most_once_an_epoch(name: str, tiny: DataSpec) -> None:
    contender = worker.find(name)(task_of(tiny))
    stream = worker.endless(contender)
    checked = worker.check(stream, (tiny.n_rows, *tiny.shape), 60)
    assert checked["checked_rows"] == tiny.n_rows // tiny.batch_size * tiny.batch_size
    assert worker.check(stream, (tiny.n_rows, *tiny.shape), 60) == checked
    assert all(path.is_file() for path in contender.files)


@pytest.mark.slow
def test_contenders_of_jpeg_files_deliver_whole_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", [])
    spec = DataSpec("jpeg", 20, (3, 48, 64), 8)
    data.make_jpegs(spec)
    for name in (jpegs.OURS, jpegs.PILLOW, jpegs.BARE, "DataLoader + simplejpeg"):
        batches = [images for (images,) in jpegs.CONTENDERS[name](task_of(spec)).epoch(0)]
        assert [len(images) for images in batches] == [8, 8], name
        assert {(tuple(image.shape), str(image.dtype)) for images in batches for image in images} == {
            ((3, 224, 224), "torch.uint8")
        }
    ((paths,),) = jpegs.CONTENDERS[jpegs.CONVERT](task_of(spec)).epoch(0)
    with h5py.File(spec.folder / "converted.h5") as file:
        assert file["images"].shape == (len(paths), 3, 224, 224) == (20, 3, 224, 224)


def test_the_check_finds_each_kind_of_error() -> None:
    images = np.zeros((4, 1, 2, 2), np.uint8)
    images[:, 0, 0, 0] = range(4)
    labels = np.arange(4)
    shape = (4, 1, 2, 2)
    assert worker.check(iter([(images, labels), None]), shape, 60) == {"checked_rows": 4}
    wrong: dict[str, list[Any]] = {
        "the label of another image": [(images, labels[::-1])],
        "twice": [(images, labels), (images, labels)],
        "float": [(images.astype(float), labels)],
        "no rows": [],
    }
    for message, batches in wrong.items():
        with pytest.raises(ValueError, match=message):
            worker.check(iter([*batches, None]), shape, 60)


def test_a_span_ends_with_an_epoch_or_at_its_cap() -> None:
    batch = np.zeros((5, 1)), np.arange(5)
    stream = itertools.cycle([batch, batch, None])
    assert worker.advance(stream, 0, 60) == 10
    assert worker.advance(stream, 0, 0) == 5
    assert worker.advance(stream, 60, 0) == 5


def test_a_paced_stream_takes_no_less_than_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    stream = fixed_batch(Task(Path(), Path(), 4, 1, 0)).epoch(0)
    assert len(list(worker.paced(iter(stream), 0.5))) == 10
    assert now[0] == pytest.approx(9 * 0.5)  # the last step has begun


def test_a_process_answers_and_says_what_went_wrong(tiny: DataSpec) -> None:
    with processes.Process(OURS, tiny, n_workers=1, is_peer=False) as process:
        assert process.ask("files", 60)["files"] == [str(tiny.h5)]
        with pytest.raises(publish.FailedError, match="failed: TypeError"):
            process.ask("check", 60)
        with pytest.raises(publish.FailedError, match="no answer to 'run'"):
            process.ask("run", 0, lead_s=None, span_s=[1, 1], step_s=0)
    assert process.popen.poll() is not None


def test_reading_a_file_through_takes_so_many_seconds(tiny: DataSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", iter([5.0, 8.0]).__next__)
    assert processes.read_through(tiny.h5) == 3


def test_evicted_files_are_not_in_the_page_cache(tiny: DataSpec) -> None:
    assert processes.make_cold([tiny.h5]) <= 1
    with processes.kept_warm([tiny.h5]):
        pages = -(-tiny.h5.stat().st_size // processes.mmap.PAGESIZE)
        assert processes.cached_bytes(tiny.h5) == pages * processes.mmap.PAGESIZE


# ---------------------------------------------------------------------------------------------- numbers


def test_turns_are_taken_and_a_failure_ends_those_of_one_way() -> None:
    seen = []

    def fail() -> str:
        seen.append("bad")
        raise publish.FailedError("why")

    results = publish.take_turns(
        "title", {"a": lambda: seen.append("a"), "bad": fail, "b": lambda: seen.append("b")}, 2
    )
    assert seen == ["a", "bad", "b", "b", "a"]
    assert results == {"a": [None, None], "bad": "why", "b": [None, None]}


def test_ratios_are_taken_within_a_round() -> None:
    def rounds(*speeds: float) -> list[dict[str, float]]:
        return [{"rows": speed, "seconds": 1, "cpu_s": 1} for speed in speeds]

    celeba = {OURS: rounds(4, 8, 9), H5PY: rounds(2, 2, 3), MEMCPY: rounds(8, 8, 9), "spdl": "not installable: no"}
    by_load = {load: {OURS: rounds(9, 9), FIXED: rounds(10, 20)} for load in ("0.87", "2.00")}
    spec = data.QUICK[0]._asdict()
    results = {"data": {"celeba": spec}, "warm": {"celeba": celeba}, "accelerator": {"celeba": by_load}, "cold": {}}
    page = tables.tables("loader", results)
    cells = {row[0]: row[1] for row in page[0].rows}
    assert cells["CelebA rows, warm: disk tier / best h5py + DataLoader"] == f"3.00x [2.00-4.00] ({H5PY})"
    assert cells["CelebA rows, warm: disk tier / best peer"] == "not measured"
    assert cells["worst feed ratio where supply >= 1.15 x demand"] == "0.675 [0.450-0.900]"
    assert page[1].rows[3][:2] == ["spdl", "not installable: no"]
    contenders_of_gpu = {gpu.FIXED: [{"steps_per_s": 10}, {"steps_per_s": 20}], "disk tier": [{"steps_per_s": 9}] * 2}
    assert gpu.feed_ratios(contenders_of_gpu, "disk tier") == [0.9, 0.45]


def test_chi2_is_that_of_its_formula() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 103)
    slow = []
    for start in range(0, 100, 20):
        counts = [int((labels[start : start + 20] == k).sum()) for k in range(5)]
        slow.append(sum((n - 4) ** 2 / 4 for n in counts) / 4)
    assert order.chi2_per_df(labels, 20, 5) == pytest.approx(np.mean(slow))


def test_batch_mates_are_counted_pair_by_pair() -> None:
    rng = np.random.default_rng(0)
    n_rows = 24
    epochs = [rng.permutation(n_rows)[:20] for _ in range(2)]  # four rows are left out of each epoch
    groups = [{row: place // 5 for place, row in enumerate(epoch.tolist())} for epoch in epochs]
    pairs = list(itertools.combinations(sorted(groups[0].keys() & groups[1].keys()), 2))
    first, second = ({(a, b) for a, b in pairs if group[a] == group[b]} for group in groups)
    expected = len(first & second) / len(first) / (len(second) / len(pairs))
    assert order.mates_again(*epochs, 5, n_rows) == pytest.approx(expected)


@pytest.mark.slow
def test_pools_of_many_blocks_or_a_file_in_random_order_look_shuffled() -> None:
    *pools, full = order.qualities(order.QUICK[0], 16, (1, 8, 128))
    for result in (*pools, full):
        assert result["chi2_random"] == pytest.approx(1, abs=0.08)
    assert full["chi2_sorted"] == pytest.approx(1, abs=0.08)
    assert full["mates_again"] == pytest.approx(1, abs=0.08)
    sizes = [result["chi2_sorted"] for result in pools]
    assert sizes == sorted(sizes, reverse=True)
    assert [result["pool_batches"] for result in pools if result["is_auto"]] == [128]
    small = order.QUICK[0]
    sampler = BlockSampler(order.block_rows_of(small), 16, shard=Shard(canonical_ranks=8), pool_batches=4)
    assert sorted(order.epoch_rows(sampler, 3).tolist()) == list(range(small.n_rows))


# ---------------------------------------------------------------------------------------------- pages


def test_a_result_is_written_as_a_page_and_as_json_of_one_line(tmp_path: Path) -> None:
    page = publish.write("loader", [TABLE], {"rates": [1.5, 2]}, "python bench/x.py", folder=tmp_path)
    (line,) = page.with_suffix(".json").read_text().splitlines()
    content = json.loads(line)
    assert page.stem.endswith(content["machine"]["date"][:7].replace("-", ""))
    assert content["command"] == "python bench/x.py"
    assert content["data"] == {"rates": [1.5, 2]}
    assert [publish.Table(**table) for table in content["tables"]] == [TABLE]
    text = page.read_text()
    for part in ("# loader\n", "`python bench/x.py`", "## targets\n", "| a\\|b | 0.5 | 0.9 |\n", "\nA note.\n"):
        assert part in text
    assert all(value in text for value in content["machine"].values())


def test_the_readme_shows_the_newest_result_of_each_kind(tmp_path: Path) -> None:
    other = publish.Table("other", ["x"], [["hidden"]])
    results = (("gpu", "2026-01-02", "1"), ("loader", "2026-02-01", "2"), ("loader", "2026-01-31", "3"))
    for what, date, measured in results:
        table = TABLE._replace(rows=[[what, measured, "9"]])
        content = {"machine": {"date": date}, "tables": [table._asdict(), other._asdict()]}
        (tmp_path / f"{what}_{date}.json").write_text(json.dumps(content))
    assert publish.targets(tmp_path).splitlines()[2:] == [
        "| loader | 2 | 9 | [loader_2026-02-01](results/loader_2026-02-01.md) |",
        "| gpu | 1 | 9 | [gpu_2026-01-02](results/gpu_2026-01-02.md) |",
    ]
    text = publish.README.read_text()
    assert publish.insert(text, publish.targets()) == text, "run python bench/publish.py"


COMMANDS = [
    *(f"run.py {suite}" for suite in ("loader --peers", "encoded", "layouts", "idle", "recsys")),
    "gpu.py --device cpu --seconds 0.1",
    "order.py",
    "start.py",
]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_benchmark_runs_on_small_data(command: str, tmp_path: Path, template: Path) -> None:
    words = [*command.split(), "--quick", "--rounds", "1", "--out", str(tmp_path)]
    words[0] = f"bench/{words[0]}"
    done = subprocess.run([sys.executable, *words], cwd=template, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (page,) = tmp_path.glob("*.json")
    for table in json.loads(page.read_text())["tables"]:
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
        for row in table["rows"]:
            assert "failed" not in row[1], row
