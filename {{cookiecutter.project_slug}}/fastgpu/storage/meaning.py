"""What the numbers in rows mean, and whether sources that are used together agree about it.

Converted files say it in attributes: `class_names`, `target_names`, `item_ids`, `preprocessing`, `row_order`.
"""

import json
from typing import Any, Protocol

import numpy as np

from fastgpu.process.launch import UserError, warn


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
    if labels:
        _check_classes(key, *sources)
        _check_targets(key, *sources)
    _check_items(key, *sources)
    if preparation:
        _warn_of_other_preparation(key, *sources)


def _check_targets(key: str, *sources: Described) -> None:
    named = [source for source in sources if source.attributes.get("target_names")]
    for other in named[1:]:
        names, other_names = (list(source.attributes["target_names"]) for source in (named[0], other))
        if names != other_names:
            raise UserError(
                f"{key}: the columns of labels are {', '.join(other_names)} in {other.name} and {', '.join(names)} in "
                f"{named[0].name} (attribute target_names); convert them in one order"
            )


def _check_items(key: str, *sources: Described) -> None:
    known = [source for source in sources if len(source.attributes.get("item_ids", ()))]
    if not known:
        return
    first = known[0]
    ids = np.asarray(first.attributes["item_ids"])
    for other in known[1:]:
        if not np.array_equal(ids, other.attributes["item_ids"]):
            raise UserError(
                f"{key}: {other.name} numbers its items in another way than {first.name} (attribute item_ids); convert "
                "them together"
            )
    unknown = [source for source in sources if source not in known]
    if unknown and not np.array_equal(ids, np.arange(len(ids))):
        warn(
            f"{key}: {unknown[0].name} has no item_ids, so its item numbers are taken for places in those of "
            f"{first.name}"
        )


def _check_classes(key: str, *sources: Described) -> None:
    named = [source for source in sources if source.attributes.get("class_names")]
    unnamed = [source for source in sources if not source.attributes.get("class_names")]
    if not named:
        return
    first = named[0]
    for other in named[1:]:
        names = zip(first.attributes["class_names"], other.attributes["class_names"], strict=False)
        for label, (name, other_name) in enumerate(names):
            if name != other_name:
                raise UserError(
                    f"{key}: label {label} is {other_name} in {other.name} and {name} in {first.name} (attribute "
                    "class_names); convert them together"
                )
    classes = [str(name) for name in first.attributes["class_names"]]
    if not unnamed or classes == [str(label) for label in range(len(classes))]:
        return
    text = f"{key}: {unnamed[0].name} has no class_names; its labels 0, 1, 2... would be {', '.join(classes[:20])}"
    if all(name.isdecimal() for name in classes):  # as of folders, which are sorted as text: 0, 1, 10, 11, 2
        raise UserError(f"{text} as in {first.name}: other numbers; convert them together")
    warn(f"{text} as in {first.name}, in this order")


def _warn_of_other_preparation(key: str, *sources: Described) -> None:
    known = [(source.name, settings) for source in sources if (settings := _read_preparation(source))]
    for name, settings in known[1:]:
        first_name, first_settings = known[0]
        if settings != first_settings:
            warn(
                f"{key}: the images of {name} were prepared with {settings}, those of {first_name} with "
                f"{first_settings}: they show other parts or proportions"
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
