"""Your rows -> HDF5 files that are read fastest, and a look at those you have.

python convert.py images photos/ photos.h5 --size 64 --split 0.9    a folder a class -> photos-train.h5, photos-val.h5
python convert.py images photos.csv photos.h5 --size 64             or lines of path,label
python convert.py cifar10 cifar-10-python.tar.gz cifar10.h5         -> cifar10-train.h5, cifar10-test.h5
python convert.py celeba celeba/ celeba.h5                          -> celeba-train.h5, celeba-val.h5, celeba-test.h5
python convert.py movielens ml-20m.zip ml-20m.h5                    -> ml-20m-train.h5, ml-20m-val.h5, ml-20m-test.h5
python convert.py arrays images=x.npy labels=y.npy train.h5         NumPy arrays, scipy's sparse matrices
python convert.py synthetic made-up.h5 --rows 50000 --shape 3x32x32 images made up, to try things with
python convert.py synthetic made-up.h5 --kind interactions          users and the items they like -> -train.h5, -val.h5
python convert.py repack old-*.h5 train.h5 --shards 8               HDF5 files -> train-00000-of-00008.h5, ...
python convert.py repack --dataset mine:Photos photos/ train.h5     a torch Dataset of your own, decoded once
python convert.py info train.h5                                     how rows lie, and what would make them faster
python convert.py verify train.h5                                   every block that is damaged

What is written: blocks of 2 MiB, rows in random order, a checksum a block; whole, or not at all.
"""

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from fastgpu.convert import cifar_celeba as published
from fastgpu.convert import image_files as pictures
from fastgpu.convert.array_files import open_arrays
from fastgpu.convert.interactions import Split, split
from fastgpu.convert.movielens import COLUMNS, read_ratings
from fastgpu.convert.synthetic_images import SyntheticImages
from fastgpu.convert.synthetic_interactions import interactions
from fastgpu.convert.writer import Writer
from fastgpu.feed import sizes as auto
from fastgpu.feed.tiers import Readable, make_feed
from fastgpu.process import machine
from fastgpu.process.launch import Launch, UserError, exit_with_message
from fastgpu.rows.contract import Pool
from fastgpu.rows.order import BlockSampler
from fastgpu.storage import inspection as survey
from fastgpu.storage.dataset import DatasetSource, LoaderOptions, open_dataset
from fastgpu.storage.layout import BLOCK_BYTES
from fastgpu.storage.store import Store, open_store

POOL_BYTES, POOL_BLOCKS = 1 << 30, 512  # mixed at once: the larger of both, if a quarter of the free memory has room


def images(asked: argparse.Namespace) -> int:
    """Image files, decoded once: a folder with a sub-folder for each class, or a CSV with a path and a label a line."""
    source = Path(asked.source)
    if source.is_dir():
        listing, root = pictures.list_folder(source), source
    else:
        listing, root = pictures.list_csv(source, asked.columns.split(","), asked.classes), source.parent
    root, parts = asked.root or root, {"": listing}
    if asked.split:
        parts = dict(zip(("train", "val"), pictures.split(listing, asked.split, asked.seed), strict=True))
    shape = pictures.Shape(asked.size, asked.resize, asked.crop)
    return _write(
        asked,
        {
            name: pictures.ImageFiles(asked.source, part, lambda file: (root / file).open("rb"), shape, asked.on_error)
            for name, part in parts.items()
        },
    )


def cifar10(asked: argparse.Namespace) -> int:
    """CIFAR-10 as published: the python or the binary archive, or its folder."""
    return _write(asked, published.cifar10(Path(asked.source)))


def celeba(asked: argparse.Namespace) -> int:
    """CelebA as published: the folder of img_align_celeba (or .zip), list_attr_celeba.txt, list_eval_partition.txt."""
    shape = pictures.Shape(asked.size, asked.resize, asked.crop)
    return _write(asked, published.celeba(Path(asked.source), shape, asked.on_error))


