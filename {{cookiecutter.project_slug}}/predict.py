"""Use a trained model: predictions for your rows, metrics of a labelled file, or the model as one file.

python predict.py CHECKPOINT INPUT... [-o FILE]       one line for each row, as CSV or JSON lines
python predict.py CHECKPOINT INPUT... --evaluate      the metrics of the workload over labelled HDF5 or NumPy files
python predict.py CHECKPOINT --export FILE            for torch.export (model.pt2) or ONNX (model.onnx)

CHECKPOINT is the folder of a run (its best checkpoint is used), a folder in its `checkpoints`, or a copy of one: the
training data is not needed. INPUT: image files and folders of them, or HDF5 files (`file.h5::/group`, `part-*.h5`), or
one .npy or .npz file. On several GPUs, start one process for each with a part of the files: CUDA_VISIBLE_DEVICES=1 ...
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
    output = "FILE.csv or FILE.jsonl; default: CSV to the terminal. CSV has a ' before text that begins like a formula"
    add("-o", "--output", default="-", help=output)
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
    if args.output != "-" and not args.output.endswith((".csv", ".jsonl")):
        raise UserError(f"-o is {args.output}; it should end in .csv or .jsonl")
    if any(number is not None and number < 1 for number in (args.batch_size, args.top)):
        raise UserError("--batch-size and --top should be at least 1")
    return args


if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake is reported at once
    with exit_with_message():
        args = parse(sys.argv[1:])

from collections.abc import Mapping
from contextlib import redirect_stdout
from math import ceil
from pathlib import Path
from typing import IO

import torch
from tqdm import tqdm

from fastgpu.predict.inputs import ImageRows, open_inputs, open_pools
from fastgpu.predict.model import Trained, export, load_model
from fastgpu.predict.output import to_columns, write_rows
from fastgpu.process.config import Dist
from fastgpu.process.files import new_file
from fastgpu.process.world import World, init_distributed
from fastgpu.rows.contract import Dataset
from fastgpu.training.evaluate import evaluate
from fastgpu.training.step import mixed_precision, to_device


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
    if args.evaluate:
        precision = mixed_precision(card["precision"], world.device)
        with open_pools(rows, args.batch_size, world.device) as pools:
            for name, value in evaluate(model, workload, pools, world, precision=precision).items():
                print(f"{name.removeprefix('val/')} {value:.6g}", file=terminal)
    elif args.output == "-":
        predict(trained, rows, args, terminal, device=world.device)
    else:
        with (
            new_file(Path(args.output), replace=args.force) as partial,
            partial.open("w", encoding="utf-8", errors="surrogateescape") as file,  # names of files may be any bytes
        ):
            predict(trained, rows, args, file, device=world.device)
    if failed := rows.failed if isinstance(rows, ImageRows) else {}:
        raise UserError(left_out(failed, len(rows)))


def predict(trained: Trained, rows: Dataset, args: argparse.Namespace, file: IO[str], *, device: torch.device) -> None:
    """Write a line for each row that can be read, in the order of the input. Raises UserError if there is none."""
    autocast = mixed_precision(trained.card["precision"], device).autocast
    files, failed = (rows.files, rows.failed) if isinstance(rows, ImageRows) else ([], {})
    is_csv = not args.output.endswith(".jsonl")
    size = args.batch_size
    with open_pools(rows, size, device) as pools:
        batches = (batch for pool in pools for batch in pool.rows.batches(size))
        for number, batch in enumerate(tqdm(batches, total=ceil(len(rows) / size), unit=" batches", disable=None)):
            with torch.inference_mode(), autocast:  # not around the pools: other threads fill their memory
                values = {name: value.cpu() for name, value in trained.workload.predict(trained.model, batch).items()}
            places = range(number * size, number * size + len(batch))
            columns = {"file": [files[row] for row in places]} if files else {"row": [*places]}
            columns |= {name: batch[name].tolist() for name in args.id}
            columns |= to_columns(values, trained.card["attributes"], args.top, every=args.all)
            is_read = [row not in failed for row in places]
            write_rows(file, columns, is_read, is_csv=is_csv, is_first=not number)
    print(f"{len(rows) - len(failed):,} rows")
    if len(failed) == len(rows):  # no file is written
        raise UserError(left_out(failed, len(rows)))


def left_out(failed: Mapping[int, str], n_rows: int) -> str:
    """How many images could not be read, and why. failed: {row: why}."""
    return "\n  ".join([f"{len(failed):,} of {n_rows:,} images are left out", *(failed[row] for row in sorted(failed))])


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is not complete is removed
    terminal = sys.stdout
    with exit_with_message(OSError), redirect_stdout(sys.stderr), init_distributed(Dist(device=args.device)) as world:
        main(args, world, terminal)
