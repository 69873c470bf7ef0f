"""The benchmark of the loaders: contenders deliver the rows of the file, and the numbers on a page fit together."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import data
import layouts
import processes
import tables
import worker
from contenders import CONTENDERS, FIXED, H5PY, MEMCPY, OURS, SEQUENTIAL, FastGpu
from files import open_rows
from peers import Task

TINY = data.DataSpec("tiny", 1800, (3, 8, 9), 32)  # blocks of 7 rows, the last one is short


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> data.DataSpec:
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    data.make(TINY)
    return TINY


def test_blocks_are_short_at_the_end_of_the_tiny_file(tiny: data.DataSpec) -> None:
    assert open_rows(tiny.h5).block_rows.tolist() == [7] * 257 + [1]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != FIXED])
def test_a_contender_delivers_every_row_at_most_once_an_epoch(name: str, tiny: data.DataSpec) -> None:
    contender = CONTENDERS[name](Task(tiny.h5, tiny.folder, tiny.batch_size, n_workers=1, seed=0))
    stream = worker.endless(contender)
    checked = worker.check(stream, (tiny.n_rows, *tiny.shape), 60)
    assert checked["checked_rows"] == tiny.n_rows // tiny.batch_size * tiny.batch_size
    assert worker.check(stream, (tiny.n_rows, *tiny.shape), 60) == checked
    assert all(path.is_file() for path in contender.files())


def test_every_layout_is_written_and_read(tmp_path: Path) -> None:
    spec = data.DataSpec("cifar", 700, (3, 32, 32), 64)
    expected = layouts.pictures(spec.n_rows, spec.shape)
    for number, (name, options) in enumerate(layouts.layouts(spec).items()):
        path = tmp_path / f"{number}.h5"
        layouts.write(path, expected, options)
        reader = FastGpu(Task(path, tmp_path, spec.batch_size, n_workers=0, seed=0))
        seen = set()
        for images, labels in reader.epoch(0):
            row_ids = labels.numpy()
            np.testing.assert_array_equal(images.numpy(), expected[row_ids], err_msg=name)
            seen.update(row_ids.tolist())
        reader.feed.close()
        assert len(seen) == 700 // 64 * 64, name


def test_the_check_finds_each_kind_of_error() -> None:
    images = np.zeros((4, 1, 2, 2), np.uint8)
    images[:, 0, 0, 0] = range(4)
    labels = np.arange(4)
    shape = (4, 1, 2, 2)
    assert worker.check(iter([(images, labels), None]), shape, 60) == {"checked_rows": 4}
    with pytest.raises(ValueError, match="the label of another image"):
        worker.check(iter([(images, labels[::-1]), None]), shape, 60)
    with pytest.raises(ValueError, match="twice"):
        worker.check(iter([(images, labels), (images, labels), None]), shape, 60)
    with pytest.raises(ValueError, match="float"):
        worker.check(iter([(images.astype(float), labels), None]), shape, 60)
    with pytest.raises(ValueError, match="no rows"):
        worker.check(iter([None]), shape, 60)


def test_a_span_ends_with_an_epoch_or_at_its_cap() -> None:
    epochs = iter([(None, [0] * 3), (None, [0] * 3), None, (None, [0] * 5), None])
    assert worker.advance(epochs, 0, 60) == 6
    assert worker.advance(epochs, 60, 0) == 5


@pytest.mark.slow
def test_a_contender_that_fails_says_why(tiny: data.DataSpec) -> None:
    with processes.Process("nobody", tiny, n_workers=1, is_peer=False) as process:
        with pytest.raises(processes.ContenderError, match="failed: KeyError: 'nobody'"):
            process.ask("files", 60)
        process.popen.kill()
        with pytest.raises(processes.ContenderError, match="ended with status -9"):
            process.ask("files", 60)
    with (
        processes.Process(OURS, tiny, n_workers=1, is_peer=False) as process,
        pytest.raises(processes.ContenderError, match="no answer to 'files'"),
    ):
        process.ask("files", 0)
    assert process.popen.poll() is not None


def test_evicted_files_are_not_in_the_page_cache(tiny: data.DataSpec) -> None:
    assert processes.make_cold([tiny.h5]) <= 1
    with processes.kept_warm([tiny.h5]):
        pages = -(-tiny.h5.stat().st_size // processes.mmap.PAGESIZE)
        assert processes._resident_bytes(tiny.h5) == pages * processes.mmap.PAGESIZE


def test_ratios_are_taken_within_a_round() -> None:
    def rounds(*speeds: float) -> dict[str, Any]:
        return {"rounds": [{"bytes_per_s": speed, "rows": 1, "cpu_s": 1, "memory_bytes": 1} for speed in speeds]}

    celeba = {OURS: rounds(4e9, 8e9, 9e9), H5PY: rounds(2e9, 2e9, 3e9), "spdl": {"failed": "not installable: no"}}
    spec = data.QUICK[0]._asdict() | {"row_bytes": data.QUICK[0].row_bytes}
    results = {"data": {"celeba": spec}, "workers": 2, "readers": 4, "warm": {"celeba": celeba}}
    page = tables.tables(results | {"accelerator": {}, "cold": {}, "memory": {}})
    cells = {row[0]: row[1] for row in page[0].rows}
    assert cells.pop("CelebA rows, warm: disk tier / best h5py + DataLoader") == f"3.00x [2.00-4.00] ({H5PY})"
    assert set(cells.values()) == {"not measured"}
    assert page[1].rows[2][:2] == ["spdl", "not installable: no"]
    assert {len(row) for table in page for row in table.rows} == {3, 7}


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_writes_numbers_that_fit_together(template: Path) -> None:
    command = [sys.executable, "bench/run.py", "--quick", "--rounds", "1", "--peers", "grain", "--contenders"]
    command += [OURS, H5PY, MEMCPY, FIXED]
    done = subprocess.run(command, cwd=template, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip())
    assert page.name.startswith("loader-part_")
    content = json.loads(page.with_suffix(".json").read_text())
    for table in content["tables"]:
        assert table["title"] in page.read_text()
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    results = content["data"]
    for name, spec in results["data"].items():
        contenders = results["warm"][name]
        assert set(contenders) == {OURS, H5PY, MEMCPY, "grain"}
        assert contenders.pop("grain")["failed"].startswith("not installable: bench/.venv-peers is not there")
        for contender in contenders.values():
            assert contender["checked_rows"] % spec["batch_size"] == 0
            for result in contender["rounds"]:
                assert result["rows"] > 0
                assert result["rows"] % spec["batch_size"] == 0
                assert result["bytes_per_s"] == pytest.approx(result["rows"] * spec["row_bytes"] / result["seconds"])
                assert result["cpu_s"] >= 0
    paced = results["accelerator"]["celeba"]
    ours = paced[OURS]["rounds"][0]
    fixed = paced[FIXED]["rounds"][0]
    assert set(ours) == set(fixed)
    supply = fixed.pop("supply")
    for load, rows_per_s in fixed.items():  # the fixed batch is as fast as the simulated device, and not faster
        assert rows_per_s < 1.1 * float(load) * supply
    cold = results["cold"]["celeba"]
    assert set(cold) == {SEQUENTIAL, OURS, H5PY, "grain"}
    assert all(result["cached"] <= 1 for result in cold[OURS]["rounds"])
    assert set(results["memory"]) == {"celeba", "cifar"}
    cells = {row[0]: row[1] for row in content["tables"][0]["rows"]}
    assert cells["worst feed ratio where supply >= 1.15 x demand"] != "not measured"
    assert cells["host memory of the disk tier beyond its buffers"].endswith(" MB")
