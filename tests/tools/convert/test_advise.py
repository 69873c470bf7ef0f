import io
import re

import h5py
import numpy as np
import pytest
from PIL import Image

from fastgpu.convert import advise as module
from fastgpu.process.machine import available_cpus


@pytest.fixture
def rates(monkeypatch):
    """rates(disk, decoded): bytes per second of the disk, and images per second of all CPUs. No memory is free."""

    def set_rates(disk: float, decoded: float) -> None:
        monkeypatch.setattr(module, "measure_disk", lambda path: disk)
        monkeypatch.setattr(
            module, "measure", lambda files, *_: (np.mean([*map(len, files)]), available_cpus() / decoded)
        )
        monkeypatch.setattr(module, "free_host_bytes", lambda: 0)

    return set_rates


def write_encoded(path) -> None:
    """Twenty JPEG files of 240 x 320 pixels, about 2 kB each."""
    rng = np.random.default_rng(0)
    files = []
    for _ in range(20):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (4, 4, 3), np.uint8)).resize((320, 240)).save(file, "JPEG")
        files.append(file.getvalue())
    with h5py.File(path, "w") as file:
        group = file.create_group("images")
        group.attrs["codec"] = "jpeg"
        group["indptr"] = np.cumsum([0, *map(len, files)])
        group["values"] = np.frombuffer(b"".join(files), np.uint8)


@pytest.mark.parametrize(
    ("rates_of_machine", "best", "has_echo"),
    [
        ((1e9, 1e9), "pixels, 56 x 56: python convert.py repack x.h5 NEW.h5 --size 56", False),
        ((6e6, 1e9), "encoded, as they are, as the rows lie now", False),
        ((1e5, 1e9), "encoded, shorter side 64: python convert.py repack x.h5 NEW.h5 --size 64 --quality 92", True),
        ((1e5, 1), "pixels, 56 x 56: python convert.py repack x.h5 NEW.h5 --size 56", True),
    ],
)
def test_pixels_win_where_the_disk_gives_them_and_files_where_the_cpus_decode_them(
    convert, rates, tmp_path, rates_of_machine, best, has_echo
):
    write_encoded(tmp_path / "x.h5")
    rates(*rates_of_machine)
    done = convert("advise", "x.h5", "--rows-per-s", "1000", "--size", "56")
    assert done.returncode == 0, done.stderr
    assert f"best: {best}\n" in done.stdout
    assert ("data.echo=" in done.stdout) == has_echo


def test_pixels_may_be_encoded(convert, rates, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = np.zeros((20, 3, 64, 64), np.uint8)
    rates(1e6, 1e9)
    done = convert("advise", "x.h5", "--rows-per-s", "500", "--size", "64")
    assert "best: encoded, same size: python convert.py repack x.h5 NEW.h5 --quality 92\n" in done.stdout


def test_the_rates_are_measured(convert, tmp_path):
    write_encoded(tmp_path / "x.h5")
    done = convert("advise", "x.h5", "--rows-per-s", "1", "--size", "16")
    assert re.search(r"this disk reads \d+\.\d+ GB/s, \d+ CPUs decode", done.stdout)
    assert "best: pixels" in done.stdout


def test_rows_without_images_are_refused(convert, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["images"] = np.zeros((20, 8), np.float32)
    assert "has no images to encode" in convert("advise", "x.h5", "--rows-per-s", "1").stderr
