"""Use a trained model: predictions for your rows, metrics of a labelled file, or the model as one file.

python predict.py CHECKPOINT INPUT... [-o FILE]       one line for each row, as CSV or JSON lines
python predict.py CHECKPOINT INPUT... --evaluate      the metrics of the workload over labelled HDF5 or NumPy files
python predict.py CHECKPOINT --export FILE            for torch.export (model.pt2) or ONNX (model.onnx)

CHECKPOINT is the folder of a run (its best checkpoint is used), a folder in its `checkpoints`, or a copy of one.
INPUT: image files and folders of them, or HDF5 files (`file.h5::/group`, `part-*.h5`), or one .npy or .npz file.
"""

import argparse
import signal
import sys

from fastgpu.process.launch import UserError, exit_with_message


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line. Raises UserError for flags that do not fit together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("checkpoint", metavar="CHECKPOINT")
    add("inputs", metavar="INPUT", nargs="*")
    add("-o", "--output", default="-", help="FILE.csv, with ' before formulas, or FILE.jsonl; default: CSV to stdout")
    add("--id", metavar="FIELD", action="append", default=[], help="of INPUT, such as user: written beside each row")
    add("--top", type=int, help="number of classes or items for each row, best first")
    add("--all", action="store_true", help="write the probability of every class, by its name, too")
    add("--evaluate", action="store_true", help="print the metrics over INPUT, which has labels")
    add("--export", metavar="FILE", help="write FILE.onnx, or FILE.pt2 for torch.export, with model.json in it")
    add("--force", action="store_true", help="replace the file of -o or --export, if there is one")
    add("--batch-size", type=int, help="rows of a batch; default: as in training")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    args = parser.parse_intermixed_args(argv)  # flags may stand before INPUT
    if bool(args.inputs) == bool(args.export):
        raise UserError("give INPUT or --export FILE, one of them; see --help")
    if (args.evaluate or args.export) and (args.output != "-" or args.id or args.top or args.all):
        raise UserError("-o, --id, --top and --all are for predictions, not for --evaluate and --export")
    for flag, file, kinds in (("-o", args.output, (".csv", ".jsonl")), ("--export", args.export, (".pt2", ".onnx"))):
        if file not in ("-", None) and not file.endswith(kinds):
            raise UserError(f"{flag} is {file}; it should end in {' or '.join(kinds)}")
    if any(number is not None and number < 1 for number in (args.batch_size, args.top)):
        raise UserError("--batch-size and --top should be at least 1")
    return args


if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake is reported at once
    with exit_with_message():
        args = parse(sys.argv[1:])

import csv
import json
from collections.abc import Iterable
from contextlib import ExitStack, redirect_stdout
from itertools import compress
from math import ceil
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from tqdm import tqdm

from fastgpu.predict.model import ImageRows, Trained, export, load_model, open_inputs, open_pools
from fastgpu.process.config import Dist
from fastgpu.process.files import new_file
from fastgpu.process.world import World, init_distributed
from fastgpu.rows.contract import Dataset
from fastgpu.training.evaluate import evaluate
from fastgpu.training.step import mixed_precision, to_device

RANKED = {"probability": ("class", "class_name", "class_names", 1), "scores": ("items", "item_ids", "item_ids", 10)}
"""{what `predict` of a workload gives, (B, n): (column of the numbers of the best ones, column of their names,
attribute of model.json that has all names, how many are written)}"""
FORMULA = ("=", "+", "-", "@", "\t", "\r")
"""A spreadsheet takes text that begins like this for a formula. In CSV, a ' stands before it."""


def main(args: argparse.Namespace, world: World, terminal: IO[str]) -> None:
    """terminal: what is asked for goes there, all else to sys.stdout. Raises UserError, or OSError of the disk."""
    trained = load_model(args.checkpoint)
    model, workload, card = trained.model, trained.workload, trained.card
    quality = "".join(f", {name} {value:.4g}" for name, value in card["metrics"].items())
    print(f"model: {trained.folder}, of epoch {card['epoch']}{quality}")
    if not args.evaluate and not workload.inputs:
        raise UserError(f"workloads/{card['workload']}.py declares no `inputs`; workloads/__init__.py has them")
    if args.export:
        export(trained, Path(args.export), replace=args.force)
        print(f"written: {args.export}")
        return
    rows = open_inputs(args.inputs, trained, ids=args.id, labels=args.evaluate)
    args.batch_size = args.batch_size or card["batch_size"]
    to_device(model, world.device)
    if world.device.type == "cuda":
        torch.set_num_threads(1)  # each of the threads that decode images works alone
    if not args.evaluate:
        predict(trained, rows, args, terminal, device=world.device)
        return
    precision = mixed_precision(card["precision"], world.device)
    with open_pools(rows, args.batch_size, world.device) as pools:
        for name, value in evaluate(model, workload, pools, world, precision=precision).items():
            print(f"{name.removeprefix('val/')} {value:.6g}", file=terminal)


