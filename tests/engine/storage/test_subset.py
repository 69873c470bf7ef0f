import numpy as np
import pytest
from harness import is_ragged, numbered, numbers_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scattered import read_scattered
from torch.utils.data import Dataset

from fastgpu.dataset.source import DatasetSource
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source
from fastgpu.rows.selection import hold_out
from fastgpu.storage.arrays import Arrays
from fastgpu.storage.store import open_store

FIELDS = {"images": "images", "labels": "labels"}


def made_of_numbers(block_rows: list[int]) -> Source:
    """A source whose rows are their own numbers."""
    return Arrays("x", {"x": np.arange(sum(block_rows))}, block_rows=np.array(block_rows, np.int32))


def numbers_in(source: Source) -> np.ndarray:
    """The rows of `made_of_numbers` that a source has."""
    return read_scattered(source)["x"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.floats(0.01, 0.99))
def test_the_parts_are_exact_and_disjoint_and_keep_their_rows(block_rows, share):
    source = made_of_numbers(block_rows)
    n_val = round(share * len(source))
    if not 0 < n_val < len(source):
        return
    train, val = hold_out(source, share)
    assert (len(train), len(val)) == (len(source) - n_val, n_val)
    together = np.concatenate([numbers_in(train), numbers_in(val)])
    np.testing.assert_array_equal(np.sort(together), np.arange(len(source)))
    for part in (train, val):
        assert (part.block_rows > 0).all()
        assert (np.diff(numbers_in(part)) > 0).all()  # in the order of the source
        np.testing.assert_array_equal(part.column("x"), numbers_in(part))


@pytest.mark.parametrize(("n_rows", "block_rows"), [(2000, 2000), (2000, 1), (50_000, 20), (50_000, 10_000)])
@pytest.mark.parametrize("order", ["sorted", "periodic", "random"])
def test_a_share_is_fair_to_every_class_whatever_the_order_of_the_rows(n_rows, block_rows, order):
    labels = np.arange(n_rows) * 10 // n_rows
    if order == "periodic":
        labels = np.arange(n_rows) % 10
    elif order == "random":
        labels = np.random.default_rng(5).permutation(labels)
    _, val = hold_out(made_of_numbers([block_rows] * (n_rows // block_rows)), 0.1)
    counts = np.bincount(labels[numbers_in(val)], minlength=10)
    expected = n_rows / 100
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()


def test_reads_of_a_large_file_stay_long():
    source = made_of_numbers([50] * 2000)
    train, val = hold_out(source, 0.1)
    np.testing.assert_array_equal(train.block_rows, np.full(2000, 45))
    for block in np.split(numbers_in(train), 2000):
        assert (np.diff(block) > 1).sum() <= 1  # at most two pieces
    np.testing.assert_array_equal(val.block_rows, np.full(2000, 5))


def test_the_rows_held_out_never_change():
    """Frozen: a resumed run must not train on rows that it was validated on."""
    _, val = hold_out(made_of_numbers([4, 3, 6, 7]), 0.25)
    assert numbers_in(val).tolist() == [2, 11, 12, 15, 17]


@pytest.mark.parametrize("share", [0, 0.01, 0.99, 1, 2])
def test_a_share_without_rows_on_one_side_is_refused(share):
    message = rf"data.val is {100 * share:g}%, which is \d+ of the 10 rows of x; use a share that leaves rows"
    with pytest.raises(UserError, match=message):
        hold_out(made_of_numbers([10]), share)


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}, {"fletcher32": True}])
def test_rows_of_files_are_whole(write, options):
    store = open_store("data.train", write(100, chunk=7, **options), FIELDS)
    parts = hold_out(store, 0.3)
    numbers = []
    for part in parts:
        rows = read_scattered(part)
        part_numbers = numbers_of(rows["images"])
        assert rows["labels"].tolist() == part.column("labels").tolist() == [number % 4 for number in part_numbers]
        assert part.row_bytes == store.row_bytes
        numbers += part_numbers
    assert sorted(numbers) == list(range(100))


def test_ragged_rows_are_whole(write_ragged):
    store = open_store("data.train", write_ragged(300), {"items": "items", "number": "number"})
    for part in hold_out(store, 0.2):
        rows = read_scattered(part)
        assert is_ragged(rows["items"], rows["number"])
        assert part.fields["items"].mean_values == pytest.approx(part.lengths["items"].mean())
        assert part.fields["items"].n_items == store.fields["items"].n_items


class Numbered(Dataset):
    targets = np.arange(50)

    def __len__(self) -> int:
        return 50

    def __getitem__(self, row: int):
        return numbered(1, start=row)[0], row


def test_rows_of_a_dataset_are_held_out_one_by_one():
    parts = hold_out(DatasetSource("Numbered", Numbered(), FIELDS), 0.2)
    numbers = []
    for part in parts:
        assert isinstance(part, DatasetSource)
        rows = read_scattered(part)
        assert numbers_of(rows["images"]) == rows["labels"].tolist() == part.column("labels").tolist()
        numbers += rows["labels"].tolist()
    assert sorted(numbers) == list(range(50))
    assert len(parts[1]) == 10
