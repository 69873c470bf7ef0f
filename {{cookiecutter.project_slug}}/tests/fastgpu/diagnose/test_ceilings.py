"""Causes planted in a real feed in front of a simulated device are named, and what their cure gives is foretold."""

import time
from typing import Any

import pytest
import torch
from harness import in_world
from simulated import BATCH, BLOCK, CPU, PLANTED, POOL_BATCHES, ROWS, seen, slow_second_rank, speed

from fastgpu.diagnose.ceilings import Feeds, Parts, Pools, TorchDevice, make_feeds
from fastgpu.diagnose.verdict import Facts, judge
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.store import open_store


@pytest.fixture
def path(write, monkeypatch):
    monkeypatch.setattr("fastgpu.feed.prefetch.JOB_BYTES", 1)  # a block is a job, however small the rows
    return write(ROWS, (1, 4, 2), chunk=BLOCK)


def agrees(foretold: float, measured: float, rel: float, tries: list[float]) -> bool:
    """Whether they do, in one of three tries: other programs on this machine may spoil one, but an error spoils all."""
    tries.append(measured / foretold)
    return tries[-1] == pytest.approx(1, rel=rel)


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.cause)
def test_a_planted_cause_is_named_and_its_cures_gain_foretold(path, planted):
    tries = list[float]()
    while len(tries) < 3:
        slow = seen(path, **planted.slow)
        verdict = judge(slow, planted.facts, planted.tried)
        is_close = agrees(verdict.gain, speed(seen(path, **planted.cured)) / speed(slow), 0.15, tries)
        if is_close and verdict.cause == planted.cause:
            assert verdict.change.startswith(planted.change)
            return
    pytest.fail(f"{verdict}; gain after the cure / foretold: {tries}")


@pytest.mark.slow
def test_one_slow_rank_of_two(path):
    tries = list[float]()
    while len(tries) < 3:
        slow, cured = (in_world(2, slow_second_rank, path, seconds) for seconds in (0.03, 0.012))
        verdicts = [judge(m, Facts()) for m in slow]
        assert verdicts[0].cause == verdicts[1].cause == "STRAGGLER"
        assert verdicts[0].change.startswith("look at the machine of rank 1")
        if agrees(verdicts[0].gain, speed(cured[0]) / speed(slow[0]), 0.15, tries):
            return
    pytest.fail(f"gain after the cure / foretold: {tries}")


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.5, 0.8, 1.25, 4])  # supply / demand
def test_feed_ratio_is_that_of_theory(path, load):
    tries = list[float]()
    while len(tries) < 3:
        m = seen(path, 0.012, decode_s=0.012 / load - 0.0002)
        theory = min(1.0, m.compute.step_s / m.supply.step_s)  # as the sleeps really were
        assert theory == pytest.approx(min(1.0, load), rel=0.2)
        if agrees(theory, m.feed_ratio.step_s, 0.03, tries):
            return
    pytest.fail(f"measured / theory: {tries}")


def test_pools_are_those_of_the_feed(path):
    """The parts see each row of an epoch once, echoed or not, and feeds of few blocks only those."""
    rows = open_store("data.train", path, {"images": "images", "labels": "labels"})
    order = BlockSampler(rows.block_rows, BATCH, pool_batches=POOL_BATCHES)
    sizes: Any = type("Sizes", (), {"tier": "disk", "readers": 2})
    feeds: Feeds = make_feeds(rows, order, sizes, CPU, 2, False)
    batches = list[Rows]()

    def keep(batch: Rows) -> None:
        batches.append(batch.take(torch.arange(BATCH)))

    for times in (1, 2):
        batches.clear()
        pools = Pools(feeds.real, Parts(lambda rows: rows, keep, keep, BATCH, times))
        assert pools.train(order.pools_per_epoch) == len(batches) == times * ROWS // BATCH
        numbers = torch.cat([batch["images"].flatten(1)[:, :4].contiguous().view(torch.int32) for batch in batches])
        assert sorted(numbers.flatten().tolist()) == sorted([*range(ROWS)] * times)
    assert feeds.cached
    few = {
        n
        for pool in feeds.cached.pools(3)
        for n in pool.rows["images"].flatten(1)[:, :4].contiguous().view(torch.int32).flatten().tolist()
    }
    assert few == set(range(len(few)))
    assert len(few) <= 2 * POOL_BATCHES * BATCH + BLOCK
    feeds.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_syncs_and_work_are_seen():
    device, x = TorchDevice(torch.device("cuda", 0)), torch.ones(2048, 2048, device="cuda")

    def work() -> None:
        for _ in range(20):
            torch.mm(x, x)

    assert device.syncs(work) == []
    assert device.syncs(lambda: x.sum().item())[0].startswith("tests/fastgpu/diagnose/test_ceilings.py")
    work()
    device.synchronize()
    t0 = time.perf_counter()
    work()
    device.synchronize()
    assert 0 < (device.busy_s(work) or 0) < 1.2 * (time.perf_counter() - t0) + 0.01