def predict(trained: Trained, rows: Dataset, args: argparse.Namespace, file: IO[str], *, device: torch.device) -> None:
    """Write a line for each row to the file of -o, or else to `file`. Images that cannot be read are left out, and told
    by a UserError at the end; if there are no others, no file is written."""
    autocast = mixed_precision(trained.card["precision"], device).autocast
    files, failed = (rows.files, rows.failed) if isinstance(rows, ImageRows) else ([], {})
    size = args.batch_size
    with ExitStack() as stack:
        if args.output != "-":
            partial = stack.enter_context(new_file(Path(args.output), replace=args.force))
            file = stack.enter_context(partial.open("w", encoding="utf-8", errors="surrogateescape"))
        pools = stack.enter_context(open_pools(rows, size, device))
        batches = (batch for pool in pools for batch in pool.rows.batches(size))
        for number, batch in enumerate(tqdm(batches, total=ceil(len(rows) / size), unit=" batches", disable=None)):
            with torch.inference_mode(), autocast:  # not around the pools: other threads fill their memory
                values = {name: value.cpu() for name, value in trained.workload.predict(trained.model, batch).items()}
            places = range(number * size, number * size + len(batch))
            columns = {"file": [str(files[row]) for row in places]} if files else {"row": [*places]}
            columns |= {name: batch[name].tolist() for name in args.id}
            columns |= to_columns(values, trained.card["attributes"], args.top, every=args.all)
            is_read = [row not in failed for row in places]
            write_rows(file, columns, is_read, is_csv=not args.output.endswith(".jsonl"), is_first=not number)
        print(f"{len(rows) - len(failed):,} rows")
        reasons = "\n  ".join(failed[row] for row in sorted(failed))
        left_out = f"{len(failed):,} of {len(rows):,} images are left out\n  {reasons}"
        if len(failed) == len(rows):
            raise UserError(left_out)
    if failed:
        raise UserError(left_out)


def to_columns(values: dict[str, Any], attributes: dict[str, Any], top: int | None, *, every: bool) -> dict[str, Any]:
    """The tensors that `predict` gives for a batch as {column: a number, a text, None or a list of these for each row}.

    attributes: of model.json. top: how many classes or items, best first; None: one class, or ten items. Those of NaN
    or -inf have the number -1. every: the values of all, too. Raises UserError if one is given and nothing is ranked.
    """
    ranked = [name for name, value in values.items() if name in RANKED and value.ndim == 2]
    if (top or every) and not ranked:
        raise UserError("--top and --all are for classes or items, but `predict` of this workload ranks nothing")
    columns = {name: to_list(value) for name, value in values.items() if name not in ranked}
    for name in ranked:
        number_column, name_column, attribute, default = RANKED[name]
        n_all = values[name].shape[1]
        names = attributes.get(attribute, ())
        names = names if len({*names}) == n_all else ()
        best, numbers = values[name].topk(min(top or default, n_all))
        numbers = numbers.masked_fill(~(best > -torch.inf), -1)
        columns[number_column] = numbers.squeeze(1).tolist()  # squeezed if there is one for each row
        if names:  # the last one is that of number -1
            columns[name_column] = np.array([*names, None], object)[columns[number_column]].tolist()
        columns[name] = to_list(best.squeeze(1))
        if every:
            columns |= {f"{name}_{label}": to_list(values[name][:, n]) for n, label in enumerate(names or range(n_all))}
    return columns


def to_list(values: torch.Tensor) -> list[Any]:
    """Numbers as Python has them. Floats are as short as a float32 can be, or None if not finite."""
    if not values.is_floating_point():
        return list(values.tolist())
    numbers = values.float().numpy(force=True).astype(str).astype(float)  # 0.9 instead of 0.8999999761581421
    return list(np.where(np.isfinite(numbers), numbers, np.array(None)).tolist())


def write_rows(file: IO[str], columns: dict[str, Any], which: Iterable[bool], *, is_csv: bool, is_first: bool) -> None:
    """Write rows of a batch, as CSV or JSON lines. In CSV, a list becomes columns such as `scores_0`. which: whether to
    write each row. is_first: nothing was written before."""
    if not is_csv:
        rows = compress(zip(*columns.values(), strict=True), which)
        file.writelines(json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False) + "\n" for row in rows)
        return
    cells: dict[str, Any] = {}
    for name, column in columns.items():
        if isinstance(column[0], list):
            cells |= {f"{name}_{place}": each for place, each in enumerate(zip(*column, strict=True))}
        else:
            cells[name] = column
    writer = csv.writer(file, lineterminator="\n")
    titles = [tuple(cells)] if is_first else []
    for row in [*titles, *compress(zip(*cells.values(), strict=True), which)]:
        writer.writerow(f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA) else cell for cell in row)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is not complete is removed
    terminal = sys.stdout
    with exit_with_message(OSError), redirect_stdout(sys.stderr), init_distributed(Dist(device=args.device)) as world:
        main(args, world, terminal)
