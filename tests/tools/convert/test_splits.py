"""Which rows go to which file: splits by class, by the values of a column, and first looks."""

import re

import h5py
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastgpu.convert.splits import Split, draw_groups, draw_rows, draw_splits, split_rows
from fastgpu.convert.writing import Writing, write_files
from support.readers import Numbers

SHARES = (0.8, 0.1, 0.1)


def test_splits_by_class():
    labels = np.repeat([0, 1, 2], [100, 10, 3])
    splits = draw_splits(labels, SHARES, seed=1)
    assert [np.bincount(labels[splits == number]).tolist() for number in range(3)] == [[80, 8, 2], [10, 1, 1], [10, 1]]
    again, other = (draw_splits(labels, SHARES, seed=seed) for seed in (1, 2))
    assert splits.tolist() == again.tolist() != other.tolist()
    for labels in (np.random.default_rng(0).random(100), np.zeros((100, 3), int)):
        assert np.bincount(draw_splits(labels, (0.7, 0.2, 0.1), seed=0)).tolist() == [70, 20, 10]


@given(seed=st.integers(0, 1000), n_values=st.integers(30, 200), shares=st.sampled_from([SHARES, (0.5, 0.5)]))
def test_splits_keep_the_rows_of_a_value_together(seed, n_values, shares):
    """And have the shares asked for, but for half of a large value."""
    values = np.random.default_rng(seed).integers(0, n_values, 2000).astype(str)
    splits = draw_groups("patient", values, shares, seed)
    assert all(len({*splits[values == value]}) == 1 for value in np.unique(values))
    largest = np.unique(values, return_counts=True)[1].max()
    np.testing.assert_allclose(np.bincount(splits), np.multiply(shares, len(values)), atol=largest)
    assert splits.tolist() == draw_groups("patient", values, shares, seed).tolist()


@pytest.mark.parametrize(
    ("counts", "expected"), [([5] * 5, [3, 1, 1]), ([60, 3, 3, 2, 2, 1], [1, 3, 2]), ([9] * 4, [2, 1, 1])]
)
def test_splits_of_few_values_have_one_each(counts, expected, capsys):
    values = np.repeat(np.arange(len(counts)), counts)
    splits = draw_groups("patient", values, SHARES, 0)
    assert [len({*values[splits == number]}) for number in range(3)] == expected
    printed = capsys.readouterr().out
    assert printed.startswith(f"split by patient, whose values stay together: train {expected[0]} with ")


def test_splits_by_value_are_drawn_at_random():
    values = np.repeat(np.arange(100), 3)
    found = {tuple(draw_groups("patient", values, SHARES, seed).tolist()) for seed in range(5)}
    assert len(found) == 5


@given(seed=st.integers(0, 1000), n_rows=st.integers(1, 300))
def test_limit_keeps_the_shares_of_the_classes(seed, n_rows):
    strata = np.repeat([0, 1, 2], [150, 120, 30])
    is_taken = draw_rows(strata, n_rows, seed)
    assert is_taken.sum() == n_rows
    np.testing.assert_allclose(
        np.bincount(strata[is_taken], minlength=3), n_rows * np.array([0.5, 0.4, 0.1]), atol=1.01
    )
    rare = np.mean([draw_rows(strata, 5, each)[270:].sum() for each in range(seed, seed + 200)])
    assert 0.3 < rare < 0.7  # half of a row


def test_limit_of_the_first_rows():
    assert np.flatnonzero(draw_rows(np.zeros(9, int), 4, None)).tolist() == [0, 1, 2, 3]
    assert np.flatnonzero(draw_rows(np.repeat([0, 1], 6), 4, None)).tolist() == [0, 1, 6, 7]


ASKED = st.builds(
    Split,
    shares=st.sampled_from([None, (0.5, 0.5), (0.4, 0.3, 0.3)]),
    by=st.sampled_from(["", "who"]),
    seed=st.integers(0, 9),
    limit=st.sampled_from([None, 20, 40]),
    is_in_order=st.booleans(),
)
FEW = st.sets(st.integers(0, 19), max_size=2)


