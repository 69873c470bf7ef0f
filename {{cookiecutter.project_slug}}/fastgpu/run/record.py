"""What a run is trained with: run.json and config.yaml in its folder, and the lines that are printed when it starts."""

import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml

from fastgpu import TEMPLATE_VERSION
from fastgpu.feed.sizes import Sizes
from fastgpu.process.config import nested
from fastgpu.process.files import write_whole
from fastgpu.process.launch import read_environment, warn
from fastgpu.process.machine import format_bytes
from fastgpu.rows.contract import Dataset
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Mixture
from fastgpu.storage.store import HDF5Dataset

PACKAGES = ("torch", "h5py", "numpy", "pydantic", "tensorboard")


def write_record(folder: Path, config: Mapping[str, Any], best: Sequence[str]) -> None:
    """Write run.json and config.yaml of a start of a run; a resumed run adds run-2.json and config-2.yaml.

    config: {dotted key: value}; the file is a valid --config file. best: see `Workload.best`.
    """
    number = 1 + len([*folder.glob("run*.json")])
    suffix = f"-{number}" if number > 1 else ""
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[name] = version(name)
    description = {
        "command": sys.argv,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "template_version": TEMPLATE_VERSION,
        "versions": versions,
        "environment": read_environment(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "machine": platform.platform(),
        "git_commit": _git("rev-parse", "HEAD"),
        "git_changes": _git("status", "--porcelain", "--untracked-files=no"),
        "best": list(best),
    }
    write_or_warn(folder / f"run{suffix}.json", json.dumps(description, indent=2))
    text = yaml.safe_dump(nested(config), sort_keys=False, allow_unicode=True)
    write_or_warn(folder / f"config{suffix}.yaml", text)


def write_or_warn(path: Path, text: str) -> None:
    """Write a file of the run. If the disk refuses, training goes on."""
    try:
        write_whole(path, text)
    except OSError as error:
        warn(f"cannot write {path} ({error}); training goes on")


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


MAY_DIFFER = ("data.train", "data.val", "data.tier")
"""Keys that nodes may set differently, besides the section `loader`. Files may have other names: their rows
are compared. The others decide how rows are read, not which."""


def identify_job(
    config: Mapping[str, object], splits: tuple[Dataset, Dataset], order: BlockSampler, precision: str
) -> dict[str, object]:
    """{what all ranks must have the same: its value}. config: {dotted key: value}."""
    settings = {key: value for key, value in config.items() if key not in MAY_DIFFER and not key.startswith("loader.")}
    versions = {
        "fastgpu.TEMPLATE_VERSION": TEMPLATE_VERSION,
        "the version of torch": torch.__version__,
        "the version of numpy": np.__version__,
    }
    rows: dict[str, object] = {}
    for key, part in zip(("data.train", "data.val"), splits, strict=True):
        rows |= {f"{key}: {name}": value for name, value in part.identity.items()}
    return {**rows, **versions, **settings, "the order of rows": order.identity, "train.precision": precision}


def describe_feed(source: Dataset, sizes: Sizes, order: BlockSampler) -> str:
    """Where the rows are kept, in which portions they move, and how many of them an epoch has."""
    free = f"{format_bytes(sizes.free['device'])} free on its device and {format_bytes(sizes.free['host'])} in RAM"
    if sizes.free["device"] == sizes.free["host"]:  # the device is the CPU
        free = f"{format_bytes(sizes.free['host'])} of memory free"
    readers = "worker processes" if sizes.uses_workers else "reader threads"
    text = (
        f"rows: {source.name}, {format_bytes(sizes.need)} with the validation rows, kept on the {sizes.tier} tier "
        f"(each rank has {free})\n"
        f"batches: {order.global_batch_size} rows over all ranks, {sizes.batch_size} on each; "
        f"{sizes.pool_batches} batches in a pool; {sizes.canonical_ranks} canonical ranks; "
        f"{readers} on each rank: {sizes.n_readers}"
    )
    if isinstance(source, HDF5Dataset) and source.around_page_cache and sizes.tier == "disk":
        text += "\nfiles: larger than the free memory, so they are read around the page cache (O_DIRECT)"
    if source.decoding:
        text += f"\nimages: {source.decoding}"
    if isinstance(source.selection, Mixture):
        text += f"\neach epoch: {source.selection.describe()}"
    elif order.total_size < len(source):
        text += f"\neach epoch: {order.total_size:,} of {len(source):,} rows; the rest does not fill a batch"
    return text
