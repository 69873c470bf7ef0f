import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import data
import layouts
import processes
import tables
import worker
from contenders import CONTENDERS, FIXED, H5PY, MEMCPY, OURS, SEQUENTIAL

TINY = data.Rows("tiny", 300, (3, 8, 9), 32)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> data.Rows:
    monkeypatch.setattr(data, "FOLDER", tmp_path)
    monkeypatch.setattr("fastgpu.convert.writer.LEAST_BLOCKS", 42)  # blocks of 7 rows, the last one is short
    data.make(TINY)
    return TINY


@pytest.mark.parametrize("name", [name for name in CONTENDERS if name != FIXED])
def test_a_contender_delivers_every_row_at_most_once_an_epoch(name: str, tiny: data.Rows) -> None:
    contender = CONTENDERS[name](tiny.h5, tiny.folder, tiny.batch_size, 1, 0)
    stream = worker.endless(contender)
    found = worker.check(stream, (tiny.rows, *tiny.shape), 60)
    assert found["checked_rows"] == tiny.rows // tiny.batch_size * tiny.batch_size
    assert worker.check(stream, (tiny.rows, *tiny.shape), 60) == found
    assert all(path.is_file() for path in contender.files())


def test_every_layout_is_written_and_read(tmp_path: Path) -> None:
    rows = layouts.Rows("cifar", 700, (3, 32, 32), 64)
    images = layouts.pictures(rows)
    for number, (name, options) in enumerate(layouts.layouts(rows).items()):
        layouts.write(tmp_path / f"{number}.h5", images, options)
        reader = layouts.Reader(tmp_path / f"{number}.h5", rows, name.endswith("verify"))
        found = [pair for batch in reader.epoch(0) for pair in zip(*map(np.asarray, batch), strict=True)]
        reader.feed.close()
        assert len({int(label) for _, label in found}) == 700 // 64 * 64, name
        assert all(np.array_equal(image, images[label]) for image, label in found), name


def test_the_check_sees_what_is_wrong() -> None:
    images = np.zeros((4, 1, 2, 2), np.uint8)
    images[:, 0, 0, 0] = range(4)
    labels = np.arange(4)
    shape = (4, 1, 2, 2)
    assert worker.check(iter([(images, labels), None]), shape, 60) == {"checked_rows": 4}
    with pytest.raises(ValueError, match="another one's label"):
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


def test_a_contender_that_fails_says_why(tiny: data.Rows) -> None:
    with processes.Process("nobody", tiny, 1, False) as process:
        with pytest.raises(processes.ContenderError, match="failed: KeyError: 'nobody'"):
            process.ask("files", 60)
        process.process.kill()
        with pytest.raises(processes.ContenderError, match="ended with status -9"):
            process.ask("files", 60)
    match = "no answer to 'files'"
    with processes.Process(OURS, tiny, 1, False) as process, pytest.raises(processes.ContenderError, match=match):
        process.ask("files", 0)
    assert process.process.poll() is not None


def test_evicted_files_are_not_in_the_page_cache(tiny: data.Rows) -> None:
    assert processes.make_cold([tiny.h5]) <= 1
    with processes.kept_warm([tiny.h5]):
        pages = -(-tiny.h5.stat().st_size // processes.mmap.PAGESIZE)
        assert processes._resident_bytes(tiny.h5) == pages * processes.mmap.PAGESIZE


def test_ratios_are_taken_within_a_round() -> None:
    def rounds(*speeds: float) -> dict[str, Any]:
        return {"rounds": [{"bytes_per_s": speed, "rows": 1, "cpu_s": 1, "memory_bytes": 1} for speed in speeds]}

    celeba = {OURS: rounds(4e9, 8e9, 9e9), H5PY: rounds(2e9, 2e9, 3e9), "spdl": {"failed": "not installable: no"}}
    about = data.QUICK[0]._asdict() | {"row_bytes": data.QUICK[0].row_bytes}
    found = {"data": {"celeba": about}, "workers": 2, "readers": 4, "warm": {"celeba": celeba}}
    made = tables.tables(found | {"accelerator": {}, "cold": {}, "memory": {}})
    cells = {row[0]: row[1] for row in made[0].rows}
    assert cells.pop("CelebA rows, warm: disk tier / best h5py + DataLoader") == f"3.00x [2.00-4.00] ({H5PY})"
    assert set(cells.values()) == {"not measured"}
    assert made[1].rows[2][:2] == ["spdl", "not installable: no"]
    assert {len(row) for table in made for row in table.rows} == {3, 7}


@pytest.mark.slow
def test_a_run_writes_numbers_that_fit_together(template: Path) -> None:
    command = [sys.executable, "bench/run.py", "--quick", "--rounds", "1", "--peers", "grain", "--contenders"]
    ran = subprocess.run(
        [*command, OURS, H5PY, MEMCPY, FIXED], cwd=template, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    page = Path(ran.stdout.strip())
    assert page.name.startswith("loader-part_")
    written = json.loads(page.with_suffix(".json").read_text())
    for table in written["tables"]:
        assert table["title"] in page.read_text()
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    found = written["data"]
    for name, about in found["data"].items():
        assert set(found["warm"][name]) == {OURS, H5PY, MEMCPY, "grain"}
        assert found["warm"][name].pop("grain")["failed"].startswith("not installable: bench/.venv-peers is not there")
        for got in found["warm"][name].values():
            assert got["checked_rows"] % about["batch_rows"] == 0
            for each in got["rounds"]:
                assert each["rows"] > 0
                assert each["rows"] % about["batch_rows"] == 0
                assert each["bytes_per_s"] == pytest.approx(each["rows"] * about["row_bytes"] / each["seconds"])
                assert each["cpu_s"] >= 0
    paced = found["accelerator"]["celeba"]
    assert set(paced[OURS]["rounds"][0]) == set(paced[FIXED]["rounds"][0])
    for load, rows_per_s in paced[FIXED]["rounds"][0].items():  # the fixed batch goes as fast as the device, no faster
        if load != "supply":
            assert rows_per_s < 1.1 * float(load) * paced[FIXED]["rounds"][0]["supply"]
    assert set(found["cold"]["celeba"]) == {SEQUENTIAL, OURS, H5PY, "grain"}
    assert all(each["cached"] <= 1 for each in found["cold"]["celeba"][OURS]["rounds"])
    assert set(found["memory"]) == {"celeba", "cifar"}
    cells = {row[0]: row[1] for row in written["tables"][0]["rows"]}
    assert cells["worst feed ratio where supply >= 1.15 x demand"] != "not measured"
    assert cells["host memory of the disk tier beyond its buffers"].endswith(" MB")
