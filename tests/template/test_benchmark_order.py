"""The benchmarks of the order and of a GPU, and the pages that all benchmarks write."""

import json
import os
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import gpu
import order
import publish

from fastgpu.rows.order import BlockSampler, Shard

ROOT = Path(__file__).parents[2]
SMALL = order.Data("small", 20_000, 131_072, 10)  # 16 rows a block
TABLE = publish.Table("targets", ["what", "measured", "required / goal"], [["a|b", "0.5", "0.9"]], "A note.")


# ---------------------------------------------------------------------------------------------- report


def test_a_result_is_written_as_a_page_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = publish.write("loader", [TABLE], {"rates": [1.5, 2]}, "python bench/x.py", folder=tmp_path)
    assert capsys.readouterr().out == f"{page}\n"
    content = json.loads(page.with_suffix(".json").read_text())
    machine = publish.machine()
    assert page.name.startswith("loader_")
    assert page.stem.endswith(machine["date"][:7].replace("-", ""))
    assert content["machine"].keys() == machine.keys()
    assert content["command"] == "python bench/x.py"
    assert content["data"] == {"rates": [1.5, 2]}
    assert [publish.Table(**table) for table in content["tables"]] == [TABLE]
    text = page.read_text()
    for part in ("# loader\n", "`python bench/x.py`", "## targets\n", "| a\\|b | 0.5 | 0.9 |\n", "\nA note.\n"):
        assert part in text
    assert all(value in text for value in content["machine"].values())


def test_a_machine_is_named_by_its_gpu_or_its_cpu() -> None:
    names = {
        ("NVIDIA H200", "any"): "nvidia-h200",
        ("none", "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"): "2-core-xeon",
        ("none", "AMD EPYC"): "2-core-epyc",
    }
    for (gpu_name, cpu), expected in names.items():
        assert publish._hardware({"gpu": gpu_name, "cpu": cpu, "cores": "2"}) == expected


def test_the_readme_shows_the_newest_result_of_each_kind(tmp_path: Path) -> None:
    assert publish.targets(tmp_path) == ""
    other = publish.Table("other", ["x"], [["hidden"]])
    results = (("gpu", "2026-01-02", "1"), ("loader", "2026-02-01", "2"), ("loader", "2026-01-31", "3"))
    for what, date, measured in results:
        table = TABLE._replace(rows=[[what, measured, "9"]])
        content = {"machine": {"date": date}, "tables": [table._asdict(), other._asdict()]}
        (tmp_path / f"{what}_{date}.json").write_text(json.dumps(content))
    lines = publish.targets(tmp_path).splitlines()
    assert lines[2:] == [
        "| loader | 2 | 9 | [loader_2026-02-01](results/loader_2026-02-01.md) |",
        "| gpu | 1 | 9 | [gpu_2026-01-02](results/gpu_2026-01-02.md) |",
    ]


def test_only_what_lies_between_the_markers_is_replaced() -> None:
    text = f"before\n{publish.BEGIN}old\n{publish.END}after\n"
    new = publish.insert(text, "new\n")
    assert new == f"before\n{publish.BEGIN}new\n{publish.END}after\n"
    assert publish.insert(new, "new\n") == new
    with pytest.raises(ValueError, match="bench/README.md has no lines"):
        publish.insert("no markers", "new\n")


def test_the_readme_is_that_of_the_newest_results() -> None:
    text = publish.README.read_text()
    assert publish.insert(text, publish.targets()) == text, "run python bench/publish.py"


# ---------------------------------------------------------------------------------------------- order


def test_chi2_is_that_of_its_formula() -> None:
    labels = np.random.default_rng(0).integers(0, 5, 103)
    slow = []
    for start in range(0, 100, 20):
        counts = [int((labels[start : start + 20] == k).sum()) for k in range(5)]
        slow.append(sum((n - 4) ** 2 / 4 for n in counts) / 4)
    assert order.chi2_per_df(labels, 20, 5) == pytest.approx(np.mean(slow))


