"""Readers -> files: what was understood is shown, rows are read in their final order, written, and counted."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from fastgpu.convert.messages import list_first
from fastgpu.convert.reader import Part
from fastgpu.convert.splits import SPLITS
from fastgpu.convert.summary import describe_rows, describe_statistics
from fastgpu.convert.writer import Compression, Writer
from fastgpu.process.files import flush
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import free_host_bytes
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.selection import Share
from fastgpu.storage.layout import BLOCK_BYTES

POOL_BYTES = 1 << 30
"""Rows that are shuffled together, ..."""
POOL_BLOCKS = 512
"""... or this many blocks, whichever is more; but never more than a quarter of the free memory."""
SINGLE_ROW_POOL_BYTES = 64 << 20
"""The same for sources with blocks of one row, which any size of pool shuffles completely."""
MAX_SKIPPED_SHARE = 0.01
"""If a larger share is broken, the data is not what it should be, and conversion stops."""


class WriteOptions(NamedTuple):
    """How files are written."""

    seed: int | None = 0
    """Of the random order. None: the order of the source."""
    compression: Compression = "none"
    replace: bool = False
    """Overwrite existing files."""
    skips_broken: bool = False
    """Leave broken rows out and list them. Otherwise nothing is written if there is one."""
    is_dry_run: bool = False
    """Show what was understood, and write nothing."""


def write_files(parts: Mapping[str, Part], target: Path, options: WriteOptions) -> None:
    """Write each part to a file of its own: x.h5 becomes x-train.h5 for the part `train`, and stays x.h5 for "".

    What was understood of the source is printed before. All files get their names together, or none does. Then the
    number of rows of each file is printed, and what was skipped is listed beside it. Raises UserError if a file is in
    the way, the disk is too small, or rows are broken that must not be left out.
    """
    paths = {name: _path_of(target, name) for name in parts}
    for name, part in parts.items():
        if not part.n_rows:
            raise UserError(f"{part.reader.name} has no rows for {paths[name]}")
        if paths[name].exists() and not options.replace:
            raise UserError(f"{paths[name]} exists; choose another name, or --force")
    orders = {name: _choose_order(part, options.seed) for name, part in parts.items()}
    texts = {name: _describe_order(part, orders[name]) for name, part in parts.items()}
    first = next(iter(parts.values()))
    print(first.reader.name, *describe_rows(parts, next(iter(texts.values()))), sep="\n", flush=True)
    if options.is_dry_run:
        print("--dry-run: nothing is written; it would be", ", ".join(map(str, paths.values())))
        return
    n_rows = sum(part.n_rows for part in parts.values())
    broken: dict[int, str] = {}
    writers: dict[str, Writer] = {}
    with complete_or_absent(target) as folder, ExitStack() as stack:
        needed = sum(part.n_rows * _row_bytes(part) for part in parts.values())
        free = shutil.disk_usage(folder).free
        if options.compression == "none" and needed > free:
            sizes = f"needs {needed / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free"
            raise UserError(f"{target} {sizes}; make room, or write it elsewhere")
        for name, part in parts.items():
            path = folder / paths[name].name
            reader = part.reader
            writer = Writer(path, part.n_rows, reader.fields, reader.attributes, compression=options.compression)
            writers[name] = stack.enter_context(writer)
            n_before = len(broken)
            batches = reader.batches(orders[name], broken)
            # disable=None: no bar where there is no terminal
            bar = tqdm(total=part.n_rows, unit="rows", unit_scale=True, desc=path.name, disable=None)
            with closing(batches), bar:
                for rows in batches:
                    writer.append(rows)
                    bar.update(writer.n_rows - bar.n)
                    if options.skips_broken:
                        _check_broken(broken, n_rows, skips=True)
            n_came = writer.n_rows + len(broken) - n_before
            assert n_came == part.n_rows, f"{n_came} of {part.n_rows} rows came"
        _check_broken(broken, n_rows, skips=options.skips_broken)
        for name, part in parts.items():  # some attributes are known only when all rows have been read
            facts = {"source": part.reader.name, **part.reader.attributes, "row_order": texts[name]}
            writers[name].attributes |= facts
    messages: list[str] = []
    for name, part in parts.items():
        writer = writers[name]
        messages.append(f"{writer.n_rows:,} rows, order {texts[name]}, in {paths[name]}")
        messages += describe_statistics(writer.attributes)
        messages += [f"  {field}: NaN or infinity in {n:,} rows" for field, n in writer.n_not_finite.items() if n]
        messages += _list_skipped(part, broken, paths[name])
    print(*messages, sep="\n")
    others = [_path_of(target, split) for split in ("", *SPLITS) if split not in parts]
    if old := ", ".join(str(path) for path in others if path.exists()):
        warn(f"{old} was here before: if it is of the same source, it has rows of the new files; delete it")


@contextmanager
def complete_or_absent(target: Path) -> Iterator[Path]:
    """A folder to write files in. At the end they all get their names beside `target`; after an exception, none does.

    A process that is killed by SIGKILL leaves the folder, which may be removed by hand.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        paths = sorted(folder.iterdir())
        for path in paths:
            flush(path)
        for path in paths:
            path.replace(target.parent / path.name)
        flush(target.parent)
    finally:
        shutil.rmtree(folder)


