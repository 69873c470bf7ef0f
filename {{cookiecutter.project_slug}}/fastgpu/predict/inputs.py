"""HDF5 files, arrays or image files as rows, and the pools that the model takes them from."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fastgpu.feed.sizes import choose_readers
from fastgpu.feed.sources import decode_images
from fastgpu.feed.tiers import Placement, make_feed
from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Dataset, Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Field
from fastgpu.run.model_files import DESCRIPTION
from fastgpu.storage.arrays import ArrayDataset, load_numpy
from fastgpu.storage.file import not_found
from fastgpu.storage.hdf5 import list_contents, open_file, open_group
from fastgpu.storage.store import expand, open_store

OnError = Literal["stop", "skip"]
"""What is done with a broken image: stop, or write the reason in place of the prediction."""
POOL_BYTES = 64 << 20
"""Size of a pool. Three of them are in memory."""
HDF5_SUFFIXES = (".h5", ".hdf5")
ARRAY_SUFFIXES = (".npy", ".npz")
MODEL_FILES = ("run.json", DESCRIPTION)
"""A folder with one of them is a run or a checkpoint, not rows: a glob may have named several of these."""


class Inputs(NamedTuple):
    """Rows to predict."""

    source: Dataset
    files: Sequence[str] = ()
    """The image file of each row; empty if the rows have numbers only."""
    failed: dict[int, str] | None = None
    """{row: why it cannot be read}, filled while rows are read. None: a broken row ends the program."""
    remarks: Callable[[Sequence[int]], Sequence[str]] = lambda rows: ()
    """Lines about the rows that were read, such as what decoding has changed."""


def open_inputs(
    paths: Sequence[str], card: Mapping[str, Any], fields: Mapping[str, Field], on_error: OnError, *, id_field: str = ""
) -> Inputs:
    """The rows to predict. They have all `fields`, of the shape and type that the model was trained on.

    paths: HDF5 files (`file.h5::/group` and globs, too), one .npy or .npz file, or image files, folders and globs.
    card: the content of model.json. id_field: one more field, which says what a row is, such as the number of a user.
    Raises UserError if the inputs do not fit.
    """
    for path in paths:
        if any((Path(path) / name).exists() for name in MODEL_FILES):
            raise UserError(f"INPUT is {path}, a run or a checkpoint; name one CHECKPOINT, then the rows to predict")
    kinds = {_kind(path) for path in paths}
    if len(kinds) > 1:
        raise UserError(f"INPUT has {' and '.join(sorted(kinds))}; give one kind at a time")
    if kinds == {"image files"}:  # a project that has no image workload lacks the module that decodes them
        name = "fastgpu.predict.image_inputs"
        if not find_spec(name) or [len(field.shape) in (2, 3) for field in fields.values()] != [True]:
            taken = ", ".join(f"{name}, {field}" for name, field in fields.items())
            raise UserError(f"{paths[0]} is not an HDF5 or NumPy file; the model takes {taken}")
        if id_field:
            raise UserError(f"--id is {id_field}, but INPUT are image files, which have no fields; leave it out")
        images = import_module(name).open_images(paths, card["attributes"].get("preprocessing"), fields, on_error)
        return Inputs(
            images,
            list(map(str, images.files.paths)),
            images.failed if on_error == "skip" else None,
            images.files.count_changes,
        )
    source: Dataset
    ids = {id_field: id_field} if id_field and id_field not in fields else {}
    if kinds == {"HDF5 files"}:
        datasets = {name: card["fields"][name]["dataset"] for name in fields} | ids
        source = open_store("INPUT", paths, _find_datasets(paths[0], datasets))
    else:
        source = _open_arrays(paths, [*fields, *ids])
    for name, field in fields.items():
        if source.fields[name].codec and len(field.shape) == 3:
            preprocessing = json.loads(card["attributes"].get("preprocessing", "{}"))
            source = decode_images(source, field.shape[1:], centre_share=preprocessing.get("centre_share"))
        if not _fits(source.fields[name], field):
            cure = "; give it those columns, in their order: matrix[:, item_ids], an attribute of the training file"
            cure = cure if field.n_items and source.fields[name].n_items else ""
            raise UserError(f"{source.name}: {name} is {source.fields[name]}; the model was trained on {field}{cure}")
    if id_field and (source.fields[id_field].is_ragged or source.fields[id_field].shape):
        raise UserError(f"--id is {id_field}, {source.fields[id_field]}; it should be one number for each row")
    return Inputs(source)


def _fits(found: Field, field: Field) -> bool:
    """Whether a field is the one that the model was trained on. Single whole numbers (labels) may have another size."""
    are_numbers = not (found.is_ragged or field.is_ragged or found.shape or field.shape)
    are_whole = {found.dtype.kind, field.dtype.kind} <= {"u", "i"}
    return found.signature == field.signature or (are_numbers and are_whole)


def _kind(path: str) -> str:
    if "::" in path or path.endswith(HDF5_SUFFIXES):
        return "HDF5 files"
    return "arrays" if path.endswith(ARRAY_SUFFIXES) else "image files"


def _find_datasets(path: str, datasets: Mapping[str, str]) -> dict[str, str]:
    """{field: its dataset in a file}: the name that it had in the training file, or else the name of the field."""
    file_path, group = expand("INPUT", path)[0]
    with open_file(file_path, f"INPUT: {file_path}") as file:
        root = open_group(file, group, f"INPUT: {file_path}")
        found = {name: dataset if dataset in root else name for name, dataset in datasets.items()}
        for name, dataset in found.items():
            if dataset not in root:
                raise UserError(
                    f"{path}: {name} is missing; there is {list_contents(root)} (name a group as file.h5::/group)"
                )
    return found


def _open_arrays(paths: Sequence[str], names: Sequence[str]) -> ArrayDataset:
    if len(paths) > 1:
        raise UserError(
            f"INPUT is {len(paths)} array files; give one, or put them in a file by `python convert.py arrays`"
        )
    try:
        content = load_numpy(paths[0])
        if isinstance(content, np.ndarray):
            content = {names[0]: content}
        missing = [name for name in names if name not in content]
        if missing:
            if {"shape", "data"} <= set(content):  # as scipy.sparse.save_npz writes it
                command = f"python convert.py arrays {names[0]}={paths[0]} x.h5"
                raise UserError(f"{paths[0]} is a sparse matrix; convert it once: {command}")
            raise UserError(f"{paths[0]}: {missing[0]} is missing; it has {', '.join(content)}")
        columns = {name: content[name] for name in names}
    except UserError:
        raise
    except FileNotFoundError:
        raise not_found(paths[0]) from None
    except Exception as error:  # a damaged file can raise anything
        raise UserError(f"{paths[0]} is not a file of NumPy arrays of numbers: {error}") from None
    lengths = {name: len(column) if column.ndim else 0 for name, column in columns.items()}
    if len(set(lengths.values())) > 1 or not all(lengths.values()):
        raise UserError(f"{paths[0]} has {lengths} rows; each field should have as many, and at least one")
    return ArrayDataset(paths[0], columns)


def make_order(source: Dataset, batch_size: int) -> BlockSampler:
    """All rows, in their order."""
    return BlockSampler(
        source.block_rows,
        batch_size,
        pool_batches=max(1, POOL_BYTES // (source.row_bytes * batch_size)),
        seed=None,
        drop_last=False,
    )


@contextmanager
def open_pools(source: Dataset, order: BlockSampler, device: torch.device) -> Iterator[Iterator[Pool]]:
    """All rows once, read ahead by threads, as pools on the device."""
    order.n_epochs = 1
    with closing(make_feed(source, order, Placement("disk", device, choose_readers("auto", 1)))) as feed:
        yield feed.pools(0)
