from contextlib import closing
from itertools import chain
from unittest.mock import Mock

import h5py
import numpy as np
import pytest

from fastgpu.feed import ResidentRows, open_loader
from fastgpu.rows.order import BlockSampler, Shard
from fastgpu.storage.store import open_store
from support.ranks import CPU
from support.rows import DENSE_FIELDS, ITEMS, RAGGED_FIELDS, config_of, is_ragged, numbers_of, open_feed, ragged

N_ROWS = 150


@pytest.fixture
def dense(dense_file):
    return open_store("data.train", dense_file(N_ROWS), DENSE_FIELDS)


def sampler_of(source, pool_batches=3, **options) -> BlockSampler:
    return BlockSampler(source, 8, pool_batches=pool_batches, **{"seed": 5, **options})


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("echo", [1, 2.5])
@pytest.mark.parametrize("pool_batches", [1, 4, 1000])
def test_loader_epoch_resumes_at_any_step(dense, tier, echo, pool_batches):
    with closing(open_feed(dense, sampler_of(dense, pool_batches), tier, echo=echo)) as loader:
        for epoch in range(3):
            whole = [numbers_of(batch["images"]) for batch in loader.batches(epoch)]
            assert len(whole) == loader.steps_per_epoch(epoch)
            assert sum(map(len, whole)) == 8 * len(whole)
            for start in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
                assert [numbers_of(batch["images"]) for batch in loader.batches(epoch, start)] == whole[start:]


def test_loader_echo_fractions_alternate(dense):
    with closing(open_feed(dense, sampler_of(dense, 1000), "device", echo=2.5)) as loader:
        assert [loader.steps_per_epoch(epoch) for epoch in range(4)] == [2 * 18, 3 * 18, 2 * 18, 3 * 18]


def test_loader_echo_passes_have_all_rows_reordered(ragged_file):
    source = open_store("data.train", ragged_file(N_ROWS), RAGGED_FIELDS)
    with closing(open_feed(source, sampler_of(source, 1000), echo=3)) as loader:
        batches = []
        for batch in loader.batches(0):
            batches.append(batch["number"].tolist())
            assert is_ragged(batch["items"], batches[-1])
    first, second, third = (list(chain(*batches[start : start + 18])) for start in (0, 18, 36))
    assert sorted(first) == sorted(second) == sorted(third)
    assert len({*map(tuple, (first, second, third))}) == 3
    assert set(first[:8]) != set(second[:8])  # other rows stand together


@pytest.mark.parametrize("pool_batches", [1, 5])
def test_loader_echo_has_the_same_global_batches_on_all_ranks(dense, pool_batches):
    def global_batches(n_ranks: int) -> list[list[int]]:
        parts = []
        for rank in range(n_ranks):
            sampler = BlockSampler(dense, 16 // n_ranks, Shard(rank, n_ranks, 8), pool_batches, seed=5)
            with closing(open_feed(dense, sampler, echo=2.5)) as loader:
                parts.append([numbers_of(batch["images"]) for batch in chain(loader.batches(0), loader.batches(1))])
        return [list(chain(*batch)) for batch in zip(*parts, strict=True)]

    assert global_batches(1) == global_batches(2) == global_batches(4) == global_batches(8)


def test_loader_echo_needs_full_batches(dense):
    sampler = BlockSampler(dense, 8, pool_batches=2, seed=5, drop_last=False)
    with pytest.raises(ValueError, match="drop_last=True"):
        open_feed(dense, sampler, echo=2)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("dtype", [bool, *"bBhHiIlLefd"])
def test_loader_reads_every_type_on_every_tier(tmp_path, tier, dtype):
    dtype = np.dtype(dtype)
    numbers, (items, offsets) = np.arange(N_ROWS).astype(dtype), ragged(range(N_ROWS))
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["number"] = np.stack([numbers] * 9, 1), np.arange(N_ROWS)
        file["words/indptr"], file["words/values"] = offsets.astype("u8"), items.astype(dtype)
        if dtype.kind == "u" and dtype.itemsize > 1:
            file["items/indptr"], file["items/indices"] = offsets.astype(dtype), items.astype(dtype)
            file["items"].attrs["shape"] = (N_ROWS, ITEMS)
        fields = {name: name for name in file}
    source = open_store("data.train", str(tmp_path / "x.h5"), fields)
    with closing(open_feed(source, sampler_of(source), tier, echo=2)) as loader:
        for batch in loader.batches(0):
            rows = batch["number"].tolist()
            assert batch["x"].numpy().dtype == batch["words"].values.numpy().dtype == dtype
            assert (batch["x"].numpy() == numbers[rows][:, None]).all()
            assert batch["words"].values.tolist() == ragged(rows).values.astype(dtype).tolist()
            assert "items" not in fields or is_ragged(batch["items"], rows)


@pytest.mark.parametrize("tier", ["device", "host"])
def test_loader_kept_rows_are_read_once_when_needed(dense, dense_file, tier):
    val = open_store("data.val", dense_file(40, name="val.h5"), DENSE_FIELDS)
    for source in (dense, val):
        source.read = Mock(side_effect=source.read)
        source.gathers = lambda *_: []
    orders = sampler_of(dense), sampler_of(val, seed=None)
    config = config_of(tier)
    memory = ResidentRows([dense, val], config, CPU)
    loaders = [open_loader(*each, memory, config) for each in zip((dense, val), orders, strict=True)]
    with closing(loaders[0]), closing(loaders[1]):
        assert not dense.read.called
        batches = loaders[0].batches(0)
        n_reads = [dense.read.call_count, val.read.call_count]
        assert all(n_reads)  # before the loop asks for the first batch
        assert len({number for batch in batches for number in numbers_of(batch["images"])}) == 18 * 8
        assert [number for batch in loaders[1].batches(0) for number in numbers_of(batch["images"])] == [*range(40)]
        assert [dense.read.call_count, val.read.call_count] == n_reads


@pytest.mark.parametrize("n_rows", [1, 2, 13, 24, 50])
def test_loader_unshuffled_ranks_have_equally_many_batches(dense, n_rows):
    seen, counts = [], set()
    for rank in range(3):
        sampler = BlockSampler(np.full(n_rows, 1, np.int32), 4, Shard(rank, 3), 2, seed=None)
        with closing(open_feed(dense, sampler, echo=2.5)) as loader:
            batches = [numbers_of(batch["images"]) if len(batch) else [] for batch in loader.batches(0)]
        counts.add(len(batches))
        assert len(batches) == loader.steps_per_epoch(0)
        seen += chain(*batches)
    assert sorted(seen) == list(range(n_rows))
    assert len(counts) == 1


@pytest.mark.parametrize(("seed", "n_pools"), [(5, 5), (None, 2)])
def test_loader_validation_has_one_pool_ahead(dense, seed, n_pools):
    with closing(open_feed(dense, sampler_of(dense, 1, seed=seed), prefetch_pools=4)) as loader:
        addresses = {batch["images"].data_ptr() for epoch in range(2) for batch in loader.batches(epoch)}
    assert len(addresses) == n_pools


def test_loader_fingerprint_of_rows_not_of_the_tier(dense):
    def fingerprint(tier: str, echo: float = 1, seed: int = 5) -> dict[str, object]:
        with closing(open_feed(dense, sampler_of(dense, seed=seed), tier, echo=echo)) as loader:
            return loader.fingerprint

    assert fingerprint("device") == fingerprint("host") == fingerprint("disk")
    assert fingerprint("disk", echo=2) != fingerprint("disk") != fingerprint("disk", seed=6)
