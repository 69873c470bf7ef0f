"""Use a trained model: predictions for your rows, metrics of a labelled file, or the model as one file.

python predict.py CHECKPOINT INPUT... [-o FILE]    one line for each row, as CSV or JSON lines
python predict.py CHECKPOINT --evaluate FILE.h5    the metrics of the workload over a labelled file
python predict.py CHECKPOINT --export FILE         for torch.export (model.pt2) or ONNX (model.onnx)

CHECKPOINT is the folder of a run (its best checkpoint is used), a folder in its `checkpoints`, or a copy of one: the
training data is not needed. INPUT: image files, folders of images and globs, or HDF5 files (`file.h5::/group`), or one
.npy or .npz file. On several GPUs, start one process for each with a part of the files: CUDA_VISIBLE_DEVICES=1 ...
"""

import argparse
import signal
import sys

from fastgpu.process.launch import UserError, exit_with_message, read_launch, warn


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line. Raises UserError for flags that do not fit together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", metavar="CHECKPOINT")
    parser.add_argument("inputs", metavar="INPUT", nargs="*")
    parser.add_argument("-o", "--output", default="-", help="FILE.csv or FILE.jsonl; default: CSV to the terminal")
    parser.add_argument("--id", metavar="FIELD", help="of INPUT, such as user: its value is written beside each row")
    parser.add_argument("--top", type=int, help="number of classes or items for each row, best first")
    parser.add_argument("--all", action="store_true", help="write the probability of every class, by its name, too")
    parser.add_argument(
        "--on-error", choices=("stop", "skip"), default="stop", help="at a broken image; skip writes why"
    )
    parser.add_argument("--evaluate", metavar="FILE.h5", help="print the metrics over this file, which has labels")
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")
    parser.add_argument("--export", metavar="FILE", help="write FILE.pt2 or FILE.onnx, with model.json in it")
    parser.add_argument("--force", action="store_true", help="replace the file of -o or --export, if there is one")
    parser.add_argument("--batch-size", type=int, help="rows of a batch; default: as in training")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--precision", choices=("bf16", "fp16", "fp32"), help="default: as in training")
    args = parser.parse_intermixed_args(argv)  # flags may stand before INPUT
    tasks = [bool(args.inputs), bool(args.evaluate), bool(args.export)]
    if sum(tasks) != 1:
        raise UserError("give INPUT, --evaluate FILE.h5 or --export FILE, one of them; see --help")
    if args.output != "-" and not args.output.endswith((".csv", ".jsonl")):
        raise UserError(f"-o is {args.output}; it should end in .csv or .jsonl")
    if args.export and not args.export.endswith((".pt2", ".onnx")):
        raise UserError(f"--export is {args.export}; it should end in .pt2 or .onnx")
    if (args.json and not args.evaluate) or (
        not args.inputs and (args.output != "-" or args.top or args.all or args.id)
    ):
        raise UserError("--json belongs to --evaluate; -o, --id, --top and --all belong to INPUT")
    if any(number is not None and number < 1 for number in (args.batch_size, args.top)):
        raise UserError("--batch-size and --top should be at least 1")
    return args


if __name__ == "__main__":  # before torch, whose import takes seconds: a mistake is reported at once
    launch = read_launch()
    with exit_with_message("interrupted"):
        args = parse(sys.argv[1:])
        if launch.world_size > 1:
            raise UserError("predict.py is one process; start it by python, once for each part of the files")

import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import IO

import torch
from torch import Tensor
from tqdm import tqdm

from fastgpu.predict.inputs import Inputs, make_order, open_inputs, open_pools
from fastgpu.predict.model import Trained, check_labelled, export, find_checkpoint, load_model
from fastgpu.predict.output import PredictionWriter, all_of, best_of, open_output
from fastgpu.process.config import Dist
from fastgpu.process.world import World, init_distributed
from fastgpu.run.model_files import DescribedSource
from fastgpu.storage.meaning import check_meaning
from fastgpu.training.evaluate import evaluate
from fastgpu.training.step import mixed_precision, to_device


def load(args: argparse.Namespace) -> Trained:
    """The model of the checkpoint. Flags that were not given get the values that it was validated with."""
    args.checkpoint = find_checkpoint(Path(args.checkpoint))
    trained = load_model(args.checkpoint)
    name = f"workloads/{trained.card['workload']}.py"
    if not (args.evaluate or trained.workload.inputs):
        raise UserError(f"{name} declares no inputs of predict; workloads/__init__.py describes them")
    args.precision = args.precision or trained.card["precision"]
    return trained


