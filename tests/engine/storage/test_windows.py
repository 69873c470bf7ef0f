"""Windows of long arrays: each is the slice of h5py that begins at its first step, whatever the layout of the file."""

import math
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpu.feed import ResidentRows, open_splits
from fastgpu.feed.tiers import measure_memory
from fastgpu.process.config import Data, LoaderConfig
from fastgpu.process.launch import UserError
from fastgpu.rows.order import BlockSampler
from fastgpu.storage import layout as layout_module
from fastgpu.storage.file import OpenFile
from support.ranks import CPU
from support.rows import PLAN, config_of, read_rows, reads_of
from support.windows import (
    SEED,
    Series,
    global_batches,
    open_windows,
    places_of,
    read_epochs,
    read_series,
    read_windows,
    same,
    steps_of,
    used_steps,
    write_ragged_series,
    write_series,
)

WINDOWS = [(16, 16), (16, 1), (64, 5), (10, 35), (1000, 450)]
"""(data.window, data.stride)"""
LENGTHS = (1500, 333, 50, 1250)
"""Steps of recordings: of some, there are not enough for the longest windows."""
TIERS = ("disk", "host", "device")


def write_one(path: Path, n_steps: int = 6011, dtype: str = "u4", shape: tuple[int, ...] = (), **options) -> Series:
    """One recording: `x` in that type, shape and layout, and `y`, uint8 (steps,), which is kept in memory."""
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=steps_of(range(n_steps), dtype, shape), **options)
        file.create_dataset("y", data=steps_of(range(n_steps), "u1"), chunks=(77,))
    return read_series(str(path))


def write_files(folder: Path) -> Series:
    """A file for each recording, which a pattern names."""
    starts = np.cumsum([0, *LENGTHS])
    paths = [folder / f"part-{number}.h5" for number in range(len(LENGTHS))]
    for path, length, start in zip(paths, LENGTHS, starts, strict=False):
        write_series(path, [length], start=start, chunks=(256,))
    return read_series([*map(str, paths)])._replace(train=f"{folder}/part-*.h5")


def write_ragged(folder: Path) -> Series:
    lengths = np.random.default_rng(0).integers(0, 150, 30).tolist()
    options = {"chunks": (256,), "compression": "gzip"}
    return write_ragged_series(folder / "ragged.h5", [*lengths, 1300, 1, 0], **options)


LAYOUTS: dict[str, Callable[[Path], Series]] = {
    "contiguous": lambda folder: write_one(folder / "contiguous.h5", dtype="u2"),
    "chunked": lambda folder: write_one(folder / "chunked.h5", 3011, "f4", (7,), chunks=(500, 7)),
    "gzip and shuffle": lambda folder: write_one(
        folder / "gzip.h5", 3011, chunks=(499,), compression="gzip", shuffle=True
    ),
    "big-endian": lambda folder: write_one(folder / "big-endian.h5", 3011, ">f8", (2,)),
    "chunks along other dimensions": lambda folder: write_one(
        folder / "split.h5", 1511, "f4", (6, 5), chunks=(64, 3, 5)
    ),
    "groups": lambda folder: write_series(folder / "groups.h5", LENGTHS),
    "several files": write_files,
    "ragged": write_ragged,
}


@pytest.fixture(scope="module")
def series_of(tmp_path_factory) -> Callable[[str], Series]:
    """series_of(layout) writes the files of that layout once."""
    folder = tmp_path_factory.mktemp("windows")
    written: dict[str, Series] = {}

    def series(name: str) -> Series:
        if name not in written:
            written[name] = LAYOUTS[name](folder)
        return written[name]

    return series


def n_windows(n_steps: int, length: int, stride: int) -> int:
    """The number of windows of a recording: of its P places where one can begin, ceil(P / stride)."""
    return math.ceil(max(0, n_steps - length + 1) / stride)


# ---------------------------------------------------------------------------------------------- the windows themselves


