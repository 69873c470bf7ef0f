"""The commands for HDF5 files and Datasets, and `write`, which all commands share."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path, PurePosixPath

from fastgpu.convert import command
from fastgpu.convert.broken import in_order, refuse_broken
from fastgpu.convert.items import Items
from fastgpu.convert.splits import Split, limit_parts, split_rows
from fastgpu.convert.summary import Stored, check_rows, damaged, describe_rows, fields_of, inspect
from fastgpu.convert.writing import Writing, write_files
from fastgpu.dataset.source import ItemDataset, make_dataset
from fastgpu.process.config import LoaderConfig
from fastgpu.process.launch import UserError, list_first, warn
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset
from fastgpu.storage.hdf5 import expand
from fastgpu.storage.store import open_store


def write(
    source: Dataset | Mapping[str, Dataset], asked: command.WriteCommand, *, left_out: Sequence[str] = ()
) -> None:
    """Print a summary of a source, or of its splits, and write it to files.

    left_out: a reason for each row of the source that is in none of the splits.
    """
    split = Split(seed=asked.seed, limit=asked.limit, is_in_order=asked.keep_order)
    if isinstance(asked, command.SplitCommand):
        split = split._replace(shares=asked.split, by=asked.split_by)
    known = [*left_out]
    if isinstance(source, Mapping):
        parts = limit_parts(source, split)
    else:
        parts = split_rows(source, split)
        known = in_order(getattr(source, "known_broken", {}))
        n_rows = min(len(source), asked.limit or len(source))
        refuse_broken(known, n_rows, asked.on_error, None if asked.dry_run else asked.target)
    print(next(iter(parts.values())).name, *describe_rows(parts), sep="\n", flush=True)
    if known:
        print(f"  broken   {len(known):,} rows, which are left out; the first is {known[0]}")
    if asked.dry_run:
        print("--dry-run: nothing is written")
        return
    seed = None if asked.keep_order else asked.seed
    how = Writing(seed, asked.compression, replace=asked.force, max_broken=asked.on_error, n_threads=asked.threads)
    write_files(parts, asked.target, how, left_out=left_out)


def write_dataset(asked: command.Dataset) -> None:
    """Write the items of a torch Dataset."""
    try:
        _write_items(asked)
    except OSError as error:
        if not hasattr(error, "__notes__"):  # an error of the disk has none, and is reported in one line
            raise
        # Only with --num-workers=0, which is for debugging: the traceback helps.
        raise RuntimeError("an item of the Dataset cannot be read") from error


def _keys_of(fields: Sequence[str]) -> dict[str, str]:
    """{field: its key in the source}. fields: NAME=KEY, or NAME if the key is the same."""
    return {word.partition("=")[0]: word.partition("=")[2] or word for word in fields}


def _write_items(asked: command.Dataset) -> None:
    fields = _keys_of(asked.fields or ("images", "labels"))
    n_workers = available_cpus() if asked.num_workers is None else asked.num_workers
    workers_key = "--num-workers" if n_workers else ""
    _, dataset = make_dataset("SOURCE", asked.path, factory=asked.source, seed=asked.seed)
    name = f"{asked.source} called with {asked.path}"
    # Without workers, to debug it, the first item that raises an exception shows its traceback.
    kind = Items if n_workers or asked.on_error is not None else ItemDataset
    source = kind(name, dataset, fields, seed=asked.seed, workers_key=workers_key)
    if source.drawn:
        warn(
            f"the items of {source.name} draw random numbers ({', '.join(sorted(source.drawn))}): the file will have "
            "one draw of each, the same in each epoch; leave that to `transform` of the workload"
        )
    if n_workers:
        source = source.with_workers(n_workers, LoaderConfig().timeout_s)
    with closing(source):
        write(source, asked)


def repack(asked: command.Repack) -> None:
    """Write the rows of HDF5 files again. Existing checksums are verified first: new ones would hide damage."""
    files = [each for path in asked.sources for each in expand("SOURCE", path)]
    names = {Path(file).resolve() for file, _ in files}
    if len(names) > 1 and asked.target.resolve() in names:  # its old rows would be written into it
        raise UserError(f"{asked.target} is one of the {len(names)} files of SOURCE; choose another name")
    stored = {f"{file}::{group}": inspect(f"{file}::{group}") for file, group in files}
    groups = fields_of(next(iter(stored.values())))
    group = f"/{files[0][1].strip('/')}"
    named = _keys_of(asked.fields)
    fields = named or groups.get(group, {})
    if not fields:
        others = list_first([f"{files[0][0]}::{other}" for other in sorted(groups)], " or ")
        cure = f"name a group, {others}" if others else "it has no numbers"
        raise UserError(f"{asked.sources[0]} has no rows in {group}; {cure}")
    left_out = [each.text for datasets in stored.values() for each in datasets if each.is_left_out]
    left_out += [f"the rows in {other} are left out" for other in sorted(groups.keys() - {group})]
    for text in () if named else dict.fromkeys(left_out):
        warn(f"{asked.sources[0]}: {text}")
    for path, datasets in stored.items():
        if any(each.has_checksums for each in datasets) and (damages := damaged(path)):
            raise UserError("\n  ".join([f"{path} has {len(damages):,} damaged blocks:", list_first(damages, "\n  ")]))
    write(open_store("SOURCE", asked.sources, fields), asked)


def show(asked: command.Info) -> None:
    """Print the contents of files: fields, layouts, and whether blocks have checksums."""
    for path in asked.sources:
        stored = inspect(path)
        print(path, *(f"  {each.text}" for each in stored if each.is_left_out), sep="\n")
        for group, fields in sorted(fields_of(stored).items()):
            print(*_describe_group(path, group, fields, stored=stored), sep="\n")
        if not all(each.has_checksums or each.is_left_out for each in stored):
            print("  no checksums: `python convert.py repack` writes them")


def _describe_group(path: str, group: str, fields: Mapping[str, str], *, stored: Sequence[Stored]) -> list[str]:
    """Lines that describe the rows in a group, or its datasets if they are not rows."""
    places = {name: PurePosixPath(group, key) for name, key in fields.items()}
    values = {name: each for name, place in places.items() for each in stored if each.holds(place)}
    try:
        rows = open_store("FILE", f"{path.partition('::')[0]}::{group}", fields)
        return [f"  {group}", *describe_rows({"": rows}, {name: each.text for name, each in values.items()})]
    except UserError as error:
        datasets = [f"  {name:<8} {each.kind}, {each.text}" for name, each in values.items()]
        return [f"  {group} cannot be trained on: {error}", *datasets]


def check(asked: command.Check) -> int:
    """Read files, and list and count the damaged blocks. Returns the exit code: 1 if a block is damaged."""
    exit_code = 0
    for path in asked.sources:
        if damages := damaged(path):
            exit_code = 1
            print(*damages, sep="\n")
        unchecked = [each for each in inspect(path) if not each.has_checksums]
        state = f"{len(damages):,} blocks are damaged" if damages else "readable" if unchecked else "whole"
        print(f"{path}: {state}")
        for each in unchecked:
            checksums = f"{each.path} was read, but has no checksums; `python convert.py repack` writes them"
            print(f"  {each.text if each.is_left_out else checksums}")
        for fault in check_rows(path):
            print(f"  {fault}")
    return exit_code
