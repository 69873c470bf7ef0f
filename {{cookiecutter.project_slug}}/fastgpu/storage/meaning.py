"""Checks that sources which are used together agree on the meaning of their numbers, such as the class names."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Protocol

from fastgpu.process.launch import UserError, warn

NUMBERED = {"item_ids": "items", "class_names": "labels", "target_names": "columns of labels"}
"""{attribute of a converted file that says what numbers stand for: the numbers}"""


class Described(Protocol):
    """Rows, a part of them, or a checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, Any]: ...


def check_meaning(key: str, first: Described, other: Described, *, labels: bool = True) -> None:
    """Compare what numbers stand for in two sources, and how their images were prepared. key: names the sources.

    labels: compare classes and targets, too. Raises UserError if a number means different things in them. Prints a
    warning if the images were prepared in other ways.
    """
    for attribute, numbers in NUMBERED.items() if labels else [("item_ids", "items")]:
        names, others = (list(map(str, source.attributes.get(attribute, ()))) for source in (first, other))
        if not names or not others:  # who does not name them may mean the same
            continue
        n_compared = max(len(names), len(others))
        if attribute == "class_names":  # one of them may be of fewer classes
            n_compared = min(len(names), len(others))
        for number, (name, found) in enumerate([*zip_longest(names, others, fillvalue="missing")][:n_compared]):
            if name != found:
                raise UserError(
                    f"{key}: number {number} of the {numbers} is {found} in {other.name} and {name} in {first.name} "
                    f"(attribute {attribute}); convert them together"
                )
    prepared, otherwise = (source.attributes.get("preprocessing") for source in (first, other))
    if prepared and otherwise and prepared != otherwise:
        warn(
            f"{key}: the images of {other.name} were prepared with {otherwise}, those of {first.name} with {prepared}: "
            "they may show other parts"
        )
