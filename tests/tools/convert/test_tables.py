import numpy as np
import polars as pl
import pytest

from fastgpu.convert.tables import Table, parse_labels
from fastgpu.process.launch import UserError


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A function that makes a table of x.csv with a text."""
    monkeypatch.chdir(tmp_path)

    def make(text: str | bytes) -> Table:
        (tmp_path / "x.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
        return Table(tmp_path / "x.csv")

    return make


def read(table: Table, *names: str) -> dict[str, list[str]]:
    return {name: table.texts(name).to_list() for name in names}


@pytest.mark.parametrize("separator", [",", ";", "\t", "|"])
def test_the_header_tells_the_separator(table, separator):
    text = f'\ufeffpath{separator} a b \r\n"1{separator}2"{separator}3 \r\n'
    assert read(table(text), "a b", "path") == {"a b": ["3"], "path": [f"1{separator}2"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na,1\nb,Quercus, robur\n", r"x.csv:3: 3 columns; its header has 2; .* quotes"),
        ("path,label,note\na,1,x\n\nb,2\n", r"x.csv:4: 2 columns; its header has 3; complete the row"),
        ('path,label,note\na,1,x\nb,2,"24 inch\nc,3,y\n', r"x.csv.*double stray ones"),
        ('path,label\na,1\nb,"2\nc,3\nd,4"\ne,5\n', r"x.csv:5: label is .*; remove the line break or stray quote"),
        ("path,label\na,1\n\nb, \n", r"x.csv:4: label is ''; it is missing"),
        ("path,label\n", r"x.csv has no rows below its header"),
        ("", r"x.csv has the columns none, and not one path"),
        ("path,kind\na,1\n", r"x.csv has the columns path, kind, and not one label"),
        ("path,label,label\na,1,2\n", r"and not one label"),
        ("path,label\n사진.png,고양이\n".encode("cp949"), r"x.csv cannot be read as a CSV file of UTF-8 text .*iconv"),
    ],
)
def test_text_that_is_lost_is_told_with_its_line(table, text, message):
    with pytest.raises(UserError, match=message):
        read(table(text), "path", "label")


def test_line_breaks_in_other_columns_are_warned_of(table, capsys):
    text = 'path,label,note\na,1,x\n\nb,2,"24 inch\nc,3,y\nd,4,12 inch"\ne,5,"say ""hi"""\nf,6,"1\n2"\n'
    made = table(text)
    assert read(made, "path")["path"] == ["a", "b", "e", "f"]
    assert "2 rows have line breaks in quotes" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"x.csv:9: x is '3'; odd"):
        made.check(pl.Series("x", [0, 1, 2, 3]), np.array([True, True, True, False]), "odd")


@pytest.mark.parametrize("value", ["12.0", "256", "-1", "", "cat"])
def test_a_number_of_another_type_is_told_with_its_line(table, value):
    with pytest.raises(UserError, match=rf"x.csv:3: n is '{value}'; it (should be a whole number|is missing)"):
        table(f"n,note\n7,a\n{value},b\n").whole_numbers("n", 255)
    assert table("n,note\n 7 ,a\n8,b\n").whole_numbers("n", 255).tolist() == [7, 8]


# ---------------------------------------------------------------------------------------------- labels


@pytest.fixture
def parse(table):
    """parse(a="0 1", b="-1 1") -> labels, attributes"""

    def make(**columns: str):
        rows = zip(*(text.split() for text in columns.values()), strict=True)
        text = "\n".join([",".join(columns) + ",end", *(",".join(row) + ",x" for row in rows)])
        return parse_labels(table(text), list(columns))

    return make


def test_labels_are_classes_attributes_or_targets(parse):
    labels, attributes = parse(kind="dog cat dog")
    assert (labels.tolist(), attributes) == ([1, 0, 1], {"class_names": ["cat", "dog"]})
    labels, attributes = parse(kind="2 0")
    assert (labels.tolist(), labels.dtype, attributes) == ([2, 0], np.int64, {"class_names": ["0", "1", "2"]})
    labels, attributes = parse(a="0 1", b="-1 1")
    assert (labels.tolist(), labels.dtype, attributes) == ([[0, 0], [1, 1]], np.uint8, {"class_names": ["a", "b"]})
    labels, attributes = parse(a="0.5 -1e-3 .25")
    assert (labels.dtype, labels.shape, attributes) == (np.float32, (3,), {})
    np.testing.assert_array_equal(labels, np.array([0.5, -1e-3, 0.25], np.float32))
    labels, attributes = parse(a="0.5 2", b="7 8")
    assert (labels.tolist(), labels.dtype, attributes) == ([[0.5, 7], [2, 8]], np.float32, {"target_names": ["a", "b"]})


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"a": "0 1", "b": "1 2"}, r"x.csv:3: b is '2'; several columns of labels are attributes, 0 or 1"),
        ({"a": "0 1", "b": "0 -1"}, r"x.csv:2: b is '0'; several columns of labels are attributes, -1 or 1"),
        ({"a": "0 1", "b": "yes no"}, r"x.csv:2: b is 'yes'; several columns of labels are numbers"),
        ({"a": "0.5 n/a 0.25"}, r"x.csv:3: a is 'n/a'; others are numbers; give numbers only .*, or names only"),
        ({"a": "cat 3"}, r"x.csv:2: a is 'cat'; others are numbers"),
        ({"a": "1.5 1e300"}, r"x.csv:3: a is '1e300'; .*not too large"),
        ({"a": "nan 0.5"}, r"x.csv:2: a is 'nan'; others are numbers"),
        ({"a": "1 20260101"}, r"x.csv:3: a is '20260101'; classes are numbered from 0 on; for targets"),
        ({"a": "1 -2"}, r"x.csv:3: a is '-2'; classes are numbered from 0 on"),
    ],
)
def test_labels_that_could_mean_two_things_are_refused_with_their_line(parse, columns, message):
    with pytest.raises(UserError, match=message):
        parse(**columns)
