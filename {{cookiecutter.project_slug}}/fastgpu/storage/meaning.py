"""What the numbers in rows mean, and whether sources that are used together agree about it.

Converted files say it in attributes: `class_names`, `target_names`, `item_ids`, `preprocessing`.
"""

from typing import Any, Protocol

import numpy as np

from fastgpu.process.launch import UserError, warn

NUMBERED = {"class_names": "labels", "target_names": "columns of labels", "item_ids": "items"}
"""{attribute that says what numbers stand for: the numbers}"""
MAX_NAMES = 20
"""Names that a warning lists."""


class Described(Protocol):
    """A source, or a file of one."""

    name: str
    attributes: dict[str, Any]


def check_meaning(key: str, *sources: Described, labels: bool = True, preparation: bool = True) -> None:
    """Compare what numbers stand for, and how images were prepared. key: names the sources.

    Raises UserError if a number means one thing in one source and another thing in another. Prints a warning if only
    some of the sources say what their numbers mean, or if images were prepared in other ways. labels: compare classes
    and numbers to predict. preparation: compare how images were prepared.
    """
    for attribute in NUMBERED if labels else ("item_ids",):
        named = [source for source in sources if len(source.attributes.get(attribute, ()))]
        for other in named[1:]:
            _compare(key, attribute, named[0], other)
        unnamed = [source for source in sources if source not in named]
        if named and unnamed:
            names = [*map(str, named[0].attributes[attribute])]
            if names != [*map(str, range(len(names)))]:
                warn(
                    f"{key}: {unnamed[0].name} has no {attribute}; its {NUMBERED[attribute]} 0, 1, 2... are taken for "
                    f"{', '.join(names[:MAX_NAMES])} as in {named[0].name}, in this order"
                )
    prepared = [source for source in sources if "preprocessing" in source.attributes]
    for other in prepared[1:] if preparation else ():
        first = prepared[0]
        if other.attributes["preprocessing"] != first.attributes["preprocessing"]:
            warn(
                f"{key}: the images of {other.name} were prepared with {other.attributes['preprocessing']}, those of "
                f"{first.name} with {first.attributes['preprocessing']}: they may show other parts"
            )


def _compare(key: str, attribute: str, first: Described, other: Described) -> None:
    """Raise UserError if a number stands for other things in two sources. One may have fewer classes."""
    names = np.asarray(first.attributes[attribute])
    others = np.asarray(other.attributes[attribute])
    n = min(len(names), len(others))
    differ = np.flatnonzero(names[:n] != others[:n]).tolist()
    if not differ and len(names) != len(others) and attribute != "class_names":
        differ = [n]
    for number in differ[:1]:
        has, should = (str(each[number]) if number < len(each) else "missing" for each in (others, names))
        raise UserError(
            f"{key}: number {number} of the {NUMBERED[attribute]} is {has} in {other.name} and {should} in "
            f"{first.name} (attribute {attribute}); convert them together"
        )
