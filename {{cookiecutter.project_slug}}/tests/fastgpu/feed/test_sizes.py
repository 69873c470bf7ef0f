import h5py
import numpy as np
import pytest
import torch

from fastgpu.feed import sizes as auto
from fastgpu.process import machine
from fastgpu.process.launch import UserError
from fastgpu.storage import inspection
from fastgpu.storage.store import open_store

CPU = torch.device("cpu")


def test_rank_batch():
    assert auto.choose_rank_batch(64, 4, 2, 1000, "x.h5") == 16
    with pytest.raises(UserError, match=r"data.batch_size is 66; it should be a multiple of 8 \(4 ranks x optim.acc"):
        auto.choose_rank_batch(66, 4, 2, 1000, "x.h5")
    with pytest.raises(UserError, match=r"data.batch_size is 64, but x.h5 has 63 rows; use at most 63"):
        auto.choose_rank_batch(64, 1, 1, 63, "x.h5")


@pytest.mark.parametrize(
    ("batch_rows", "ranks", "blocks", "lanes"),
    [(64, 1, 50, 8), (64, 8, 50, 8), (48, 3, 50, 24), (51, 3, 50, 3), (64, 2, 5, 2), (64, 16, 50, 16)],
)
def test_lanes(batch_size, ranks, blocks, canonical_ranks):
    assert auto.choose_lanes("auto", batch_size, ranks, blocks, "x.h5") == canonical_ranks


def test_lanes_that_do_not_fit():
    assert auto.choose_lanes(16, 64, 4, 2000, "x.h5") == 16
    with pytest.raises(
        UserError, match="data.canonical_ranks is 6; it should be auto, or a multiple of the 4 ranks that divides"
    ):
        auto.choose_lanes(6, 64, 4, 50, "x.h5")
    with pytest.raises(UserError, match="data.canonical_ranks is 12; it should be"):
        auto.choose_lanes(12, 64, 4, 50, "x.h5")
    with pytest.raises(UserError, match=r"8 ranks are more than the 5 blocks \(chunks\) of x.h5; use at most 5 ranks"):
        auto.choose_lanes("auto", 64, 8, 5, "x.h5")


def test_pool_batches():
    assert auto.choose_pool_batches(7, 64, 3072, 50_000) == 7
    assert auto.choose_pool_batches("auto", 64, 1 << 20, 50_000) == 4  # 256 MiB
    assert auto.choose_pool_batches("auto", 64, 64, 1442) == 22  # all rows
    assert auto.choose_pool_batches("auto", 512, 1 << 20, 50_000) == 1  # a batch at least


def test_readers(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    assert auto.choose_readers("auto", 1) == 8
    assert auto.choose_readers("auto", 8) == 4
    assert auto.choose_readers("auto", 64) == 1
    assert auto.choose_readers(3, 8) == 3


def test_tier(monkeypatch):
    gib = 1 << 30
    monkeypatch.setattr(auto, "free_host_bytes", lambda: 64 * gib)
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10 * gib, 80 * gib))
    assert auto.choose_tier("auto", 4 * gib, gpu, 2, "x.h5")[0] == "device"
    assert auto.choose_tier("auto", 6 * gib, gpu, 2, "x.h5")[0] == "host"
    assert auto.choose_tier("auto", 17 * gib, gpu, 2, "x.h5") == (
        "disk",
        "x.h5: 17.0 GiB with validation, on the disk tier "
        "(free for each rank: 10.0 GiB on the device, 32.0 GiB in RAM)",
    )
    assert auto.choose_tier("auto", 17 * gib, CPU, 1, "x.h5")[0] == "device"
    assert auto.choose_tier("disk", 1, gpu, 1, "x.h5")[0] == "disk"
    with pytest.raises(
        UserError, match="data.tier is device, but x.h5 needs 11.0 GiB a rank and 10.0 GiB are free; use"
    ):
        auto.choose_tier("device", 11 * gib, gpu, 1, "x.h5")


def test_free_memory_is_measured():
    assert 0 < machine.free_host_bytes() < 1 << 50


def test_workers(monkeypatch, tmp_path):
    monkeypatch.setattr(auto, "cpus", lambda: 12)
    assert auto.choose_workers("auto", 2, 1000, 4) == 3
    assert auto.choose_workers("auto", 2, 1000, 64) == 1
    assert auto.choose_workers(0, 2, 1 << 60, 1) == 0
    with pytest.raises(
        UserError, match=r"loader.num_workers is 3, loader.prefetch_factor 2: their batches take .* of .*, whe"
    ):
        auto.choose_workers("auto", 2, 1 << 50, 4, shm=str(tmp_path))


def test_cpus_follow_affinity_and_the_quota_of_the_cgroup(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    quota = {"text": "max 100000"}
    monkeypatch.setattr("pathlib.Path.read_text", lambda _: quota["text"])
    assert machine.available_cpus() == 32
    for text, available_cpus in (("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 32)):
        quota["text"] = text
        assert machine.available_cpus() == available_cpus


def test_a_file_sorted_by_class_is_told(tmp_path):
    def warning(labels: np.ndarray, pool_rows: int) -> str:
        with h5py.File(tmp_path / "x.h5", "w") as file:
            file["images"], file["labels"] = np.zeros((len(labels), 16), np.uint8), labels
        store = open_store("data.train", str(tmp_path / "x.h5"), {"images": "images", "labels": "labels"})
        return inspection.warn_of_class_order(store, pool_rows)

    classes = np.arange(1000) // 100
    assert "x.h5 is sorted by class: 99 % of neighbours share a label, by chance it would be 10 %" in warning(
        classes, 200
    )
    assert not warning(classes, 1000)  # one pool mixes all rows
    assert not warning(np.random.default_rng(0).permutation(classes), 200)
    assert not warning(np.zeros(1000, int), 200)  # there is only one