def movielens(asked: argparse.Namespace) -> int:
    """MovieLens as published: ratings.csv, or the zip with it; users held out as Liang et al. (2018) do."""
    with _bar(0, "rows", "read") as bar:

        def tick(rows: int, done: float) -> None:
            bar.total = round((bar.n + rows) / max(done, 1e-9))  # as the rest of the file has it
            bar.update(rows)

        events = read_ratings(Path(asked.source), asked.above, asked.columns.split(","), asked.on_error, tick)
    print(f"{len(events.users):,} ratings are above {asked.above:g}")
    return _write_split(asked, split(asked.source, events.users, events.items, asked.held_out), events.skipped)


def arrays(asked: argparse.Namespace) -> int:
    """Arrays of equal length: name=file.npy, file.npz, name=matrix.npz of scipy.sparse, name=file.h5::/dataset."""
    found = open_arrays(asked.source)
    if not asked.held_out:
        return _write(asked, {"": found})
    if list(found.lengths) != list(found.fields)[:1]:
        raise UserError("--held-out is for one sparse matrix of ones: items=matrix.npz")
    rows = found.ragged(*found.lengths)
    users = np.repeat(np.arange(len(rows)), np.diff(rows.offsets))
    return _write_split(asked, split(found.name, users, rows.values, asked.held_out))


def _write_split(asked: argparse.Namespace, found: Split, skipped: Sequence[str] = ()) -> int:
    trained = found.parts["train"].fields["items"].n_items
    print(
        f"{found.events:,} events of {found.users:,} users with 5 or more, {found.items:,} items; {trained:,} of the "
        "training users"
    )
    for name in ("val", "test"):
        hidden = found.parts[name].lengths["held_out"]
        print(f"{name}: {hidden.sum():,} items to be found; {(hidden == 0).sum():,} of {len(hidden):,} users have none")
    return _write(asked, found.parts, skipped)


def synthetic(asked: argparse.Namespace) -> int:
    """Rows made up: to try a configuration or a machine before the data is there.

    images: one picture a class under noise. interactions: items that users like, by a law that can be learnt.
    """
    if asked.kind == "interactions":
        count = asked.rows or 6000
        if asked.items < 20 or asked.mean_items > asked.items / 4 or count < 20:
            raise UserError(
                f"--rows {count} --items {asked.items} --mean-items {asked.mean_items:g}: use 20 or more "
                "rows and items, and a mean of at most a quarter of the items"
            )
        parts = interactions(count, asked.items, asked.mean_items, asked.split or 0.9, asked.seed)
        scores = ", ".join(f"{name} {value:.3f}" for name, value in parts["val"].attributes.items())
        print(f"val: {scores}")
        return _write(asked, parts)
    count = asked.rows or 50_000
    rows = {"": count}
    if asked.split:
        rows = {"train": round(asked.split * count), "val": count - round(asked.split * count)}
    return _write(
        asked,
        {
            name: SyntheticImages(count, asked.shape, asked.classes, asked.seed, part)
            for part, (name, count) in enumerate(rows.items())
        },
    )


def repack(asked: argparse.Namespace) -> int:
    """HDF5 files, or a torch Dataset."""
    return _write(asked, {"": _open(asked)})


