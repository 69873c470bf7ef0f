"""Checks that the numbers of two datasets have the same meaning, for example that their class names agree."""

from collections.abc import Mapping
from itertools import zip_longest
from typing import Any, Protocol

from fastgpu.process.launch import UserError, warn

NUMBERED = {"item_ids": "items", "class_names": "labels", "target_names": "columns of labels"}
"""{attribute of a converted file that names numbers: the numbers that it names}"""


class Described(Protocol):
    """A Dataset, a part, or a checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, Any]: ...


def check_meaning(key: str, first: Described, other: Described, *, labels: bool = True) -> None:
    """Compare the meaning of the numbers of two sources, and the preparation of their images.

    key: the config key that names the sources. labels: compare classes and targets, too. Raises UserError if a number
    has different meanings. Prints a warning if the images were prepared differently.
    """
    for attribute, numbers in NUMBERED.items() if labels else [("item_ids", "items")]:
        names, others = (list(map(str, source.attributes.get(attribute, ()))) for source in (first, other))
        if not names or not others:  # a source without names may have the same meaning
            continue
        n_compared = max(len(names), len(others))
        if attribute == "class_names":  # one source may have fewer classes
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
            f"{key}: the images of {other.name} were prepared with {otherwise}, and {first.name} with {prepared}: "
            "they may be cropped differently"
        )
