"""The commands for files, arrays and Datasets. Each takes the command line, and may return an exit code."""

from argparse import Namespace
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from fastgpu.convert.arrays import open_arrays
from fastgpu.convert.reader import list_first, split_rows
from fastgpu.convert.summary import damaged, describe_rows, fields_of, inspect
from fastgpu.convert.writing import write_files
from fastgpu.dataset.source import open_dataset
from fastgpu.process.config import Loader
from fastgpu.process.launch import UserError, warn
from fastgpu.process.machine import available_cpus
from fastgpu.rows.contract import Dataset
from fastgpu.storage.hdf5 import expand
from fastgpu.storage.store import open_store


def write(source: Dataset | Mapping[str, Dataset], args: Namespace) -> None:
    """Show what was understood of a source, or of its parts, and write it to files, as the command line says."""
    parts = source if isinstance(source, Mapping) else split_rows(source, vars(args).get("split"), args.seed)
    print(next(iter(parts.values())).name, *describe_rows(parts), sep="\n", flush=True)
    seed = None if args.keep_order else args.seed
    max_broken = vars(args).get("on_error", 0.0)
    if args.dry_run:
        print("--dry-run: nothing is written")
    else:
        write_files(parts, args.target, seed, args.compression, replace=args.force, max_broken=max_broken)


def arrays(args: Namespace) -> None:
    """Write arrays of equal length, one for each field of the rows."""
    write(open_arrays(args.source, channels_last=args.layout == "nhwc"), args)


def dataset(args: Namespace) -> None:
    """Write the items of a torch Dataset."""
    try:
        _write_items(args)
    except OSError as error:
        if not hasattr(error, "__notes__"):  # of the disk, which is told in one line
            raise
        raise RuntimeError("an item of the Dataset cannot be read") from error  # with --num-workers=0, to debug it


def _write_items(args: Namespace) -> None:
    fields = {word.partition("=")[0]: word.partition("=")[2] or word for word in args.fields or ("images", "labels")}
    n_workers = available_cpus() if args.num_workers is None else args.num_workers
    workers_key = "--num-workers" if n_workers else ""
    source = open_dataset("SOURCE", args.path, fields, factory=args.source, seed=args.seed, workers_key=workers_key)
    source.name = f"{args.source} called with {args.path}"
    if source.drawn:
        warn(
            f"the items of {source.name} draw random numbers ({', '.join(sorted(source.drawn))}): the file will have "
            "one draw of each, the same in each epoch; leave that to `transform` of the workload"
        )
    if n_workers:
        source = source.with_workers(n_workers, Loader().timeout_s)
    with closing(source):
        write(source, args)


def repack(args: Namespace) -> None:
    """Write the rows of HDF5 files anew. Those with checksums are checked before: new ones would vouch for damage."""
    files = [each for path in args.source for each in expand("SOURCE", path)]
    names = {Path(file).resolve() for file, _ in files}
    if len(names) > 1 and args.target.resolve() in names:  # so that its old rows would be in it again
        raise UserError(f"{args.target} is one of the {len(names)} files of SOURCE; choose another name")
    stored = {f"{file}::{group}": inspect(f"{file}::{group}") for file, group in files}
    groups = fields_of(next(iter(stored.values())))
    group = f"/{files[0][1].strip('/')}"
    named = {word.partition("=")[0]: word.partition("=")[2] or word for word in args.fields or ()}
    fields = named or groups.get(group, {})
    if not fields:
        raise UserError(f"{args.source[0]} has no rows in {group}, but {', '.join(sorted(groups)) or 'no numbers'}")
    left_out = [each.text for datasets in stored.values() for each in datasets if each.is_left_out]
    left_out += [f"the rows in {other} are left out" for other in sorted(groups.keys() - {group})]
    for text in () if named else dict.fromkeys(left_out):
        warn(f"{args.source[0]}: {text}")
    for path, datasets in stored.items():
        if any(each.has_checksums for each in datasets) and (damages := damaged(path)):
            raise UserError(f"{damages[0]}; `python convert.py check` lists all damaged blocks")
    write(open_store("SOURCE", args.source, fields), args)


def info(args: Namespace) -> None:
    """Show what files hold, how their rows lie, and whether these have checksums."""
    for path in args.source:
        stored = inspect(path)
        print(path, *(f"  {each.text}" for each in stored), sep="\n")
        for group, fields in sorted(fields_of(stored).items()):
            try:
                rows = open_store("FILE", f"{path.partition('::')[0]}::{group}", fields)
                print(f"  {group}", *describe_rows({"": rows}), sep="\n")
            except UserError as error:
                print(f"  {group} cannot be trained on: {error}")


def check(args: Namespace) -> int:
    """Read files, count the damaged blocks and list the first of them. The exit code is 1 if there is one."""
    exit_code = 0
    for path in args.source:
        if damages := damaged(path):
            exit_code = 1
            print(list_first(damages, "\n"))
        unchecked = [each for each in inspect(path) if not each.has_checksums]
        state = f"{len(damages):,} blocks are damaged" if damages else "readable" if unchecked else "whole"
        print(f"{path}: {state}")
        for each in unchecked:
            checksums = f"{each.path} was read, but has no checksums; `python convert.py repack` writes them"
            print(f"  {each.text if each.is_left_out else checksums}")
    return exit_code