@given(n_rows=st.integers(20, 80), odd=FEW, known=FEW, asked=ASKED)
def test_rows_are_written_or_listed(tmp_path_factory, n_rows, odd, known, asked):
    """Each row once, whatever is asked for; of a first look, as many as it has."""
    target = tmp_path_factory.mktemp("rows") / "x.h5"
    reader = Numbers(n_rows, odd, known)
    if asked.shares and asked.by:
        reader.split_by = np.arange(n_rows) // 2
    parts = split_rows(reader, asked)
    write_files(parts, target, Writing(None if asked.is_in_order else 0, max_broken=1.0))
    files = [target.with_name(f"x-{name}.h5" if name else "x.h5") for name in parts]
    written: list[int] = []
    for path in files:
        with h5py.File(path) as file:
            written += file["y"][:].tolist()
    listed = target.with_name("x.h5.skipped.txt")
    lines = listed.read_text().splitlines() if listed.exists() else []
    broken = [int(re.findall(r"\d+", line)[0]) for line in lines]
    assert {*broken} <= {*odd, *known}
    assert len({*written, *broken}) == len(written + broken) == min(n_rows, asked.limit or n_rows)
    assert not {*written} & {*odd, *known}


def test_arrays_split_by_a_named_array(tmp_path, convert):
    """Text is not written. Rows without a value are broken."""
    rng = np.random.default_rng(0)
    patient = np.array([f"p{n}" for n in rng.integers(0, 40, 500)])
    patient[[3, 8]] = ""
    np.savez(tmp_path / "x.npz", x=np.arange(500), labels=np.arange(500) % 2, day=np.arange(500) // 10)
    np.save(tmp_path / "patient.npy", patient)
    words = "arrays x.npz patient=patient.npy y.h5 --split 0.8,0.1,0.1 --split-by patient"
    refused = convert(words, code=2).err
    assert refused.startswith("error: 2 of 500 rows are broken, which y.h5.broken.txt lists")
    assert "\n  x.npz, patient=patient.npy: row 8: patient is missing\n" in refused
    printed = convert(words, "--on-error skip").out
    assert "patient is text, which rows cannot hold: it decides the split, and is not written" in printed
    parts = {}
    for name in ("train", "val", "test"):
        with h5py.File(tmp_path / f"y-{name}.h5") as file:
            assert {*file} == {"x", "labels", "day", "fastgpu_sha256"}
            parts[name] = {*patient[file["x"][:]]}
    assert not any(parts[a] & parts[b] for a, b in (("train", "val"), ("train", "test"), ("val", "test")))
    assert "" not in set.union(*parts.values())

    convert("arrays x.npz y.h5 --force --split 0.8,0.1,0.1 --split-by day --limit 100 --threads 1")
    days = []
    for name in ("train", "val", "test"):
        with h5py.File(tmp_path / f"y-{name}.h5") as file:
            days.append({*file["day"][:].tolist()})
            assert 0 < np.mean(file["labels"][:]) < 1
    assert sum(map(len, days)) == len(set.union(*days))


def test_limit_writes_some_rows(tmp_path, convert):
    np.save(tmp_path / "x.npy", np.arange(1000))
    np.save(tmp_path / "labels.npy", np.arange(1000) // 900)
    words = "arrays x=x.npy labels=labels.npy y.h5 --force --limit"
    assert "--limit: 50 of 1,000 rows, drawn at random, of each class alike\n" in convert(words, 50).out
    with h5py.File("y.h5") as file:
        assert (len(file["x"]), file["labels"][:].sum()) == (50, 5)
    assert "the first ones, in the order of the source" in convert(words, "20 --keep-order").out
    with h5py.File("y.h5") as file:
        assert file["x"][:].tolist() == [*range(20)]
    assert "--limit" not in convert(words, 2000).out
