"""Your rows -> HDF5 files that are read fastest, and a look at those you have.

python convert.py repack photos.h5 train.h5              blocks of 2 MiB, rows in random order, a checksum a block
python convert.py repack old-*.h5 train.h5 --shards 8    many files -> train-00000-of-00008.h5, ...
python convert.py repack --dataset mine:Photos /data/photos train.h5      a torch Dataset of your own, decoded once
python convert.py info train.h5                          how the rows lie, and what would make them faster
python convert.py verify train.h5                        every block that is damaged
"""

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from fastgpu import auto, survey
from fastgpu.dataset import DatasetRows, LoaderOptions, open_dataset
from fastgpu.feed import make_feed
from fastgpu.launch import Launch, UserError, clear_exit
from fastgpu.layout import BLOCK_BYTES
from fastgpu.order import BlockSampler
from fastgpu.store import Store, open_store
from fastgpu.writer import Writer

POOL_BYTES, POOL_BLOCKS = 1 << 30, 512  # mixed at once: the larger of both, if a quarter of the free memory has room


def repack(asked: argparse.Namespace) -> int:
    """Rows -> files in the form that training reads fastest: the training path with a file at its end."""
    rows = _open(asked)
    batch_rows = max(1, BLOCK_BYTES // rows.row_bytes)
    pool_batches = -(-_pool_rows(rows) // batch_rows)
    order = BlockSampler(
        rows.block_rows, batch_rows, pool_batches=pool_batches, seed=asked.seed, shuffle=not asked.keep_order,
        drop_last=False)  # fmt: skip
    row_order = "as in the source" if asked.keep_order else f"random, seed {asked.seed}"
    if not asked.keep_order and order.pools_an_epoch > 1 and rows.block_rows.max() > 1:
        row_order += f": blocks over the whole source, rows within pools of {pool_batches * batch_rows:,}"
    attributes = {"source": rows.name} | rows.attributes | {"row_order": row_order}
    with ExitStack() as closing:
        writer = closing.enter_context(
            Writer(asked.target, len(rows), rows.fields, attributes, shards=asked.shards,
                   compression=asked.compression, threads=asked.threads, replace=asked.force))  # fmt: skip
        feed = make_feed(rows, order, "disk", torch.device("cpu"), asked.threads, prefetch_pools=1)
        closing.callback(feed.close)
        bar = closing.enter_context(_bar(len(rows), "rows"))
        for pool in feed.pools(0):
            for part in pool.rows.batches(batch_rows):
                writer.append(part.numpy())
                bar.update(len(part))
                if _stopped:
                    sys.exit(_stopped[0])
    print(f"{len(rows):,} rows, order {row_order}, in {', '.join(map(str, writer.targets[:2]))}"
          f"{f' and {len(writer.targets) - 2} more' if len(writer.targets) > 2 else ''}")  # fmt: skip
    return 0


def _open(asked: argparse.Namespace) -> Store | DatasetRows:
    if wrong := [pair for pair in asked.fields if "=" not in pair]:
        raise UserError(f"--fields is {wrong[0]}; it should be NAME=DATASET, such as images=x")
    fields = dict(pair.split("=", 1) for pair in asked.fields)
    if asked.dataset:
        fields = fields or {"images": "images", "labels": "labels"}
        return open_dataset("SOURCE", asked.source[0], fields, factory=asked.dataset, options=LoaderOptions())
    group = asked.source[0].partition("::")[2].strip("/")
    columns = [column for column in survey.columns_of(asked.source[0]) if column.group.strip("/") == group]
    if not columns and not fields:
        groups = ", ".join(sorted({column.group for column in survey.columns_of(asked.source[0])})) or "no numbers"
        raise UserError(f"{asked.source[0]} has no rows in /{group}, but {groups}; name one: file.h5::/group")
    fields = fields or {column.name: column.name for column in columns}
    is_checked = all(column.has_digests for column in columns)
    return open_store("SOURCE", asked.source, fields, verify=is_checked, trust_links=asked.trust_links)


def _pool_rows(rows: Store | DatasetRows) -> int:
    largest = int(rows.block_rows.max())
    wanted = max(POOL_BYTES, POOL_BLOCKS * largest * rows.row_bytes) if largest > 1 else 64 << 20
    return max(1, min(len(rows), min(wanted, auto.free_host_bytes() // 4) // rows.row_bytes))


def info(asked: argparse.Namespace) -> int:
    """How the rows of files lie, and what would make them faster."""
    for path in asked.file:
        columns = survey.columns_of(path)
        print(path, *(f"  {column}" for column in columns), sep="\n")
        for line in (*survey.advise(columns), *_advise_on_rows(path.partition("::")[0], columns)):
            print(f"  advice: {line}")
    return 0


def _advise_on_rows(file: str, columns: list[survey.Column]) -> Iterator[str]:
    """What opening each group as rows finds: why it cannot be trained on, or that it is sorted by class."""
    for group in sorted({column.group for column in columns}):
        fields = {each.name: each.name for each in columns if each.group == group}
        try:
            rows = open_store("FILE", f"{file}::{group}", fields)
            warning = auto.warn_of_class_order(rows, auto.POOL_BYTES // rows.row_bytes)
        except UserError as error:
            warning = str(error).removeprefix("FILE: ")
        if warning:
            yield warning.strip().removeprefix("warning: ")


def verify(asked: argparse.Namespace) -> int:
    """Every damaged block of files; 1 if there is one."""
    bad = 0
    for path in asked.file:
        columns = survey.columns_of(path)
        with _bar(sum(column.nbytes for column in columns), "B") as bar:
            found = survey.damaged(path, asked.threads, bar.update)
        bad += len(found)
        print(*found, f"{path}: {f'{len(found)} blocks are damaged' if found else 'whole'}", sep="\n")
        for column in columns:
            if not column.has_digests:
                print(f"  {column.path} was read, but has no checksums; `python convert.py repack` writes them")
    return int(bad > 0)


def _bar(total: int, unit: str) -> Any:
    return tqdm(total=total, unit=unit, unit_scale=True, dynamic_ncols=True, disable=not sys.stderr.isatty())


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="repack | info | verify")
    command = commands.add_parser("repack", help=repack.__doc__)
    command.set_defaults(run=repack)
    command.add_argument("source", nargs="+", help="file.h5, file.h5::/group or a quoted glob; the path for --dataset")
    command.add_argument("target", type=Path, help="file to write, under a temporary name until it is whole")
    command.add_argument("--dataset", help="package.module:Class, a map-style torch Dataset made of SOURCE")
    command.add_argument("--fields", nargs="+", default=[], metavar="NAME=DATASET", help="default: all datasets")
    command.add_argument("--seed", type=int, default=0, help="of the random order")
    command.add_argument("--keep-order", action="store_true", help="write the rows as they come")
    command.add_argument("--compression", choices=["none", "gzip", "lz4", "zstd"], default="none")
    command.add_argument("--shards", type=int, default=1, help="files to write")
    command.add_argument("--force", action="store_true", help="replace what is there")
    command.add_argument("--trust-links", action="store_true", help="follow links into other files")
    for name, run in (("info", info), ("verify", verify)):
        command = commands.add_parser(name, help=run.__doc__)
        command.set_defaults(run=run)
        command.add_argument("file", nargs="+", help="file.h5 or file.h5::/group")
    parser.add_argument("--threads", type=int, default=auto.cpus(), help="that read, hash and compress; default: CPUs")
    return parser.parse_args(argv)


_stopped: list[int] = []


def _stop(number: int, _: object) -> None:
    """End, and leave no partial file. Python drops what a destructor raises: `repack` looks at the list, too."""
    _stopped.append(128 + number)
    sys.exit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    with clear_exit(Launch()):
        asked = _parse(sys.argv[1:])
        try:
            sys.exit(asked.run(asked))
        except OSError as error:
            raise UserError(f"{error}; nothing was written: is the disk full or gone?") from None
