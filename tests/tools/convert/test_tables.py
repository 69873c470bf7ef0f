from pathlib import Path

import numpy as np
import pytest

from fastgpu.convert.images.tables import parse_labels, read_table
from fastgpu.process.launch import UserError

PATH = Path("x.csv")


def parse(n_classes: int | None = None, **columns: str) -> tuple[np.ndarray, dict]:
    words = {name: text.split() for name, text in columns.items()}
    lines = range(2, 2 + len(next(iter(words.values()))))
    return parse_labels(PATH, words, lines, n_classes)


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_the_header_tells_the_delimiter(tmp_path, capsys, delimiter):
    path = tmp_path / "x.csv"
    path.write_text(f'path{delimiter}a b\n"1{delimiter}2"{delimiter}3\n', encoding="utf-8-sig")
    columns, lines = read_table(path, ["a b", "path"], None)
    assert columns == {"a b": ["3"], "path": [f"1{delimiter}2"]}
    assert lines == [2]
    assert ("--delimiter" in capsys.readouterr().out) == (delimiter != ",")


def test_spaces_around_the_names_of_columns_mean_nothing(tmp_path, capsys):
    path = tmp_path / "x.csv"
    path.write_text("path , label, a b\na.png , 1,2\n")
    assert read_table(path, ["path", "label"], None)[0] == {"path": ["a.png"], "label": ["1"]}
    assert capsys.readouterr().out == "columns that are not used: a b\n"


def test_a_delimiter_can_be_given(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text("path|label,kind\na|1\n")
    assert read_table(path, ["label,kind"], "|")[0] == {"label,kind": ["1"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,label\na,1\nb,Quercus, robur\n", r"x.csv:3: 3 columns; its header has 2; put quotes .* --delimiter$"),
        ("path,label\na,1,75\n", r"x.csv:2: 3 columns; its header has 2"),
        ("path,label,note\na,1,x\n\nb,2\n", r"x.csv:4: 2 columns; its header has 3"),
        ('path,label,note\na,1,x\nb,2,"24 inch\nc,3,y\n', r"x.csv:3: unexpected end of data; close the quotes"),
        ('path,label,note\na,1,x\n\nb,2,"24" wide\n', r"x.csv:4: .* expected after .*double a stray one"),
        ('path,label,note\na,1,"' + "x,y,z\n" * 30_000, r"x.csv:2: field larger than .*close the quotes"),
        ('path,label\na,1\nb,"2\nc,3\nd,4"\ne,5\n', r"x.csv:3: label has a line break in quotes; remove it"),
        ('"path,label\na,1\n', r"x.csv:1: unexpected end of data"),
    ],
)
def test_rows_that_lose_text_or_swallow_lines_are_refused_with_the_line_where_they_begin(tmp_path, text, message):
    (tmp_path / "x.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_table(tmp_path / "x.csv", ["path", "label"], None)


def test_text_in_another_encoding_is_to_be_saved_as_utf_8(tmp_path):
    (tmp_path / "x.csv").write_text("path,label\n사진.png,고양이\n", encoding="cp949")
    with pytest.raises(
        UserError, match=r"x.csv is not a CSV file of UTF-8 text: 'utf-8' .*; save it as UTF-8, such as"
    ):
        read_table(tmp_path / "x.csv", ["path", "label"], None)


def test_line_breaks_in_columns_that_are_not_used_are_warned_of(tmp_path, capsys):
    path = tmp_path / "x.csv"
    path.write_text('path,label,note\na,1,x\n\nb,2,"24 inch\nc,3,y\nd,4,12 inch"\ne,5,"say ""hi"""\nf,6,"1\n2"\n')
    columns, lines = read_table(path, ["path", "label"], None)
    assert (columns["path"], lines) == (["a", "b", "e", "f"], [2, 4, 7, 8])
    assert f"warning: {path}:4: 2 of 4 rows, this one first, have line breaks in quotes" in capsys.readouterr().out
    path.write_text('path,label\na,"1"\n')
    read_table(path, ["path", "label"], None)
    assert "warning" not in capsys.readouterr().out


def test_labels_are_classes_attributes_or_targets():
    labels, attributes = parse(kind="dog cat dog")
    assert (labels.tolist(), attributes) == ([1, 0, 1], {"class_names": ["cat", "dog"]})
    labels, attributes = parse(kind="2 0")
    assert (labels.tolist(), attributes) == ([2, 0], {"class_names": ["0", "1", "2"]})
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
        ({"a": "0 1", "b": "1 2"}, r"x.csv:3: b is 2; several columns of labels are attributes: 0 or 1"),
        ({"a": "0 1", "b": "0 -1"}, r"x.csv:2: b is 0; several columns of labels are attributes: -1 or 1"),
        ({"a": "0 1", "b": "yes no"}, r"x.csv:2: b is 'yes'; several columns of labels should be numbers"),
        ({"a": "0.5 n/a 0.25"}, r"x.csv:3: a is 'n/a', but 0.5 in line 2; give numbers only, or names only"),
        ({"a": "cat 3"}, r"x.csv:2: a is 'cat', but 3 in line 3"),
        ({"a": "cat nan dog"}, r"x.csv:3: a is nan, a missing value; drop the row, or name the class"),
        ({"a": f"1 {10**30}"}, r"x.csv:3: a is 10{30}; allowed are numbers up to 1e\+18, or names"),
        ({"a": "9" * 10_000, "b": "1"}, r"x.csv:2: a is 9{40}; allowed are"),
        ({"a": "1 --1"}, r"x.csv:3: a is '--1', but 1 in line 2"),
        ({"a": "1 2", "n_classes": 10**9}, r"x.csv has 1,000,000,000 classes; allowed are 1,048,576"),
        ({"a": "1.5 1e999"}, r"x.csv:3: a is 1e999; allowed are numbers up to 3e\+38"),
        ({"a": "nan 0.5"}, r"x.csv:2: a is 'nan', but 0.5"),
        ({"a": "1 20260101"}, r"x.csv:3: label 20260101 makes 20,260,102 classes of 2 rows"),
        ({"a": "0.5 0.7", "n_classes": 3}, r"--classes is 3, but the labels of x.csv are decimals"),
    ],
)
def test_labels_that_could_mean_two_things_are_refused_with_their_line(columns, message):
    with pytest.raises(UserError, match=message):
        parse(**columns)