def _path_of(target: Path, split: str) -> Path:
    return target.with_name(f"{target.stem}-{split}{target.suffix}") if split else target


def _row_bytes(part: Part) -> int:
    return sum(field.row_bytes for field in part.reader.fields.values())


def _choose_order(part: Part, seed: int | None) -> BlockSampler:
    blocks = part.reader.block_rows
    row_bytes = _row_bytes(part)
    pool_bytes = SINGLE_ROW_POOL_BYTES
    if blocks.max() > 1:
        pool_bytes = max(POOL_BYTES, POOL_BLOCKS * int(blocks.max()) * row_bytes)
    pool_bytes = min(pool_bytes, free_host_bytes() // 4)
    pool_rows = max(1, min(part.n_rows, pool_bytes // row_bytes))
    batch_size = max(1, BLOCK_BYTES // row_bytes)
    pool_batches = -(-pool_rows // batch_size)
    selection: np.ndarray | Share = blocks
    if part.rows is not None:
        is_member = np.zeros(len(part.reader), bool)
        is_member[part.rows] = True
        selection = Share(blocks, is_member)
    order = BlockSampler(selection, batch_size, pool_batches=pool_batches, seed=seed, drop_last=False)
    order.n_epochs = 1
    return order


def _describe_order(part: Part, order: BlockSampler) -> str:
    if not order.shuffle:
        return str(part.reader.attributes.get("row_order", "as in the source"))
    text = f"random, seed {order.seed}"
    if order.pools_per_epoch > 1 and part.reader.block_rows.max() > 1:
        pool_rows = order.pool_batches * order.batch_size
        text += f": blocks over the whole source, rows within pools of {pool_rows:,}"
    return text


def _check_broken(broken: dict[int, str], n_rows: int, *, skips: bool) -> None:
    """Raise UserError if there are broken rows; if they are skipped, if more than 1 % are broken."""
    n_allowed = max(1, int(MAX_SKIPPED_SHARE * n_rows))
    if len(broken) <= (n_allowed if skips else 0):
        return
    cure = "more than 1 %" if skips else "so nothing was written"
    if not skips and len(broken) <= n_allowed:
        cure += "; --on-error skip leaves them out"
    reasons = [reason for _, reason in sorted(broken.copy().items())]  # other threads add to it
    raise UserError(f"{len(reasons):,} of {n_rows:,} rows are broken, {cure}:\n  " + list_first(reasons, "\n  "))


def _list_skipped(part: Part, broken: Mapping[int, str], path: Path) -> list[str]:
    """What to say about rows that were changed or left out, which are listed in a file beside `path`."""
    rows = np.arange(part.n_rows) if part.rows is None else part.rows
    is_broken = np.isin(rows, list(broken))
    messages = [f"  {remark}" for remark in part.reader.remarks(rows[~is_broken])]
    if is_broken.any():
        report = path.with_name(f"{path.name}.skipped.txt")
        report.write_text("".join(f"{broken[row]}\n" for row in rows[is_broken].tolist()), encoding="utf-8")
        messages.append(f"broken images that were skipped: {is_broken.sum():,}, listed in {report}")
    return messages
