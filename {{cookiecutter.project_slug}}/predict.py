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

from contextlib import redirect_stdout
from math import ceil
from pathlib import Path
from typing import IO

import torch
from tqdm import tqdm

from fastgpu.predict.inputs import ImageRows, open_inputs, open_pools
from fastgpu.predict.model import Trained, export, find_checkpoint, load_model, make_workload
from fastgpu.predict.output import to_columns, write_rows
from fastgpu.process.config import Dist
from fastgpu.process.files import new_file
from fastgpu.process.world import World, init_distributed
from fastgpu.rows.contract import Dataset
from fastgpu.training.evaluate import evaluate
from fastgpu.training.step import mixed_precision, to_device


def predict(trained: Trained, rows: Dataset, args: argparse.Namespace, *, device: torch.device, file: IO[str]) -> str:
    """Write a line for each row, in the order of the input. Returns which images are left out, and why."""
    model, workload, card = trained
    autocast = mixed_precision(card["precision"], device).autocast
    files, failed = (rows.files, rows.failed) if isinstance(rows, ImageRows) else ((), {})
    for name in args.id:
        if rows.fields[name].is_ragged:
            raise UserError(f"--id {name} has any number of values in a row of {rows.name}; name a field that has one")
    is_csv = not args.output.endswith(".jsonl")
    size = args.batch_size
    with open_pools(rows, size, device) as pools:
        batches = (batch for pool in pools for batch in pool.rows.slice(0, pool.plan.n_real_rows).batches(size))
        for number, batch in enumerate(tqdm(batches, total=ceil(len(rows) / size), unit=" batches", disable=None)):
            with torch.inference_mode(), autocast:  # not around the pools: other threads fill their memory
                values = {name: value.cpu() for name, value in workload.predict(model, batch).items()}
            numbers = range(number * size, number * size + len(batch))
            columns = {"file": [str(files[row]) for row in numbers]} if files else {"row": [*numbers]}
            columns |= {name: batch[name].tolist() for name in args.id}
            columns |= to_columns(values, card["attributes"], args.top, every=args.all)
            is_read = [row not in failed for row in numbers]
            write_rows(file, columns, is_read, is_csv=is_csv, is_first=not number)
    print(f"{len(rows) - len(failed):,} rows")
    lines = [f"{len(failed):,} of {len(rows):,} images are left out", *(failed[row] for row in sorted(failed))]
    if len(failed) == len(rows):
        raise UserError("\n  ".join(lines))
    return "\n  ".join(lines) if failed else ""


def main(args: argparse.Namespace, world: World, terminal: IO[str]) -> None:
    """terminal: what is asked for goes there; everything else goes to sys.stdout. Raises UserError, and OSError if the
    disk refuses."""
    folder = find_checkpoint(Path(args.checkpoint))
    trained = load_model(folder)
    model, workload, card = trained
    quality = "".join(f", {name} {value:.4g}" for name, value in card["metrics"].items())
    print(f"model: {folder}, of epoch {card['epoch']}{quality}")
    if not args.evaluate and not workload.inputs:
        raise UserError(f"workloads/{card['workload']}.py declares no `inputs`; workloads/__init__.py has them")
    if args.export:
        export(trained, Path(args.export), replace=args.force)
        print(f"written: {args.export}")
        return
    names = list(card["fields"]) if args.evaluate else [*workload.inputs, *args.id]
    rows = open_inputs(args.inputs, card, names, labels=args.evaluate)
    args.batch_size = args.batch_size or card["batch_size"]
    to_device(model, world.device)
    if world.device.type == "cuda":
        torch.set_num_threads(1)  # each of the threads that decode images works alone
    if args.evaluate:
        make_workload(card, rows)  # which checks the labels
        with open_pools(rows, args.batch_size, world.device) as pools:
            precision = mixed_precision(card["precision"], world.device)
            metrics = evaluate(model, workload, pools, world, precision=precision)
        for name, value in metrics.items():
            print(f"{name.removeprefix('val/')} {value:.6g}", file=terminal)
        return
    if args.output == "-":
        left_out = predict(trained, rows, args, device=world.device, file=terminal)
    else:
        with (
            new_file(Path(args.output), replace=args.force) as partial,
            partial.open("w", encoding="utf-8", errors="surrogateescape") as file,  # names of files may be any bytes
        ):
            left_out = predict(trained, rows, args, device=world.device, file=file)
    if left_out:
        raise UserError(left_out)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is not complete is removed
    terminal = sys.stdout
    with exit_with_message(), redirect_stdout(sys.stderr), init_distributed(Dist(device=args.device)) as world:
        try:
            main(args, world, terminal)
        except OSError as error:  # such as a disk that is full
            raise UserError(str(error)) from None