def open_rows(args: argparse.Namespace, trained: Trained) -> Inputs:
    """The rows to predict, with those fields that the workload takes, or to evaluate, with all fields of training."""
    names = tuple(trained.fields) if args.evaluate else trained.workload.inputs
    fields = {name: trained.fields[name] for name in names}
    paths = [args.evaluate] if args.evaluate else args.inputs
    inputs = open_inputs(paths, trained.card, fields, args.on_error, id_field=args.id or "")
    described = DescribedSource(trained.card, "the training rows")
    key = "--evaluate" if args.evaluate else "INPUT"
    check_meaning(key, described, inputs.source, labels=bool(args.evaluate))
    if args.evaluate:
        check_labelled(trained, inputs.source)
    return inputs


def check_fits(values: Mapping[str, Tensor], args: argparse.Namespace) -> None:
    """Raise UserError if predictions cannot be written as they were asked for. values: those of a batch."""
    for name, value in values.items():
        if value.ndim > 2 and not args.output.endswith(".jsonl"):
            shape = tuple(value.shape[1:])
            raise UserError(f"{name} is {shape} in each row, which does not fit CSV; use -o FILE.jsonl")


def predict(args: argparse.Namespace, trained: Trained, inputs: Inputs, world: World, *, terminal: IO[str]) -> None:
    """Write a line for each row, in the order of the input."""
    order = make_order(inputs.source, args.batch_size)
    autocast = mixed_precision(args.precision, world.device).autocast
    with (
        open_output(args.output, terminal, replace=args.force) as file,
        open_pools(inputs.source, order, world.device) as pools,
        tqdm(total=len(inputs.source), unit=" rows", disable=None) as bar,
    ):
        is_csv = not args.output.endswith(".jsonl")
        writer = PredictionWriter(file, inputs, trained.card["attributes"], is_csv=is_csv)
        for pool in pools:
            row_ids = pool.plan.row_ids[: pool.plan.n_real_rows].tolist()
            for start in range(0, len(row_ids), order.batch_size):
                batch_ids = row_ids[start : start + order.batch_size]
                with torch.inference_mode(), autocast:
                    rows = pool.rows.slice(start, start + len(batch_ids))
                    predicted = trained.workload.predict(trained.model, rows)
                values = best_of(predicted, args.top)
                if args.all:
                    values |= all_of(predicted, trained.card["attributes"])
                check_fits(values, args)
                ids = {args.id: rows[args.id]} if args.id else {}
                writer.write(batch_ids, ids, values)
                bar.update(len(batch_ids))
    failed = f", of which {writer.n_failed:,} could not be read" if writer.n_failed else ""
    place = "" if args.output == "-" else f": {args.output}"
    print(f"{len(inputs.source):,} rows{failed}{place}")
    for line in inputs.remarks(range(len(inputs.source))):
        print(line)
    if writer.n_nan:
        warn(
            f"the model gives NaN for {writer.n_nan:,} rows; their predictions mean nothing: look for NaN in these rows"
        )


def main(args: argparse.Namespace, world: World, terminal: IO[str]) -> None:
    """terminal: what is asked for goes there; everything else goes to sys.stdout."""
    trained = load(args)
    print(f"model: {args.checkpoint}")
    if args.export:
        print(export(trained, Path(args.export), replace=args.force))
        return
    inputs = open_rows(args, trained)
    args.batch_size = args.batch_size or trained.card["batch_size"]
    trained = trained._replace(model=to_device(trained.model, world.device))
    if world.device.type == "cuda":
        torch.set_num_threads(1)  # each of the threads that decode images works alone
    if args.inputs:
        predict(args, trained, inputs, world, terminal=terminal)
        return
    with open_pools(inputs.source, make_order(inputs.source, args.batch_size), world.device) as pools:
        metrics = evaluate(
            trained.model,
            trained.workload,
            pools,
            world,
            batch_size=args.batch_size,
            autocast=mixed_precision(args.precision, world.device).autocast,
        )
    metrics = {name.removeprefix("val/"): value for name, value in metrics.items()}
    text = json.dumps(metrics) if args.json else "\n".join(f"{name} {value:.6g}" for name, value in metrics.items())
    print(text, file=terminal)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # what is not complete is removed
    with exit_with_message("interrupted"), init_distributed(Dist(device=args.device)) as world:
        terminal = sys.stdout
        with redirect_stdout(sys.stderr):
            main(args, world, terminal)
