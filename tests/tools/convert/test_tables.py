import numpy as np
import polars as pl
import pytest

from fastgpu.convert.tables import Table, parse_labels
from fastgpu.process.launch import UserError
from support.readers import csv_of, names_of


@pytest.fixture
def table(tmp_path):
    """A function that makes a table of x.csv with a text."""

    def make(text: str) -> Table:
        (tmp_path / "x.csv").write_text(text)
        return Table(tmp_path / "x.csv")

    return make


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_csv_separator_from_the_header(table, separator):
    made = table(f'\ufeffpath{separator} a b \r\n"1{separator}2"{separator}3 \r\n')
    assert {name: made.texts(name).to_list() for name in ("a b", "path")} == {"a b": ["3"], "path": [f"1{separator}2"]}


def test_csv_warns_of_line_breaks(table, capsys):
    made = table('path,label,note\na,1,x\n\nb,2,"24 inch\nc,3,y\nd,4,12 inch"\ne,5,"say ""hi"""\nf,6,"1\n2"\n')
    assert made.texts("path").to_list() == ["a", "b", "e", "f"]
    assert "2 rows have line breaks in quotes" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"x.csv:9: x is '3'; odd"):
        made.check(pl.Series("x", [0, 1, 2, 3]), np.array([True, True, True, False]), "odd")


def test_csv_lists_wrong_lines(table):
    made = table("n\n1\n\n" + "x\n" * 13 + "2\ny\n")
    with pytest.raises(UserError) as told:
        made.whole_numbers("n", 9)
    lines = ", ".join(map(str, range(4, 14)))
    assert f"x.csv:4: n is 'x' (wrong lines: {lines} and 4 more); it should be" in str(told.value)


@pytest.mark.parametrize(
    ("columns", "labels", "dtype", "attributes"),
    [
        ("dog cat dog", [1, 0, 1], np.int64, {"class_names": ["cat", "dog"]}),
        ("2 0", [2, 0], np.int64, {"class_names": ["0", "1", "2"]}),
        ("10 01 10", [1, 0, 1], np.int64, {"class_names": ["01", "10"]}),
        ("1st 2nd 3rd", [0, 1, 2], np.int64, {"class_names": ["1st", "2nd", "3rd"]}),
        ('"oak,red" "oak,white"', [0, 1], np.int64, {"class_names": ["oak,red", "oak,white"]}),
        ("tench;fish;cat #1", [1, 0], np.int64, {"class_names": ["#1", "tench;fish;cat"]}),
        ("0 1|-1 1", [[0, 0], [1, 1]], np.uint8, {"class_names": ["a", "b"]}),
        ("0.5 -1e-3 .25", [0.5, -1e-3, 0.25], np.float32, {}),
        ("0.5 2|7 8", [[0.5, 7], [2, 8]], np.float32, {"target_names": ["a", "b"]}),
    ],
)
def test_csv_labels_are_classes_attributes_or_targets(table, columns, labels, dtype, attributes):
    found, named = parse_labels(table(csv_of(columns)), names_of(columns))
    np.testing.assert_array_equal(found, np.array(labels, dtype))
    assert (found.dtype, named) == (dtype, attributes)
