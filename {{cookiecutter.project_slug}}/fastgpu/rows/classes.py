"""The names and the number of classes, read from a Dataset or from the attributes of a file."""

from collections.abc import Mapping
from operator import index
from reprlib import repr as shorten
from types import SimpleNamespace
from typing import Any

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset

__all__ = ["classes_of"]

MAX_CLASSES = 10_000_000
MAX_UNUSED_CLASSES = 1000
"""Maximum number of class numbers without a row. If there are more, labels are likely ids, such as dates."""


def read_classes(name: str, source: object) -> dict[str, Any]:
    """The attributes `class_names` (or torchvision's `classes`) and `n_classes` of an object, if it has them.

    Names are text or numbers in the order of the classes, in a list, an array, a tensor or a pandas Index; or a mapping
    from names to class numbers, or from class numbers to names. A tuple of synonyms, as in torchvision's ImageNet, is
    one name. name: of the source, for messages. Raises UserError for values that cannot be names.
    """
    known: dict[str, Any] = {}
    try:
        for attribute in ("class_names", "classes", "n_classes"):
            if hasattr(type(source), attribute) or hasattr(source, attribute):
                known[attribute] = getattr(source, attribute)
        names, count = known.get("class_names", known.get("classes")), known.get("n_classes")
        if count is not None and not 1 <= index(count) <= MAX_CLASSES:
            raise ValueError(f"n_classes should be 1 to {MAX_CLASSES:,}")
        read = {"class_names": names is not None and _to_names(names), "n_classes": count is not None and index(count)}
    except Exception as error:  # a property may raise anything
        why = f"{shorten(known)} ({type(error).__name__}: {error})"
        allowed = "a list of names in the order of their numbers, a whole number as n_classes, and None"
        raise UserError(f"{name} says of its classes {why}; allowed are {allowed}") from None
    return {key: value for key, value in read.items() if value}


def classes_of(source: Dataset) -> dict[str, Any]:
    """`read_classes` of the attributes of a Dataset. Raises UserError if they cannot be names or a number."""
    known = {name: source.attributes.get(name) for name in ("class_names", "n_classes")}
    return read_classes(source.name, SimpleNamespace(**known))


def _to_names(values: Any) -> list[str]:
    """The name of each class. Raises an exception of any kind if the values are no names."""
    if isinstance(values, Mapping):
        names = values if {*values} == {*range(len(values))} else {number: name for name, number in values.items()}
        values = [names[number] for number in range(len(values))]
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes | set | frozenset):
        raise TypeError("it has no order of names")
    return [_to_name(value) for value in values]


def _to_name(value: Any) -> str:
    if value is None or callable(value) or value != value:
        raise TypeError(f"{value} is no name")
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return ", ".join(map(_to_name, value)) if isinstance(value, list | tuple) else f"{value}"