@pytest.mark.parametrize(("length", "stride"), WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_are_the_slices_of_h5py(series_of, layout, length, stride):
    series = series_of(layout)
    train, val = open_windows(series, length, stride)
    counts = [n_windows(len(each["x"]), length, stride) for each in series.recordings]
    assert len(train) == len(val) == sum(counts)
    for source, epoch, seed in ((train, 0, SEED), (train, 1, SEED), (val, 0, None)):
        places = places_of(read_windows(source, epoch, seed=seed), series)
        assert len(np.unique(places, axis=0)) == sum(counts)  # none comes twice
        assert np.bincount(places[:, 0], minlength=len(counts)).tolist() == counts


@pytest.mark.usefixtures("either_cached_or_not")
@pytest.mark.parametrize(("length", "stride"), [(16, 1), (64, 64), (1000, 450)])
@pytest.mark.parametrize("layout", ["contiguous", "gzip and shuffle", "big-endian", "several files"])
def test_windows_in_the_page_cache_or_not(tmp_path, layout, length, stride):
    series = LAYOUTS[layout](tmp_path)
    places_of(read_windows(open_windows(series, length, stride)[0]), series)


@pytest.mark.parametrize("kind", [bool, *"bBhHiIlLefd"])
@pytest.mark.parametrize("tier", TIERS)
def test_windows_of_every_type(tmp_path, tier, kind):
    kind = np.dtype(kind)
    values = np.random.default_rng(0).integers(0, 120, (300, 3)).astype(kind)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"], file["v"] = steps_of(range(300)), values
    series = read_series(str(tmp_path / "x.h5"), ["x", "v"])
    train, _ = open_windows(series, 20, 3)
    assert train.fields["v"].shape == (20, 3)
    places_of(read_windows(train, tier=tier), series)


def test_windows_are_samples_of_several_steps(tmp_path):
    train, _ = open_windows(write_series(tmp_path / "x.h5", [100]), 12)
    assert {name: field.shape for name, field in train.fields.items()} == {"x": (12,), "y": (12, 2)}
    assert (len(train), train.row_bytes) == (8, 12 * (4 + 2))  # the stride is the window


def test_windows_by_index(tmp_path):
    train, val = open_windows(write_series(tmp_path / "x.h5", [100]), 12, 5)
    assert val[3]["x"].tolist() == [*range(15, 27)]
    assert val[-1]["x"].tolist() == [*range(85, 97)]
    assert val[2:4]["x"].tolist() == [[*range(10, 22)], [*range(15, 27)]]
    assert len(train[:]) == len(train) == 18


def test_windows_of_documents_as_one_recording(tmp_path):
    """The values of a ragged field are named, as language models want it."""
    series = write_ragged_series(tmp_path / "x.h5", [3, 0, 50, 7, 40])
    train, val = open_windows(series, 16, 16, fields={"x": "x/values"})
    whole = Series("", [{"x": np.concatenate([each["x"] for each in series.recordings])}])
    for source, seed in ((train, SEED), (val, None)):
        places = places_of(read_windows(source, seed=seed), whole)
        assert len(places) == n_windows(100, 16, 16)


# ---------------------------------------------------------------------------------------------- recordings


def test_windows_do_not_cross_recordings(tmp_path, capsys):
    length = 20
    series = write_series(tmp_path / "x.h5", [length - 1, length, 1, length + 1, 3 * length])
    train, _ = open_windows(series, length, 1)
    for epoch in range(3):
        places = places_of(read_windows(train, epoch), series)
        assert np.bincount(places[:, 0]).tolist() == [0, 1, 0, 2, 2 * length + 1]
    printed = capsys.readouterr().out
    assert "warning: " in printed
    assert "2 of 5 recordings" in printed


def test_windows_longer_than_every_recording(tmp_path):
    series = write_series(tmp_path / "x.h5", [1999, 10, 1234])
    open_windows(series, 1999)
    with pytest.raises(UserError, match=r"data\.window is 2000.*1,999 steps"):
        open_windows(series, 2000)


@pytest.mark.parametrize("kind", ["groups", "ragged"])
@pytest.mark.parametrize("tier", TIERS)
def test_windows_repeat_one_value_of_a_recording(tmp_path, tier, kind):
    """Such as the class of a video: each window has that of its recording."""
    lengths = [40, 25, 60, 31]
    labels = np.array([[3, 1], [0, 2], [1, 5], [2, 7]])
    path = tmp_path / "x.h5"
    if kind == "ragged":
        series = write_ragged_series(path, lengths)
        with h5py.File(path, "r+") as file:
            file["label"] = labels
    else:
        series = write_series(path, lengths)
        with h5py.File(path, "r+") as file:
            for number, label in enumerate(labels):
                file[f"g{number}/label"] = label[None]
    train, val = open_windows(series, 16, 5, fields={"x": "x", "label": "label"})
    for source, seed in ((train, SEED), (val, None)):
        windows = read_windows(source, tier=tier, seed=seed)
        found = windows.pop("label")
        places = places_of(windows, series)
        assert {*places[:, 0].tolist()} == {0, 1, 2, 3}
        np.testing.assert_array_equal(found, labels[places[:, 0]])


def test_windows_of_recordings_without_steps(tmp_path, capsys):
    """Groups of no step, and of one, are left out, also if they have a value for the recording."""
    lengths = (0, 100, 1, 50, 0)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for number, n_steps in enumerate(lengths):
            file[f"demo_{number}/x"] = np.arange(n_steps)
            file[f"demo_{number}/y"] = number
    data = Data(train=f"{tmp_path}/x.h5::/demo_*", val="10%", fields={"x": "x", "y": "y"}, window=10)
    train, _ = open_splits(data, LoaderConfig(), seed=0)
    assert "3 of 5 recordings" in capsys.readouterr().out
    assert {*train.column("y").tolist()} <= {1, 3}


def test_windows_of_groups_by_a_pattern(tmp_path):
    """In the order of their numbers, as those of files are in the order of their names."""
    series = write_series(tmp_path / "x.h5", [30, 40, 50])
    with h5py.File(tmp_path / "x.h5", "r+") as file:
        file["other/x"] = steps_of(range(1000, 1100))
    train, val = open_windows(series._replace(train=f"{tmp_path}/x.h5::/g*"), 16, 4)
    assert len(train) == sum(n_windows(n, 16, 4) for n in (30, 40, 50))
    for source, seed in ((train, SEED), (val, None)):
        places_of(read_windows(source, seed=seed), series)
    with pytest.raises(UserError, match="no group"):
        open_windows(series._replace(train=f"{tmp_path}/x.h5::/h*"), 16, 4)


# ---------------------------------------------------------------------------------------------- where windows begin


@given(
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=4),
    length=st.integers(1, 40),
    stride=st.integers(1, 60),
    epoch=st.integers(0, 10**6),
)
def test_windows_begin_where_the_rule_says(tmp_path_factory, lengths, length, stride, epoch):
    """In training anywhere, at most a stride apart and never twice at one place; in validation at multiples of it."""
    if max(lengths) < length:
        return
    series = write_series(tmp_path_factory.mktemp("rule") / "x.h5", lengths)
    train, val = open_windows(series, length, stride)
    in_training = places_of(read_windows(train, epoch), series)
    in_validation = places_of(read_windows(val, seed=None), series)
    for recording, n_steps in enumerate(lengths):
        n_places = max(0, n_steps - length + 1)
        count = n_windows(n_steps, length, stride)
        fixed = in_validation[in_validation[:, 0] == recording, 1]
        assert fixed.tolist() == [*range(0, n_places, stride)]
        starts = np.sort(in_training[in_training[:, 0] == recording, 1])
        assert len(np.unique(starts)) == len(starts) == count
        if count:
            v = starts[0] * count  # v // count is the first start, and v is less than the places
            rules = {tuple((j * n_places + v + rest) // count for j in range(count)) for rest in range(count)}
            assert tuple(starts.tolist()) in rules
            assert starts[0] >= 0
            assert starts[-1] < n_places
            assert (np.diff(starts) <= stride).all()


@pytest.mark.parametrize("length", [1, 7])
@pytest.mark.parametrize("stride", [1, 3, 10])
def test_windows_of_validation_begin_at_multiples(tmp_path, length, stride):
    lengths = range(length, length + 3 * stride + 1)
    series = write_series(tmp_path / "x.h5", lengths)
    places = places_of(read_windows(open_windows(series, length, stride)[1], seed=None), series)
    expected = [[n, at] for n, n_steps in enumerate(lengths) for at in range(0, n_steps - length + 1, stride)]
    assert places.tolist() == expected


def test_windows_begin_anywhere_with_the_same_chance(tmp_path):
    """Over the epochs of a run, and over seeds. Recordings are shifted by numbers of their own."""
    n_steps, length, stride = 29, 8, 5
    series = write_series(tmp_path / "x.h5", [n_steps] * 3)
    train, _ = open_windows(series, length, stride)
    n_places, n_starts = n_steps - length + 1, n_windows(n_steps, length, stride)
    of_epochs = read_epochs(train, range(200), "device", seed=1)
    of_seeds = [read_windows(train, 0, "device", seed=seed) for seed in range(200)]
    for found in (of_epochs, of_seeds):
        places = [places_of(windows, series) for windows in found]
        counts = np.bincount(np.concatenate(places)[:, 1], minlength=n_places)
        chance, n_draws = n_starts / n_places, 3 * len(found)
        deviation = math.sqrt(n_draws * chance * (1 - chance))
        assert np.abs(counts - n_draws * chance).max() < 5.5 * deviation  # for each start, one chance in 10^7
        first = np.array([[each[each[:, 0] == recording, 1].min() for recording in range(3)] for each in places])
        assert len(np.unique(first, axis=0)) > 4 * len(np.unique(first))


def test_windows_of_a_stride_of_one_are_all(tmp_path):
    series = write_series(tmp_path / "x.h5", [90, 40])
    train, val = open_windows(series, 30, 1)
    expected = [[0, start] for start in range(61)] + [[1, start] for start in range(11)]
    for source, seed, epoch in ((train, SEED, 0), (train, SEED, 1), (val, None, 0)):
        places = places_of(read_windows(source, epoch, seed=seed), series).tolist()
        assert sorted(places) == expected
        assert (places == expected) == (source is val)  # in training they are shuffled


def test_windows_of_epochs_and_seeds_differ(tmp_path):
    series = write_series(tmp_path / "x.h5", [2000])
    train, val = open_windows(series, 64, 32)

    def starts(epoch: int = 0, seed: int = SEED) -> list[int]:
        return places_of(read_windows(train, epoch, seed=seed), series)[:, 1].tolist()

    assert starts() == starts()
    assert starts(3) == starts(3)
    others = (starts(), starts(1), starts(2), starts(0, 6))
    assert len({*map(tuple, map(sorted, others))}) == 4
    fixed = [read_windows(val, epoch, seed=None) for epoch in range(2)]
    assert same(fixed[:1], fixed[1:])


def write_unwritten(path: Path, n_steps: int, dtype: h5py.h5t.TypeID) -> Series:
    """Steps that take no disk, but for the last thousands, which have numbers."""
    with h5py.File(path, "w") as file:
        plan = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        plan.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        plan.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        h5py.h5d.create(file.id, b"x", dtype, h5py.h5s.create_simple((n_steps,)), plan)
        file["x"][-5000:] = np.arange(5000) % 251
    assert path.stat().st_blocks * 512 < 1 << 20
    return Series(str(path), [{"x": np.zeros(0, "u2")}])


def test_windows_of_billions_of_steps(tmp_path):
    n_steps = 9 * 10**9
    series = write_unwritten(tmp_path / "tokens.h5", n_steps, h5py.h5t.STD_U16LE)
    train, val = open_windows(series, 1025, 1024)
    assert len(train) == len(val) == n_windows(n_steps, 1025, 1024)
    start = (len(val) - 1) * 1024
    with h5py.File(series.train) as file:
        np.testing.assert_array_equal(val[-1]["x"], file["x"][start : start + 1025])
    plan = next(BlockSampler(train, 8, pool_batches=5, seed=SEED).pools(0))
    assert plan.n_rows == 40
    with pytest.raises(UserError, match=r"use a larger data\.stride"):
        open_windows(series, 1025, 1)


def test_windows_of_few_steps_of_billions(tmp_path):
    """Where they begin stays right where a product of two of their numbers is large, or there are not so many."""
    series = write_unwritten(tmp_path / "x.h5", 6 * 10**9 + 1, h5py.h5t.STD_U8LE)
    train, _ = open_windows(series, 3, 3)
    plan = PLAN._replace(reads=reads_of((len(train) - 4, np.arange(4))), is_shuffled=True)
    out = {"x": np.zeros((4, 3), np.uint8)}
    train.read(plan, plan.reads, out)
    values = out["x"].astype(int)
    np.testing.assert_array_equal((values - values[:, :1]) % 251, [[0, 1, 2]] * 4)
    assert {*(np.diff(values[:, 0]) % 251).tolist()} <= {2, 3}
    last_steps = [(5000 - 1 - n) % 251 for n in range(3)]
    assert values[-1, -1] in last_steps
    with pytest.raises(UserError, match=r"use a larger data\.stride"):
        open_windows(series, 2, 2)


# ---------------------------------------------------------------------------------------------- tiers, ranks, resume


@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_of_all_tiers_are_equal(series_of, layout):
    train, val = open_windows(series_of(layout), 64, 5, val="10%")
    for source, epoch, seed in ((train, 0, SEED), (train, 1, SEED), (val, 0, None)):
        found = [read_windows(source, epoch, tier, seed=seed) for tier in TIERS]
        assert same(found[:1], found[1:2])
        assert same(found[:1], found[2:])


@pytest.mark.parametrize("echo", [1, 2.5])
@pytest.mark.parametrize("layout", ["contiguous", "gzip and shuffle", "groups", "ragged"])
def test_windows_of_all_ranks_are_equal(series_of, layout, echo):
    """Each of them on a tier of its own, and from the middle of the epoch on."""
    train, _ = open_windows(series_of(layout), 64, 10, val="10%")
    expected = global_batches(train, at=(1, 0), echo=echo)
    middle = len(expected) // 2
    assert middle > 3
    for n_ranks, tier in ((1, "host"), (2, "device"), (2, "disk"), (4, "disk"), (8, "host")):
        assert same(global_batches(train, n_ranks, tier, at=(1, 0), echo=echo), expected)
        assert same(global_batches(train, n_ranks, tier, at=(1, middle), echo=echo), expected[middle:])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(("length", "stride"), WINDOWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_windows_of_all_tiers_and_ranks(series_of, layout, length, stride):
    """The whole matrix."""
    train, _ = open_windows(series_of(layout), length, stride)
    n_rows = max(1, min(8, len(train) // 24))  # of a canonical rank in a batch
    for canonical_ranks, ranks in ((8, (1, 2, 4, 8)), (3, (1, 3))):
        options = {"sizes": (canonical_ranks * n_rows, canonical_ranks)}
        if len(train) < 3 * canonical_ranks * n_rows:
            continue
        for echo in (1, 2.5):
            expected = global_batches(train, echo=echo, **options)
            middle = len(expected) // 2
            for tier in TIERS:
                for n_ranks in ranks:
                    for start in (0, middle):
                        found = global_batches(train, n_ranks, tier, at=(0, start), echo=echo, **options)
                        assert same(found, expected[start:])


@pytest.mark.parametrize("stride", [1, 16, 64])
@pytest.mark.parametrize("share", [False, True])
def test_windows_in_memory_take_that_of_the_steps(tmp_path, stride, share):
    """Those of training and of validation together, if both are of the same files."""
    series = write_series(tmp_path / "x.h5", [900, 300])
    step_bytes = 4 + 2
    train, val = open_windows(series, 64, stride, val="10%" if share else series.train)
    n_steps = 1200 if share else 2400
    for tier in ("host", "device"):
        assert measure_memory((train, val), CPU, 1).need == n_steps * step_bytes
        memory = ResidentRows((train, val), config_of(tier), CPU)
        kept = {id(rows): rows for rows in (memory.rows(train), memory.rows(val))}
        n_bytes = sum(column.nbytes for rows in kept.values() for column in rows.columns.values())
        assert n_bytes == n_steps * step_bytes


# ---------------------------------------------------------------------------------------------- validation shares


def all_steps(series: Series, share: str, length: int = 1) -> tuple[set[int], set[int]]:
    """The steps that windows of a stride of one have, in training and in validation."""
    train, val = open_windows(series, length, 1, val=share)
    in_training = used_steps(read_windows(train)) | used_steps(read_windows(train, 1))
    return in_training, used_steps(read_windows(val, seed=None))


@pytest.mark.parametrize("share", ["1%", "10%", "33.3%", "50%", "99%"])
@pytest.mark.parametrize("lengths", [[1000], [100] * 10, [20] * 50, [700, 1, 250, 49]], ids=str)
def test_windows_of_a_share_have_no_step_of_training(tmp_path, lengths, share):
    series = write_series(tmp_path / "x.h5", lengths)
    train, val = all_steps(series, share)
    assert train | val == set(range(1000))
    assert not train & val
    assert len(val) == pytest.approx(10 * float(share[:-1]), abs=1)
    # Whole recordings, and the end of one more.
    ends = np.cumsum(lengths)
    cut = [
        (sorted(val & set(range(end - n, end))), end)
        for n, end in zip(lengths, ends.tolist(), strict=True)
        if 0 < len(val & set(range(end - n, end))) < n
    ]
    assert len(cut) <= 1
    for steps, end in cut:
        assert steps == [*range(steps[0], end)]


@pytest.mark.parametrize(("length", "stride"), [(7, 3), (10, 35), (15, 15)])
def test_windows_of_a_share_whatever_the_stride(tmp_path, length, stride):
    series = write_series(tmp_path / "x.h5", [300, 400, 30, 270])
    train, val = open_windows(series, length, stride, val="20%")
    in_training, in_validation = all_steps(series, "20%")
    for epoch in range(4):
        windows = read_windows(train, epoch)
        places_of(windows, series)
        assert used_steps(windows) <= in_training
    windows = read_windows(val, seed=None)
    places_of(windows, series)
    assert used_steps(windows) <= in_validation


def test_windows_of_a_share_of_one_series_are_its_end(tmp_path):
    _, val = all_steps(write_series(tmp_path / "x.h5", [1000]), "12%", 5)
    assert val == set(range(880, 1000))


def test_windows_of_a_share_say_which_steps_are_lost(tmp_path, capsys):
    series = write_series(tmp_path / "x.h5", [100] * 10)
    for share, lost in (
        ("20%", ""),
        ("25%", "100 of its steps"),
        ("27%", "30 of its steps"),
        ("23%", "30 of its steps"),
    ):
        train, val = open_windows(series, 60, 1, val=share)
        assert ("which cuts a recording: " in (printed := capsys.readouterr().out)) == bool(lost)
        assert lost in printed
        n_steps = len(used_steps(read_windows(train))) + len(used_steps(read_windows(val, seed=None)))
        assert n_steps == 1000 - int(lost.partition(" ")[0] or 0)


def test_windows_of_a_share_depend_on_no_seed(tmp_path):
    series = write_series(tmp_path / "x.h5", [100] * 10)
    data = Data(train=series.train, val="25%", fields=series.fields, window=10, stride=10)
    found = [read_windows(open_splits(data, LoaderConfig(), seed)[1]["val"], seed=None) for seed in (0, 1, 77)]
    assert same(found[:1], found[1:2])
    assert same(found[:1], found[2:])


# ---------------------------------------------------------------------------------------------- weights, fingerprints


@pytest.mark.parametrize("tier", TIERS)
def test_windows_of_weights_are_counted(tmp_path, tier):
    """An epoch takes windows, not steps, of each file at its weight."""
    first = write_series(tmp_path / "a.h5", [500], start=0)
    second = write_series(tmp_path / "b.h5", [700], start=1000)
    series = Series({first.train: 3, second.train: 1}, [*first.recordings, *second.recordings])
    train, _ = open_windows(series, 10, 2, batch_size=16)
    for epoch in range(2):
        places = places_of(read_windows(train, epoch, tier), series)
        counts = np.bincount(places[:, 0])
        assert counts.sum() == (246 + 346) // 16 * 16
        assert counts[0] == 3 * counts[1]
    assert same(global_batches(train, 1, "disk", echo=2), global_batches(train, 4, tier, echo=2))


def test_windows_of_weights_beside_a_share(tmp_path):
    first = write_series(tmp_path / "a.h5", [500])
    second = write_series(tmp_path / "b.h5", [700], start=500)
    series = Series({first.train: 1, second.train: 1}, [*first.recordings, *second.recordings])
    train, val = open_windows(series, 10, 2, val="20%")
    windows = read_windows(train)
    places_of(windows, series)
    assert not used_steps(windows) & used_steps(read_windows(val, seed=None))


def test_windows_fingerprint_changes_with_the_rule(tmp_path):
    series = write_series(tmp_path / "x.h5", [500, 300])
    swapped = series._replace(train=series.train[::-1])
    other = write_series(tmp_path / "y.h5", [501, 300])
    sources = [
        *(open_windows(series, length, stride)[0] for length, stride in ((20, 20), (20, 10), (40, 20), (40, 10))),
        *open_windows(series, 20, 20, val="10%"),
        open_windows(swapped, 20, 20)[0],
        open_windows(other, 20, 20)[0],
    ]
    fingerprints = [source.fingerprint for source in sources]
    assert len({*fingerprints}) == len(fingerprints)
    assert open_windows(series, 20)[0].fingerprint == fingerprints[0]


# ---------------------------------------------------------------------------------------------- damage and changes


def write_compressed(path: Path) -> Series:
    return write_series(path, [4000], chunks=(500,), compression="gzip")


@pytest.mark.parametrize("tier", ["disk", "host"])
@pytest.mark.parametrize(("length", "stride"), [(16, 1), (16, 16), (900, 900)])
def test_windows_of_a_damaged_chunk(tmp_path, tier, length, stride):
    series = write_compressed(tmp_path / "x.h5")
    with h5py.File(tmp_path / "x.h5") as file:
        chunk = file["x"].id.get_chunk_info(2)
    with (tmp_path / "x.h5").open("r+b") as raw:
        raw.seek(chunk.byte_offset)
        raw.write(bytes(chunk.size))
    with pytest.raises(UserError, match=r"x\.h5: x: block 2 is damaged: it cannot be decoded .*; restore the file"):
        read_windows(open_windows(series, length, stride)[0], tier=tier)


@pytest.mark.parametrize("options", [{}, {"chunks": (500,), "compression": "gzip"}], ids=["plain", "gzip"])
@pytest.mark.parametrize(("length", "stride"), [(16, 1), (16, 16), (4200, 100)])
@pytest.mark.parametrize("when", [0, 1])
@pytest.mark.usefixtures("either_cached_or_not")
def test_windows_of_a_file_changed_while_read(tmp_path, monkeypatch, options, length, stride, when):
    """Before or after a look at the file: each read is between two of them."""
    series = write_series(tmp_path / "x.h5", [10_000], **options)
    train, _ = open_windows(series, length, stride)
    real, n_checks = OpenFile.check_unchanged, []

    def check(file: OpenFile) -> None:
        if len(n_checks) == when:
            with Path(file.path).open("r+b") as raw:
                raw.truncate(Path(file.path).stat().st_size // 2)
        n_checks.append(file)
        real(file)

    monkeypatch.setattr(OpenFile, "check_unchanged", check)
    with pytest.raises(UserError, match=r"was changed while in use; restore the file"):
        read_rows(train)  # in this thread: the end of a mapped file must not go while another one copies it
    assert len(n_checks) > when


@pytest.mark.usefixtures("all_cached")
@pytest.mark.parametrize(("length", "stride"), [(16, 1), (16, 16), (64, 200), (4200, 100)])
def test_windows_are_looked_at_between_two_checks(tmp_path, monkeypatch, length, stride):
    """After the last byte has been copied, the file is checked once more."""
    series = write_series(tmp_path / "x.h5", [10_000])
    train, _ = open_windows(series, length, stride)
    events = []
    real_check, real_cached = OpenFile.check_unchanged, OpenFile.cached

    def cached(file, offset, count):
        events.append("look")
        return real_cached(file, offset, count)

    monkeypatch.setattr(OpenFile, "check_unchanged", lambda file: (events.append("check"), real_check(file)))
    monkeypatch.setattr(OpenFile, "cached", cached)
    read_windows(train)
    looks = [number for number, event in enumerate(events) if event == "look"]
    checks = [number for number, event in enumerate(events) if event == "check"]
    assert looks
    assert checks[0] < looks[0]
    assert looks[-1] < checks[-1]


@pytest.mark.parametrize("length", [16, 300, 2000, 9000])
def test_windows_decode_each_chunk_once_or_twice(tmp_path, monkeypatch, length):
    """A pool decodes a chunk once, and once more those in which its blocks end."""
    n_chunks = 1200
    series = write_series(tmp_path / "x.h5", [n_chunks * 500], chunks=(500,), compression="gzip")
    train, val = open_windows(series, length)
    decode, calls = layout_module.decode, []
    monkeypatch.setattr(layout_module, "decode", lambda *words: (calls.append(1), decode(*words))[1])
    for source, seed in ((train, SEED), (val, None)):
        calls.clear()
        (windows,) = read_epochs(source, [0], seed=seed, batch_size=len(source))  # in one pool
        places_of(windows, series)
        assert n_chunks * 0.9 < len(calls) <= n_chunks * 1.25 + len(source.block_rows)
