"""Checks that sources which are used together agree on the meaning of their numbers, such as the class names."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Protocol

from fastgpu.process.launch import UserError, warn

NUMBERED = {"item_ids": "items", "class_names": "labels", "target_names": "columns of labels"}
"""{attribute of a converted file that says what numbers stand for: the numbers}"""


class Described(Protocol):
    """Rows, or a checkpoint of them."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, Any]: ...


def check_meaning(key: str, first: Described, other: Described, *, labels: bool = True) -> None:
    """Compare what numbers stand for in two sources, and how their images were prepared. key: names the sources.

    Raises UserError if a number means different things in them. Prints a warning if only one of them says what its
    numbers mean, or if the images were prepared in other ways. labels: compare classes and targets, too.
    """
    for attribute, numbers in NUMBERED.items() if labels else [("item_ids", "items")]:
        names, others = (list(map(str, source.attributes.get(attribute, ()))) for source in (first, other))
        if names and others:
            n_compared = min(len(names), len(others)) if attribute == "class_names" else None  # may be of fewer classes
            for number, (name, found) in enumerate([*zip_longest(names, others, fillvalue="missing")][:n_compared]):
                if name != found:
                    raise UserError(
                        f"{key}: number {number} of the {numbers} is {found} in {other.name} and {name} in "
                        f"{first.name} (attribute {attribute}); convert them together"
                    )
        elif (names or others) != [*map(str, range(len(names or others)))]:
            known, unknown = (first, other) if names else (other, first)
            warn(
                f"{key}: {unknown.name} has no {attribute}; its {numbers} 0, 1, 2... are taken for "
                f"{', '.join((names or others)[:20])} as in {known.name}, in this order"
            )
    prepared, otherwise = (source.attributes.get("preprocessing") for source in (first, other))
    if prepared and otherwise and prepared != otherwise:
        warn(
            f"{key}: the images of {other.name} were prepared with {otherwise}, those of {first.name} with {prepared}: "
            "they may show other parts"
        )