def test_meetings_are_counted_pair_by_pair() -> None:
    rng = np.random.default_rng(0)
    n_rows = 24
    epochs = [rng.permutation(n_rows)[:20] for _ in range(2)]  # four rows are left out of each epoch
    groups = [{row: place // 5 for place, row in enumerate(epoch.tolist())} for epoch in epochs]
    pairs = list(combinations(sorted(groups[0].keys() & groups[1].keys()), 2))
    first = {(a, b) for a, b in pairs if groups[0][a] == groups[0][b]}
    second = {(a, b) for a, b in pairs if groups[1][a] == groups[1][b]}
    expected = len(first & second) / len(first) / (len(second) / len(pairs))
    assert order.meet_again(epochs[0], epochs[1], 5, n_rows) == pytest.approx(expected)


def test_an_epoch_has_every_row_once() -> None:
    row_ids = order.epoch_rows(BlockSampler(SMALL.block_rows, 16, shard=Shard(canonical_ranks=8), pool_batches=4), 3)
    assert sorted(row_ids.tolist()) == list(range(SMALL.n_rows))


@pytest.mark.slow
def test_pools_of_many_blocks_or_a_file_in_random_order_look_shuffled() -> None:
    results = list(order.qualities(SMALL, 16, (1, 8, 128)))
    full = results[-1]
    assert full.pool_batches == 0
    by_size = {(result.pool_blocks, result.canonical_ranks): result for result in results[:-1]}
    for result in results:
        assert result.chi2_random == pytest.approx(1, abs=0.08)
    for number in (full.chi2_sorted, full.batch_again, full.pool_again):
        assert number == pytest.approx(1, abs=0.08)
    sizes = [by_size[blocks, 1].chi2_sorted for blocks in (1, 8, 128)]
    assert sizes[0] == pytest.approx(16)  # every batch is of one class
    assert sizes[0] > sizes[1] > sizes[2] > 1
    assert by_size[1, 1].batch_again > 100 * full.batch_again  # the same batches in each epoch
    assert [result.pool_batches for result in results if result.is_default] == [128]
    table = order.quality_table(results)
    assert {len(row) for row in table.rows} == {len(table.columns)}
    assert f"{by_size[128, 8].chi2_sorted:.1f} with 128 blocks" in table.note


def test_the_start_of_an_epoch_is_measured() -> None:
    ours, torchs = order.start_blocks(10**6), order.start_torch(10**6)
    assert min(ours.seconds, torchs.seconds) > 0
    rows = order.scale_table(ours._replace(peak_bytes=10**6), torchs._replace(peak_bytes=10**8)).rows
    assert [row[3] for row in rows] == ["1", "100", "computed: 10,000"]


# ---------------------------------------------------------------------------------------------- gpu


def test_feed_ratios_are_taken_within_a_round() -> None:
    contenders = {
        gpu.FIXED: {"rounds": [{"steps_per_s": 10}, {"steps_per_s": 20}]},
        "disk tier": {"rounds": [{"steps_per_s": 9}, {"steps_per_s": 20}]},
    }
    assert gpu.feed_ratios(contenders, "disk tier") == [0.9, 1.0]


@pytest.mark.slow
def test_a_part_that_fails_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(folder: Path) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setitem(gpu.TINY_CASES, "CIFAR-10", fail)
    words = ["gpu.py", "--device", "cpu", "--out", str(tmp_path), "--parts", "CIFAR-10", "copy"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit, match="not measured: CIFAR-10"):
        gpu.main()
    (path,) = tmp_path.glob("gpu_*.json")
    assert json.loads(path.read_text())["data"] == {"copy": {}}


def run_gpu(*options: str) -> subprocess.CompletedProcess[str]:
    # One thread: those of two jobs on one machine spend minutes waiting for each other.
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, str(ROOT / "bench" / "gpu.py"), *options]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


@pytest.mark.slow
def test_without_a_gpu_nothing_is_measured() -> None:
    done = run_gpu()
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "not measured: torch sees no CUDA device\n")


@pytest.mark.nightly
@pytest.mark.slow
def test_the_gpu_benchmark_runs_on_a_cpu(tmp_path: Path) -> None:
    done = run_gpu("--device", "cpu", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu_*.json")
    content = json.loads(path.read_text())
    tables = {table["title"]: publish.Table(**table) for table in content["tables"]}
    assert list(tables) == ["targets", *gpu.CASES]
    for name in gpu.CASES:
        table = tables[name]
        assert [row[0] for row in table.rows] == list(gpu.CONTENDERS)
        assert {len(row) for row in table.rows} == {len(table.columns)}
        for contender, measured in content["data"][name]["contenders"].items():
            if not measured["rounds"]:  # other parts of images in each epoch cannot stay on the device
                assert (name, contender) == ("ResNet-18, JPEG files", "device tier")
                assert "decodes other parts" in measured["note"]
            assert all(each["steps_per_s"] > 0 for each in measured["rounds"])
