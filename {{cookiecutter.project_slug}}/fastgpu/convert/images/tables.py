"""CSV files: which character separates the columns, and what the labels are: classes, attributes or targets."""

import csv
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fastgpu.convert.reading import explain_errors, list_first
from fastgpu.process.launch import UserError, warn

DELIMITERS = (",", ";", "\t")
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
WHOLE_NUMBER = re.compile(r"[+-]?\d+", re.ASCII)
MAX_WHOLE = 1e18
"""Larger whole numbers may not fit into 64 bits."""
MAX_DECIMAL = float(np.finfo(np.float32).max)
MAX_CLASSES = 1 << 20
"""Each class has a name in the file."""
MAX_UNUSED_CLASSES = 1000
"""Class numbers without a row. If there are more, the labels are likely not class numbers."""


def choose_delimiter(header: str, delimiter: str | None) -> str:
    """`delimiter` if it is given, otherwise the one that is most frequent in the header. Prints a guess but a comma."""
    if delimiter in ("\\t", "tab"):
        return "\t"
    if delimiter and len(delimiter) > 1:
        raise UserError(f"--delimiter is {delimiter}; it should be one character, or tab")
    if delimiter:
        return delimiter
    guess = max(DELIMITERS, key=header.count)
    if guess != ",":
        print(f"the columns are separated by {guess!r} (--delimiter)")
    return guess


def check_columns(path: Path, present: Sequence[str], wanted: Sequence[str], cure: str) -> None:
    """Raise UserError if the header does not have all `wanted` columns, each once."""
    for name in wanted:
        if present.count(name) != 1:
            problem = "no column" if name not in present else f"{present.count(name)} columns named"
            raise UserError(f"{path} has {problem} {name}; it has {list_first(present) or 'none'}; {cure}")


def read_table(
    path: Path, wanted: Sequence[str], delimiter: str | None, ignored: Collection[str] = ()
) -> tuple[dict[str, list[str]], list[int]]:
    """({column: words}, the line in which each row begins) of a CSV file with a header.

    The other columns are printed, because one of them may say the split, but not those in `ignored`. Raises UserError
    with the line of a missing value, a wrong number of columns or an open quote. Warns of line breaks.
    """
    columns: dict[str, list[str]] = {name: [] for name in wanted}
    lines = []
    long_rows = []
    last_line = 0
    with explain_errors(path, "a CSV file of UTF-8 text"), path.open(newline="", encoding="utf-8-sig") as file:
        separator = choose_delimiter(file.readline(), delimiter)
        file.seek(0)
        reader = csv.reader(file, delimiter=separator, strict=True)
        try:
            header = [name.strip() for name in next(reader, [])]
            check_columns(path, header, wanted, "name those to read with --columns PATH,LABEL")
            if unused := [name for name in header if name not in wanted and name not in ignored]:
                print(f"columns that are not used: {list_first(unused)}")
            places = {name: header.index(name) for name in wanted}
            last_line = reader.line_num
            for fields in reader:
                line, last_line = last_line + 1, reader.line_num
                if not fields:
                    continue
                check_width(path, line, fields, header)
                for name, place in places.items():
                    columns[name].append(_read_word(path, line, name, fields[place]))
                lines.append(line)
                if last_line > line:
                    long_rows.append(line)
        except csv.Error as error:
            raise UserError(f"{path}:{last_line + 1}: {error}; close the quotes, or double a stray one") from None
    if not lines:
        raise UserError(f"{path} has no rows below its header")
    if long_rows:
        warn(
            f"{path}:{long_rows[0]}: {len(long_rows):,} of {len(lines):,} rows, this one first, have line breaks in "
            "quotes; if this quote is a stray one, the lines up to the next quote are lost: double it"
        )
    return columns, lines


def check_width(path: Path, line: int, fields: Sequence[str], header: Sequence[str]) -> None:
    """Raise UserError if a row has more or fewer columns than the header."""
    if len(fields) != len(header):
        raise UserError(
            f"{path}:{line}: {len(fields):,} columns; its header has {len(header):,}; put quotes around a field that "
            "holds the character between the columns, or choose another with --delimiter"
        )


def _read_word(path: Path, line: int, column: str, text: str) -> str:
    """A value of a column. Raises UserError if it is missing or has several lines."""
    word = text.strip()
    if not word:
        raise UserError(f"{path}:{line}: {column} is missing")
    if len(text.splitlines()) > 1:
        raise UserError(f"{path}:{line}: {column} has a line break in quotes; remove it, or the stray quote")
    return word


