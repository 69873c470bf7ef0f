"""What the numbers in rows mean, and whether sources that are used together agree about it.

Converted files say it in attributes: `class_names`, `target_names`, `item_ids`, `preprocessing`, `row_order`.
"""

import json
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from fastgpu.process.launch import UserError, warn

NUMBERED = {"class_names": "labels", "target_names": "columns of labels", "item_ids": "items"}
"""{attribute that says what numbers stand for: the numbers}"""


class Described(Protocol):
    """A source, or a file of one."""

    name: str
    attributes: dict[str, Any]


def check_meaning(key: str, *sources: Described, labels: bool = True, preparation: bool = True) -> None:
    """Compare classes, names of numbers to predict, items and the preparation of images. key: names the sources.

    Raises UserError if a number means one thing in one source and another thing in another. Prints a warning if images
    were prepared in other ways, or if only some of the sources say what their numbers mean. labels: compare classes and
    numbers to predict. preparation: compare how images were prepared.
    """
    for attribute in NUMBERED if labels else ("item_ids",):
        _check_numbers(key, sources, attribute)
    if preparation:
        _warn_of_other_preparation(key, sources)


def _check_numbers(key: str, sources: Sequence[Described], attribute: str) -> None:
    """Each number stands for the same in all sources that say it."""
    named = [source for source in sources if len(source.attributes.get(attribute, ()))]
    if not named:
        return
    first = named[0]
    names = np.asarray(first.attributes[attribute])
    what = NUMBERED[attribute]
    for other in named[1:]:
        others = np.asarray(other.attributes[attribute])
        n = min(len(names), len(others))
        differ = np.flatnonzero(names[:n] != others[:n])
        if len(differ):
            number = differ[0]
            raise UserError(
                f"{key}: number {number} of the {what} is {others[number]} in {other.name} and {names[number]} in "
                f"{first.name} (attribute {attribute}); convert them together"
            )
        if len(names) != len(others) and attribute != "class_names":  # the classes of one file may be the first ones
            raise UserError(
                f"{key}: {other.name} has {len(others):,} {what} and {first.name} {len(names):,} (attribute "
                f"{attribute}); convert them together"
            )
    unnamed = [source.name for source in sources if source not in named]
    if not unnamed or names.astype(str).tolist() == [str(number) for number in range(len(names))]:
        return
    text = f"{key}: {unnamed[0]} has no {attribute}; its {what} 0, 1, 2... would be {', '.join(map(str, names[:20]))}"
    if attribute == "class_names" and all(str(name).isdecimal() for name in names):  # sorted as text: 0, 1, 10, 11, 2
        raise UserError(f"{text} as in {first.name}: other numbers; convert them together")
    warn(f"{text} as in {first.name}, in this order")


def _warn_of_other_preparation(key: str, sources: Sequence[Described]) -> None:
    known = [(source.name, settings) for source in sources if (settings := _read_preparation(source))]
    for name, settings in known[1:]:
        if settings != known[0][1]:
            warn(
                f"{key}: the images of {name} were prepared with {settings}, those of {known[0][0]} with "
                f"{known[0][1]}: they show other parts or proportions"
            )
            return


def _read_preparation(source: Described) -> dict[str, Any]:
    """Settings of `Preprocessing` without those that change nothing. Empty if the source has none of convert.py."""
    try:
        values = dict(json.loads(source.attributes.get("preprocessing", "{}")))
    except (TypeError, ValueError):
        return {}
    if values.get("centre_share") == 1.0:  # pixels and encoded images both show all
        del values["centre_share"]
    return {name: value for name, value in values.items() if value is not None}
