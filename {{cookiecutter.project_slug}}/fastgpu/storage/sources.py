"""The source that the config names: HDF5 files, or a Dataset of your own. To read another file format, add it here."""

from typing import Literal

from fastgpu.process.config import Data, Hdf5, Loader
from fastgpu.process.world import World
from fastgpu.rows.contract import Source
from fastgpu.storage.dataset import open_dataset
from fastgpu.storage.store import open_store


def open_sources(data: Data, loader: Loader, hdf5: Hdf5, world: World) -> tuple[Source, Source]:
    """The training rows and the validation rows. Raises UserError on every rank if one rank cannot open them."""
    with world.raise_on_every_rank():
        return open_source(data, "train", loader, hdf5), open_source(data, "val", loader, hdf5)


def open_source(data: Data, split: Literal["train", "val"], loader: Loader, hdf5: Hdf5) -> Source:
    """The rows of data.train or data.val. Raises UserError if they cannot be opened."""
    key = f"data.{split}"
    path = data.train if split == "train" else data.val
    fields = data.fields
    if split == "val" and data.val_fields:
        fields = data.val_fields
    if data.dataset != "none":
        return open_dataset(key, path, fields, factory=data.dataset, loader=loader)
    return open_store(
        key, path, fields, verify=data.verify, trust_links=data.trust_links, chunk_cache=hdf5.model_dump()
    )