def _write(
    asked: argparse.Namespace, parts: Mapping[str, Readable | DatasetSource], skipped: Sequence[str] = ()
) -> int:
    """Rows -> files: the training path with a file at its end. All the files get their names together, or none does.

    skipped: a line for each thing of the source that was left out.
    """
    said, reports = [], dict[Path, str]()
    if skipped:
        report = asked.target.with_name(f"{asked.target.name}.skipped.txt")
        reports[report] = "".join(f"{line}\n" for line in skipped)
        said.append(f"{len(skipped):,} broken lines were skipped: {report}")
    with ExitStack() as stack:
        for name, rows in parts.items():
            batch_size = max(1, BLOCK_BYTES // rows.row_bytes)
            pool_batches = -(-_pool_rows(rows) // batch_size)
            order = BlockSampler(
                rows.block_rows,
                batch_size,
                pool_batches=pool_batches,
                seed=asked.seed,
                shuffle=not asked.keep_order,
                drop_last=False,
            )
            row_order = "as in the source" if asked.keep_order else f"random, seed {asked.seed}"
            if not asked.keep_order and order.pools_per_epoch > 1 and rows.block_rows.max() > 1:
                row_order += f": blocks over the whole source, rows within pools of {pool_batches * batch_size:,}"
            attributes = {"source": rows.name} | rows.attributes | {"row_order": row_order}
            target = (
                asked.target.with_name(f"{asked.target.stem}-{name}{asked.target.suffix}") if name else asked.target
            )
            fields = {key: field for key, field in rows.fields.items() if key != pictures.KEEP}
            writer = stack.enter_context(
                Writer(
                    target,
                    len(rows),
                    fields,
                    attributes,
                    shards=asked.shards,
                    at_most=pictures.KEEP in rows.fields,
                    compression=asked.compression,
                    threads=asked.threads,
                    replace=asked.force,
                )
            )
            with closing(make_feed(rows, order, "disk", torch.device("cpu"), asked.threads, prefetch_pools=1)) as feed:
                _append(writer, feed.pools(0), batch_size, name)
            said.append(
                f"{writer.rows:,} rows, order {row_order}, in {', '.join(map(str, writer.targets[:2]))}"
                f"{f' and {len(writer.targets) - 2} more' if len(writer.targets) > 2 else ''}"
            )
            if isinstance(rows, pictures.ImageFiles) and rows.failed:
                report = target.with_name(f"{target.name}.skipped.txt")
                reports[report] = "".join(f"{why}\n" for _, why in sorted(rows.failed.items()))
                said.append(f"{len(rows.failed):,} broken images were skipped: {report}")
    for report, text in reports.items():
        report.write_text(text, encoding="utf-8")
    print(*said, sep="\n")
    return 0


def _append(writer: Writer, pools: Iterator[Pool], batch_size: int, name: str) -> None:
    """The rows of all pools, but those whose field `keep` is False."""
    with _bar(writer.announced_rows, "rows", name) as bar:
        for pool in pools:
            for part in pool.rows.batches(batch_size):
                columns = part.numpy()
                keep = columns.pop(pictures.KEEP, None)
                writer.append(columns if keep is None or keep.all() else {key: c[keep] for key, c in columns.items()})
                bar.update(len(part))
                if _stopped:
                    sys.exit(_stopped[0])


def _open(asked: argparse.Namespace) -> Store | DatasetSource:
    if wrong := [pair for pair in asked.fields if "=" not in pair]:
        raise UserError(f"--fields is {wrong[0]}; it should be NAME=DATASET, such as images=x")
    fields = dict(pair.split("=", 1) for pair in asked.fields)
    if asked.dataset:
        fields = fields or {"images": "images", "labels": "labels"}
        return open_dataset("SOURCE", asked.source[0], fields, factory=asked.dataset, options=LoaderOptions())
    group = asked.source[0].partition("::")[2].strip("/")
    columns = survey.columns_of(asked.source[0])
    groups = {name.strip("/"): fields for name, fields in survey.fields_of(columns).items()}
    if group not in groups and not fields:
        names = ", ".join(f"/{name}" for name in sorted(groups)) or "no numbers"
        raise UserError(f"{asked.source[0]} has no rows in /{group}, but {names}; name one: file.h5::/group")
    fields = fields or groups[group]
    is_checked = all(
        column.has_digests
        for column in columns
        if group in ((own := column.group.strip("/")), own.rpartition("/")[0])  # ragged rows lie one group below
    )
    return open_store("SOURCE", asked.source, fields, verify=is_checked, trust_links=asked.trust_links)


def _pool_rows(rows: Readable | DatasetSource) -> int:
    largest = int(rows.block_rows.max())
    wanted = max(POOL_BYTES, POOL_BLOCKS * largest * rows.row_bytes) if largest > 1 else 64 << 20
    return max(1, min(len(rows), min(wanted, machine.free_host_bytes() // 4) // rows.row_bytes))


def info(asked: argparse.Namespace) -> int:
    """How the rows of files lie, and what would make them faster."""
    for path in asked.source:
        columns = survey.columns_of(path)
        print(path, *(f"  {column}" for column in columns), sep="\n")
        for line in (*survey.advise(columns), *_advise_on_rows(path.partition("::")[0], columns)):
            print(f"  advice: {line}")
    return 0


def _advise_on_rows(file: str, columns: list[survey.Column]) -> Iterator[str]:
    """What opening each group as rows finds: why it cannot be trained on, or that it is sorted by class."""
    for group, fields in sorted(survey.fields_of(columns).items()):
        try:
            rows = open_store("FILE", f"{file}::{group}", fields)
            warning = inspection.warn_of_class_order(rows, auto.POOL_BYTES // rows.row_bytes)
        except UserError as error:
            warning = str(error).removeprefix("FILE: ")
        if warning:
            yield warning.strip().removeprefix("warning: ")


def verify(asked: argparse.Namespace) -> int:
    """Every damaged block of files; 1 if there is one."""
    bad = 0
    for path in asked.source:
        columns = survey.columns_of(path)
        with _bar(sum(column.nbytes for column in columns), "B") as bar:
            found = survey.damaged(path, asked.threads, bar.update)
        bad += len(found)
        print(*found, f"{path}: {f'{len(found)} blocks are damaged' if found else 'whole'}", sep="\n")
        for column in columns:
            if not column.has_digests:
                print(f"  {column.path} was read, but has no checksums; `python convert.py repack` writes them")
    return int(bad > 0)


def _bar(total: int, unit: str, name: str = "") -> Any:
    return tqdm(total=total, unit=unit, unit_scale=True, dynamic_ncols=True, disable=not sys.stderr.isatty(), desc=name)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(run: Callable[[argparse.Namespace], int], source: str = "", many: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(run.__name__, help=run.__doc__, description=run.__doc__)
        command.set_defaults(run=run)
        if source:
            command.add_argument("source", help=source, nargs="+" if many else None)
        command.add_argument(
            "--threads",
            type=int,
            default=machine.available_cpus(),
            help="that read, decode, hash and compress; default: CPUs",
        )
        return command

    def add_writing(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument("target", type=Path, help="file to write, under a temporary name until it is whole")
        command.add_argument("--seed", type=int, default=0, help="of the random order, and of --split")
        command.add_argument("--keep-order", action="store_true", help="write the rows as they come")
        command.add_argument("--compression", choices=["none", "gzip", "lz4", "zstd"], default="none")
        command.add_argument("--shards", type=int, default=1, help="files to write")
        command.add_argument("--force", action="store_true", help="replace what is there")
        return command

    def add_decoding(command: argparse.ArgumentParser) -> argparse.ArgumentParser:
        command.add_argument(
            "--size", type=_size, metavar="HxW", help="of the rows, in pixels; default: the images' own"
        )
        command.add_argument(
            "--resize",
            choices=["shorter", "exact", "pad"],
            default="shorter",
            help="its shorter side whole, stretched, or with black borders",
        )
        command.add_argument("--crop", type=_size, metavar="HxW", help="take the centre first")
        command.add_argument(
            "--on-error",
            choices=["stop", "skip"],
            default="stop",
            help="at a broken image; skip: list it beside TARGET, fail above 1 %%",
        )
        return command

    def add_split(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--split", type=_share, metavar="SHARE", help="of each class to train on; the rest: to validate"
        )

    command = add_decoding(add_writing(add(images, "folder, or .csv")))
    command.add_argument("--columns", default="path,label", help="of the CSV: those of paths and labels")
    command.add_argument("--classes", type=int, help="of a CSV with numbers: how many there are; default: those seen")
    command.add_argument("--root", type=Path, help="folder that paths start from; default: that of the CSV")
    add_split(command)
    add_writing(add(cifar10, "cifar-10-python.tar.gz, cifar-10-binary.tar.gz, or the folder in it"))
    add_decoding(add_writing(add(celeba, "folder of the images and the two lists")))
    command = add_writing(add(movielens, "ratings.csv or the zip"))
    command.add_argument("--above", type=float, default=3.5, help="ratings that count; default: above 3.5")
    command.add_argument("--held-out", type=int, default=10_000, help="users to validate, and as many to test")
    command.add_argument("--columns", default=",".join(COLUMNS), help=f"of the CSV; default: {','.join(COLUMNS)}")
    command.add_argument(
        "--on-error",
        choices=["stop", "skip"],
        default="stop",
        help="at a broken line; skip: list it beside TARGET, fail above 1 %%",
    )
    command = add_writing(add(arrays, "name=file.npy, file.npz, name=matrix.npz or name=file.h5::/dataset", many=True))
    command.add_argument("--held-out", type=int, help="of a sparse matrix: rows to validate, and as many to test")
    command = add_writing(add(synthetic))
    command.add_argument("--kind", choices=["images", "interactions"], default="images")
    command.add_argument("--rows", type=int, help="default: 50,000 images, 6,000 users")
    command.add_argument("--items", type=int, default=1000, help="of interactions; default: 1,000")
    command.add_argument("--mean-items", type=float, default=30, help="of a user; default: 30")
    command.add_argument("--shape", type=_shape, default=(3, 32, 32), metavar="CxHxW", help="default: 3x32x32")
    command.add_argument("--classes", type=int, default=10)
    add_split(command)
    command = add_writing(add(repack, "file.h5, file.h5::/group or a quoted glob; the path for --dataset", many=True))
    command.add_argument("--dataset", help="package.module:Class, a map-style torch Dataset made of SOURCE")
    command.add_argument("--fields", nargs="+", default=[], metavar="NAME=DATASET", help="default: all datasets")
    command.add_argument("--trust-links", action="store_true", help="follow links into other files")
    for run in (info, verify):
        add(run, "file.h5 or file.h5::/group", many=True)
    return parser.parse_args(argv)


def _size(text: str) -> tuple[int, int]:
    if not (found := re.fullmatch(r"([1-9]\d{0,4})(?:x([1-9]\d{0,4}))?", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a height and width such as 218x178, or 64 for both")
    return int(found[1]), int(found[2] or found[1])


def _shape(text: str) -> tuple[int, int, int]:
    if not (found := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})x([1-9]\d{0,4})", text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 3x32x32")
    return int(found[1]), int(found[2]), int(found[3])


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


_stopped: list[int] = []


def _stop(number: int, _: object) -> None:
    """End, and leave no partial file. Python drops what a destructor raises: `repack` looks at the list, too."""
    _stopped.append(128 + number)
    sys.exit(128 + number)


def _report_unraisable(lost: Any) -> None:
    """Of what a destructor raised, tell all but that the command was stopped."""
    if not isinstance(lost.exc_value, SystemExit):
        sys.__unraisablehook__(lost)


if __name__ == "__main__":
    sys.unraisablehook = _report_unraisable
    signal.signal(signal.SIGINT, _stop)
    signal.signal(signal.SIGTERM, _stop)
    torch.set_num_threads(1)  # each of the readers works alone
    with exit_with_message(Launch()):
        asked = _parse(sys.argv[1:])
        try:
            sys.exit(asked.run(asked))
        except OSError as error:
            raise UserError(f"{error}; nothing was written: is the disk full or gone?") from None