def parse_labels(
    path: Path, columns: Mapping[str, Sequence[str]], lines: Sequence[int], n_classes: int | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """(labels, attributes) of one or more columns of text:

        one column of whole numbers or of names     classes, int64 (N,), and `class_names`
        several columns of 0 and 1, or of -1 and 1  attributes, uint8 (N, K), and their names as `class_names`
        decimals in any of the columns              targets, float32 (N,), or (N, K) and `target_names`

    n_classes: number of classes, if some of the numbers do not occur. Raises UserError with the line of a label that
    does not fit.
    """
    kinds = {name: _find_kind(path, name, words, lines) for name, words in columns.items()}
    names = list(columns)
    for name, words in columns.items():
        if kinds[name] == "name" and len(names) > 1:
            cure = "several columns of labels should be numbers: 0 and 1 for attributes, decimals for targets"
            raise UserError(f"{path}:{lines[0]}: {name} is {words[0]!r}; {cure}")
    if "decimal" in kinds.values():
        if n_classes:
            raise UserError(f"--classes is {n_classes}, but the labels of {path} are decimals, which are no classes")
        targets = np.array([[float(word) for word in words] for words in columns.values()], np.float32).T
        if len(names) == 1:
            return np.ascontiguousarray(targets[:, 0]), {}
        return np.ascontiguousarray(targets), {"target_names": names}
    if len(names) > 1:
        attributes = [_parse_attribute(path, name, words, lines) for name, words in columns.items()]
        return np.stack(attributes, axis=1), {"class_names": names}
    (words,) = columns.values()
    if kinds[names[0]] == "name":
        for line, word in zip(lines, words, strict=True):
            if word.lower() == "nan":
                cure = "drop the row, or name the class otherwise"
                raise UserError(f"{path}:{line}: {names[0]} is {word}, a missing value; {cure}")
        classes, numbers = np.unique(words, return_inverse=True)
        if n_classes and len(classes) > n_classes:
            raise UserError(f"--classes is {n_classes}, but {path} names {len(classes)} classes")
        return numbers.astype(np.int64), {"class_names": classes.tolist()}
    labels = [int(word) for word in words]
    return _parse_classes(path, labels, lines, n_classes)


def _find_kind(path: Path, name: str, words: Sequence[str], lines: Sequence[int]) -> str:
    """`whole`, `decimal` or `name`. Raises UserError if numbers and names are mixed."""
    is_number = [NUMBER.fullmatch(word) is not None for word in words]
    for line, word in zip(lines, words, strict=True):
        limit = MAX_WHOLE if WHOLE_NUMBER.fullmatch(word) else MAX_DECIMAL
        if NUMBER.fullmatch(word) and abs(float(word)) > limit:
            raise UserError(f"{path}:{line}: {name} is {word[:40]}; allowed are numbers up to {limit:.1g}, or names")
    if all(is_number):
        return "whole" if all(WHOLE_NUMBER.fullmatch(word) for word in words) else "decimal"
    odd = is_number.index(False)
    if any(is_number):
        number = is_number.index(True)
        problem = f"{name} is {words[odd]!r}, but {words[number]} in line {lines[number]}"
        cure = f"give numbers only, or names only (such as class_{words[number]})"
        raise UserError(f"{path}:{lines[odd]}: {problem}; {cure}")
    return "name"


def _parse_attribute(path: Path, name: str, words: Sequence[str], lines: Sequence[int]) -> np.ndarray:
    values = [int(word) for word in words]
    allowed = (-1, 1) if -1 in values else (0, 1)
    for line, value in zip(lines, values, strict=True):
        if value not in allowed:
            cure = f"attributes: {allowed[0]} or 1 (for targets, write decimals such as 2.0)"
            raise UserError(f"{path}:{line}: {name} is {value}; several columns of labels are {cure}")
    return np.array([value == 1 for value in values], np.uint8)


def _parse_classes(
    path: Path, numbers: Sequence[int], lines: Sequence[int], n_classes: int | None
) -> tuple[np.ndarray, dict[str, Any]]:
    if not n_classes:
        n_classes = max(0, *numbers) + 1
        if n_classes > len(numbers) + MAX_UNUSED_CLASSES:
            line = lines[numbers.index(n_classes - 1)]
            problem = f"label {n_classes - 1} makes {n_classes:,} classes of {len(numbers):,} rows"
            raise UserError(
                f"{path}:{line}: {problem}; for targets, write decimals such as 2.0; otherwise give --classes"
            )
    if n_classes > MAX_CLASSES:
        raise UserError(f"{path} has {n_classes:,} classes; allowed are {MAX_CLASSES:,}: are the labels ids?")
    for line, number in zip(lines, numbers, strict=True):
        if number < 0:
            raise UserError(f"{path}:{line}: label {number} is below 0, with which classes begin")
        if number >= n_classes:
            raise UserError(f"{path}:{line}: label {number} is out of range; allowed are 0 to {n_classes - 1}")
    return np.array(numbers, np.int64), {"class_names": [str(number) for number in range(n_classes)]}
