"""What rows hold, as a person reads it: how many, their fields, their classes."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from fastgpu.rows.contract import Source

MAX_CLASSES = 20
"""Classes that are listed."""
MAX_VALUES = 1000
"""Different labels that are taken for classes if there are no class names."""


def describe_rows(parts: Mapping[str, Source], order: str = "") -> Iterator[str]:
    """Lines of text about the rows of each split, {name: rows}. The name is empty if there is one split.

    order: what is known about the order of the rows.
    """
    first = next(iter(parts.values()))
    attributes = first.attributes
    labels = {name: _labels_of(source) for name, source in parts.items()}
    label_lines = list(_describe_labels(labels, first)) if all(len(values) for values in labels.values()) else []
    yield "  rows     " + ", ".join(f"{len(source):,} {name}".strip() for name, source in parts.items())
    for name, field in first.fields.items():
        text = f"  {name:<8} {field}"
        if name == "labels" and label_lines:
            text += f": {label_lines.pop(0)}"
        yield text
    if preprocessing := attributes.get("preprocessing"):
        values = json.loads(preprocessing)
        yield f"  decoded  to {_format_size(values['size'])} pixels, --resize {values['resize']}"
    yield from describe_statistics(attributes)
    if order := order or attributes.get("row_order", ""):
        yield f"  order    {order}"
    yield from label_lines


def describe_statistics(attributes: Mapping[str, Any]) -> Iterator[str]:
    """Lines of text: mean and standard deviation of each channel, and the classes of masks, if they are known."""
    if "mean" in attributes and "std" in attributes:
        mean, std = (np.array2string(np.ravel(attributes[key]), precision=1, threshold=8) for key in ("mean", "std"))
        yield f"  mean     {mean}, std {std} of the channels"
    if "n_classes" in attributes:
        yield f"  classes  {attributes['n_classes']} in masks, besides 255 (ignored)"


def _format_size(size: list[int]) -> str:
    return "x".join(str(length) for length in size)


def _labels_of(source: Source) -> np.ndarray:
    """The labels, or an empty array if there are none in memory."""
    labels = source.in_memory("labels")
    return np.empty(0) if labels is None or len(labels.shape) > 2 else np.asarray(labels[:])


def _describe_labels(labels: Mapping[str, np.ndarray], source: Source) -> Iterator[str]:
    """First the kind of the labels, then a table: how many rows of each split have each of them."""
    values = np.concatenate(list(labels.values()))
    names = [str(name) for name in source.attributes.get("class_names", [])]
    if values.dtype.kind == "f":
        finite = values[np.isfinite(values)]
        n_others = values.size - finite.size
        others = f", and {n_others:,} that are NaN or infinite" if n_others else ""
        yield f"targets, from {finite.min(initial=np.inf):g} to {finite.max(initial=-np.inf):g}{others}"
        return
    if values.ndim > 1:
        yield f"{values.shape[1]} attributes"
        counts = [part.reshape(len(part), -1).astype(bool).sum(0) for part in labels.values()]
        heads = names or [str(number) for number in range(values.shape[1])]
        title = "attribute"
    else:
        present = np.unique(values)
        if not names and len(present) > MAX_VALUES:
            yield f"{len(present):,} different values, from {present[0]} to {present[-1]}"
            return
        numbers = np.union1d(np.arange(len(names)), present)
        n_classes = len(numbers) if present[0] < 0 else max(len(numbers), int(present[-1]) + 1)
        n_empty = n_classes - len(present)
        kind = f"{n_classes:,} classes" if names or not n_empty else f"used as classes 0 to {n_classes - 1}"
        yield f"{kind}, {n_empty:,} of them without rows" if n_empty else kind
        counts = [np.bincount(np.searchsorted(numbers, part), minlength=len(numbers)) for part in labels.values()]
        order = np.argsort(~np.isin(numbers, present), kind="stable")  # classes with rows come first
        numbers = numbers[order]
        counts = [count[order] for count in counts]
        heads = [names[number] if 0 <= number < len(names) else str(number) for number in numbers.astype(int)]
        title = "class"
    width = max(len(head) for head in (title, *heads[:MAX_CLASSES]))
    yield "  " + " ".join([f"{title:<{width}}", *(f"{name or 'rows':>9}" for name in labels)])
    for number, head in enumerate(heads[:MAX_CLASSES]):
        yield "  " + " ".join([f"{head:<{width}}", *(f"{count[number]:>9,}" for count in counts)])
    if len(heads) > MAX_CLASSES:
        yield f"  and {len(heads) - MAX_CLASSES:,} more"
