"""Checks of images and labels before the first step: the types of the fields, and the values of labels."""

import numpy as np

from fastgpu.process.launch import UserError
from fastgpu.rows.classes import MAX_UNUSED_CLASSES, classes_of
from fastgpu.rows.contract import Dataset

__all__ = ["check_images", "check_labels", "count_classes"]

DTYPES = ("uint8", "float16", "float32")
"""Types of images that networks train on without conversion."""
CHANNELS = (1, 3, 4)
"""Usual numbers of channels."""


def check_images(train: Dataset, val: Dataset) -> None:
    """Raise UserError unless both sources have labels and images, alike and of a known layout."""
    for source in (train, val):
        if not {"images", "labels"} <= source.fields.keys():
            has = ", ".join(source.fields)
            raise UserError(f"{source.name}: data.fields has {has}; this workload needs images and labels")
        images = source.fields["images"]
        # Pillow, OpenCV and Keras store the channels in the last axis.
        axes = images.shape
        looks_like_nhwc = len(axes) == 3 and axes[-1] in CHANNELS and axes[0] not in CHANNELS
        is_nhwc = looks_like_nhwc and source.attributes.get("layout") != "nchw"
        if images.dtype not in DTYPES or len(axes) not in (2, 3) or is_nhwc:
            raise UserError(
                f"{source.name}: images are {images}; allowed are {', '.join(DTYPES)} of (N, C, H, W) or "
                "(N, H, W); write other types with images.astype('float32'), and (N, H, W, C) with "
                "convert.py arrays ... --layout nhwc; if channels do come first, set the attribute "
                "layout=nchw"
            )
    for name in ("images", "labels"):
        ours, theirs = train.fields[name], val.fields[name]
        if ours.shape != theirs.shape or (ours.dtype.kind == "f") != (theirs.dtype.kind == "f"):
            raise UserError(f"{val.name}: {name} are {theirs}, and in {train.name} they are {ours}")


def check_labels(source: Dataset, highest: int, limit: str) -> None:
    """Raise UserError if labels are below 0 or above `highest`. limit: the origin of `highest`, in words.

    Labels that are not in memory are not checked.
    """
    labels = source.stored_column("labels")
    if labels is not None and (labels.min() < 0 or labels.max() > highest):
        row = np.argwhere((labels < 0) | (labels > highest))[0, 0]
        raise UserError(
            f"{source.name}: labels are {labels.min()} to {labels.max()}, the first wrong one in row {row:,}; allowed "
            f"are 0 to {highest} ({limit}): leave such rows out, or number the values from 0 on"
        )


def count_classes(source: Dataset) -> int:
    """The number of classes, from `class_names` or `n_classes`, otherwise the highest label + 1. Raises UserError."""
    known = classes_of(source)
    if n_classes := len(known.get("class_names", [])) or known.get("n_classes"):
        return int(n_classes)
    labels = source.stored_column("labels")
    if labels is None:
        raise UserError(f"{source.name}: the number of classes is unknown; give it the attribute n_classes")
    highest = int(labels.max())
    # The network has an output for each class number, so labels that are ids, such as dates, would fill the memory.
    if highest > len(labels) + MAX_UNUSED_CLASSES:
        raise UserError(
            f"{source.name}: labels are {labels.min()} to {highest} in {len(labels):,} rows: number those that occur, "
            "np.unique(labels, return_inverse=True)[1] over all files at once, or set the attribute n_classes"
        )
    return highest + 1
