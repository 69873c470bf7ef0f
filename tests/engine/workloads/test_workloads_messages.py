"""What a person is told about rows and settings that a workload cannot take."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

import workloads
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field
from fastgpu.storage.arrays import ArrayDataset
from support.rows import numbered
from workloads import attributes, images, minimal, recsys

IMAGES = numbered(5, (1, 8, 8))
CLASSES = np.arange(5)
BITS = np.arange(10).reshape(5, 2) % 2
GOOD = IMAGES, CLASSES


def rows(name: str, pixels: np.ndarray, labels: np.ndarray, **attributes: Any) -> ArrayDataset:
    return ArrayDataset(name, {"images": pixels, "labels": labels}, attributes)


def refuse(
    train: tuple[np.ndarray, np.ndarray],
    val: tuple[np.ndarray, np.ndarray] | None = None,
    kind: type[images.Workload] = images.Workload,
    **options: Any,
) -> Any:
    """Make a workload of such rows: (pixels, labels)."""
    return lambda: kind(kind.Options(**options), rows("train.h5", *train), rows("val.h5", *(val or train)))


def refuse_users(train: dict[str, int], val: dict[str, int]) -> Callable[[], object]:
    """Make the workload `recsys` of sparse rows: {field: number of items}."""

    def users(name: str, n_items: dict[str, int]) -> Dataset:
        fields = {name: Field(np.dtype("i4"), (), mean_values=1.0, n_items=count) for name, count in n_items.items()}
        return SimpleNamespace(name=name, fields=fields, lengths={name: np.full(5, 3) for name in fields})

    return lambda: recsys.Workload(recsys.Workload.Options(), users("train.h5", train), users("val.h5", val))


def test_messages_of_workloads(compare_messages):
    other = ArrayDataset("other.h5", {"pixels": IMAGES})
    compare_messages(
        {
            "images of another type": refuse((IMAGES.astype("u2"), CLASSES)),
            "images without sides": refuse((numbered(5, (64,)), CLASSES)),
            "channels come last": refuse((numbered(5, (8, 8, 3)), CLASSES)),
            "labels of three axes": refuse((IMAGES, np.zeros((5, 2, 2), int))),
            "labels of one column": refuse((IMAGES, CLASSES[:, None])),
            "one-hot labels": refuse((IMAGES, np.eye(5))),
            "labels that are dates": refuse((IMAGES, 20240101 + CLASSES // 2)),
            "labels below 0": refuse((IMAGES, CLASSES - 1)),
            "validation has other classes": refuse(GOOD, (numbered(10, (1, 8, 8)), np.arange(10))),
            "validation has another shape": refuse(GOOD, (numbered(5, (1, 8, 4)), CLASSES)),
            "validation has labels that are floats": refuse(GOOD, (IMAGES, np.arange(5.0))),
            "labels that are attributes": refuse((IMAGES, BITS)),
            "attributes that are classes": refuse(GOOD, kind=attributes.Workload),
            "validation has attributes of 0 to 2": refuse((IMAGES, BITS), (IMAGES, 2 * BITS), attributes.Workload),
            "fewer names than attributes": lambda: attributes.Workload(
                images.Workload.Options(), *2 * [rows("a.h5", IMAGES, BITS, class_names=["hat"])]
            ),
            "images are not named": lambda: images.Workload(images.Workload.Options(), other, other),
            **{
                f"{name} of {value!r}": partial(images.Normalize, {name: value}, 1, np.dtype("uint8"))
                for name, value in (("std", [1.0, 2.0, 3.0]), ("std", 0), ("mean", "a"), ("mean", float("nan")))
            },
            **{
                f"{name} of {value!r}": lambda name=name, value=value: images.Workload(
                    images.Workload.Options(), *2 * [rows("a.h5", *GOOD, **{name: value})]
                )
                for name, value in (
                    *(("class_names", value) for value in ("cat", [["a", "b", "c"]])),
                    *(("n_classes", value) for value in (2, 1 << 40, 0)),
                )
            },
            "padding is larger than the images": refuse(GOOD, crop_padding=8),
            "all of an image is cut out": refuse(GOOD, cutout_size=8),
            "weights of no network of timm": refuse(GOOD, pretrained=True),
            "numbers are not named": lambda: minimal.Workload(minimal.Workload.Options(), other, other),
            "nothing is held out": refuse_users({"items": 60}, {"items": 60}),
            "validation has other items": refuse_users({"items": 50}, {"items": 60, "held_out": 60}),
            "items that are ids": refuse_users({"items": 1 << 31}, {"items": 1 << 31, "held_out": 1 << 31}),
            "there is no such workload": lambda: workloads.load("tables"),
        }
    )
