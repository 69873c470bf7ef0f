"""Where rows come from: HDF5 files, or a Dataset of the user's own."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fastgpu.storage.dataset import LoaderOptions, open_dataset
from fastgpu.storage.store import open_store


def opener(
    dataset: str, verify: bool, trust_links: bool, chunk_cache: Mapping[str, float], loader: Mapping[str, Any]
) -> Callable[[str, str | list[str], Mapping[str, str]], Any]:
    """(config key, path, fields) -> rows: by `open_store`, or by `open_dataset` where `dataset` names a class.

    loader: the fields of LoaderOptions, and maybe others.
    """
    if dataset == "none":
        return partial(open_store, verify=verify, trust_links=trust_links, chunk_cache=chunk_cache)
    options = LoaderOptions(*(loader[name] for name in LoaderOptions._fields))
    return partial(open_dataset, factory=dataset, options=options)
