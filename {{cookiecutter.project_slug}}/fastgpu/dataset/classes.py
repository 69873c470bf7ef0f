"""What a Dataset of the user says about its classes."""

from collections.abc import Callable, Mapping
from operator import index
from reprlib import repr as shorten
from typing import Any

from fastgpu.process.launch import UserError


def read_classes(name: str, dataset: object) -> dict[str, Any]:
    """The attributes `class_names` (or torchvision's `classes`) and `n_classes` of a Dataset, if it has them.

    Names are text or numbers in the order of the classes, in a list, an array, a tensor or a pandas Index; or a mapping
    from names to the numbers of the classes, or back. A tuple of synonyms, as torchvision's ImageNet has, is one name.
    name: of the Dataset, for messages. Raises UserError for what cannot be names.
    """
    names = _read(name, dataset, "class_names", _to_names) or _read(name, dataset, "classes", _to_names)
    known = {"class_names": next(iter(names.values()), None)} | _read(name, dataset, "n_classes", _to_count)
    return {key: value for key, value in known.items() if value}


def _read(name: str, dataset: object, attribute: str, parse: Callable[[Any], Any]) -> dict[str, Any]:
    """{attribute: its value, parsed, or None}. Empty if the Dataset has no such attribute."""
    value = None
    try:
        value = getattr(dataset, attribute)
        return {attribute: None if value is None else parse(value)}
    except Exception as error:  # a property may raise anything
        if isinstance(error, AttributeError) and not hasattr(type(dataset), attribute):
            return {}
        found = attribute if value is None else f"{attribute} {shorten(value)}"
        found = f"{name} has {found} ({type(error).__name__}: {error})"
        allowed = "a whole number" if attribute == "n_classes" else "a list of names in the order of their numbers"
        raise UserError(f"data.dataset: {found}; allowed are {allowed} and None") from None


def _to_names(values: Any) -> list[str]:
    """The name of each class. Raises an exception of any kind for what is no list of names."""
    if isinstance(values, Mapping):
        names = values if {*values} == {*range(len(values))} else {number: name for name, number in values.items()}
        values = [names[number] for number in range(len(values))]
    values = values.tolist() if hasattr(values, "tolist") else values
    if isinstance(values, str | bytes | set | frozenset):
        raise TypeError("it has no order of names")
    return [_to_name(value) for value in list(values)]


def _to_name(value: Any) -> str:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    if isinstance(value, list | tuple) and value:
        return ", ".join(map(_to_name, value))
    if not isinstance(value, str | int | float) or value != value:
        raise TypeError(f"{value!r} is no name")
    return str(value)


def _to_count(value: Any) -> int:
    count = index(value)
    if count < 1:
        raise ValueError("it should be 1 or more")
    return count
