"""The predictions, metrics and exports of predict.py."""

import operator
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import repeat
from pathlib import Path
from typing import IO, Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from fastgpu.predict.answers import Answers, ask, describe, find_wrong, to_columns, write_rows
from fastgpu.predict.command import Predict
from fastgpu.predict.inputs import ImageRows, UserRows, open_batches, open_inputs, places_of
from fastgpu.predict.model import Trained, export, load_model
from fastgpu.process.files import new_file
from fastgpu.process.launch import UserError
from fastgpu.process.world import World
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Rows
from fastgpu.training.evaluate import evaluate
from fastgpu.training.step import mixed_precision, move_model

AS_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}
"""Encoding of the files. A byte of a file name that is not UTF-8 is written as \\udcff, as in JSON."""


def run(asked: Predict, world: World, terminal: IO[str]) -> None:
    """Do what a command line asks for. Raises UserError, or OSError of the disk.

    terminal: gets the result; all other output goes to sys.stdout.
    """
    trained = load_model(asked.checkpoint)
    card = trained.card
    quality = "".join(f", {name} {value:.4g}" for name, value in card["metrics"].items())
    print(f"model: {trained.folder}, of epoch {card['epoch']}{quality}")
    if not asked.evaluate and not trained.workload.inputs:
        raise UserError(f"workloads/{card['workload']}.py declares no `inputs`; workloads/__init__.py has them")
    if asked.export:
        export(trained, Path(asked.export), replace=asked.force)
        print(f"written: {asked.export}")
        return
    rows = open_inputs(asked.inputs, trained, ids=asked.id, labels=asked.evaluate)
    move_model(trained.model, world.device)
    if world.device.type == "cuda":
        torch.set_num_threads(1)  # each of the threads that decode images works alone
    if asked.evaluate:
        write_metrics(trained, rows, asked, terminal, world=world)
    else:
        write_predictions(trained, rows, asked, terminal, device=world.device)


# ---------------------------------------------------------------------------------------------- predictions


def write_predictions(trained: Trained, rows: Dataset, asked: Predict, file: IO[str], *, device: torch.device) -> None:
    """Write a line for each row to the file of -o, or else to `file`. Images that cannot be read are left out, and a
    UserError at the end lists them. If no image can be read, no file is written."""
    autocast = mixed_precision(trained.card["precision"], device).autocast
    failed = rows.failed if isinstance(rows, ImageRows) else {}
    where, size = places_of(rows), asked.batch_size or trained.card["batch_size"]
    with ExitStack() as stack:
        if asked.output != "-":
            partial = stack.enter_context(new_file(Path(asked.output), replace=asked.force))
            file = stack.enter_context(partial.open("w", **AS_TEXT))
        titles: tuple[str, ...] = ()
        batches = stack.enter_context(open_batches(rows, size, device))
        for number, batch in enumerate(batches):
            with torch.inference_mode(), autocast:  # not around the loader, in which other threads write to memory
                values = {name: value.cpu() for name, value in trained.workload.predict(trained.model, batch).items()}
            places = range(number * size, number * size + len(batch))
            if isinstance(rows, UserRows):
                values = rows.hide_seen(values, places)
            columns = {name: values[places.start : places.stop].tolist() for name, values in where.items()}
            columns |= {name: batch[name].tolist() for name in asked.id}
            columns |= to_columns(values, trained.card["attributes"], asked.top, every=asked.all)
            is_read = [row not in failed for row in places]
            if any(is_read):
                titles = write_rows(file, columns, is_read, is_csv=not asked.output.endswith(".jsonl"), titles=titles)
        print(f"{len(rows) - len(failed):,} rows")
        reasons = "\n  ".join(failed[row] for row in sorted(failed))
        left_out = f"{len(failed):,} of {len(rows):,} images are left out"
        if len(failed) == len(rows):
            raise UserError(f"{left_out}\n  {reasons}")
    if failed:
        raise UserError(f"{left_out}; the others are written, and the exit code is 2\n  {reasons}")


# ---------------------------------------------------------------------------------------------- metrics


class Examiner:
    """Scores batches for `evaluate`, and notes what `predict` answers, in one pass over the model."""

    def __init__(self, trained: Trained):
        self._trained = trained
        self.answers: list[Answers] = []

    def score(self, model: nn.Module, batch: Rows) -> Mapping[str, Tensor]:
        """The sums of the workload."""
        with one_pass(model):
            answer = ask(self._trained, batch)
            self.answers.extend([answer] if answer else [])
            return self._trained.workload.score(model, batch)

    def metrics(self, sums: Mapping[str, Tensor]) -> Mapping[str, float]:
        """The metrics of the workload."""
        return self._trained.workload.metrics(sums)


@contextmanager
def one_pass(model: nn.Module) -> Iterator[None]:
    """In this block, a model that is called again with the same tensors returns the same output without computing it.

    `predict` and `score` of a workload both call the model. A tensor that was changed in place is
    not the same.
    """
    compute = model.forward
    last: list[Tensor] = []  # inputs and output of the last call
    versions: list[int] = []

    def forward(*inputs: Any, **options: Any) -> Any:
        is_same = not options and len(last) == len(inputs) + 1 and all(map(operator.is_, inputs, last))
        if is_same and [each._version for each in last] == versions:
            return last[-1]
        output = compute(*inputs, **options)
        tensors = (*inputs, output)
        last[:] = tensors if not options and all(isinstance(each, Tensor) for each in tensors) else ()
        versions[:] = [each._version for each in last]
        return output

    with patch.object(model, "forward", forward):
        yield


def write_metrics(trained: Trained, rows: Dataset, asked: Predict, terminal: IO[str], *, world: World) -> None:
    """Write the metrics of labelled rows to the terminal, for classes and attributes also the confusions; and the rows
    with wrong answers to the file of --errors."""
    precision = mixed_precision(trained.card["precision"], world.device)
    size = asked.batch_size or trained.card["batch_size"]
    examiner = Examiner(trained)
    with open_batches(rows, size, world.device) as batches:
        metrics = evaluate(trained.model, examiner, batches, world, precision=precision) or {}
    for name, value in metrics.items():
        print(f"{name} {value:.6g}", file=terminal)
    answers = examiner.answers
    if asked.errors and not answers:
        raise UserError("--errors is for classes and attributes, which `labels` of INPUT and `predict` have to hold")
    if len({len(answer.names) for answer in answers}) > 1:
        raise UserError("`predict` of the workload gives another number of classes for other rows; it should not")
    if answers:
        joined = Answers(answers[0].names, *map(np.concatenate, [*zip(*answers, strict=True)][1:]))
        print(*describe(joined), sep="\n", file=terminal)
    if asked.errors:
        wrong = find_wrong(joined, places_of(rows))
        with new_file(Path(asked.errors), replace=asked.force) as partial, partial.open("w", **AS_TEXT) as file:
            write_rows(file, wrong, repeat(True), is_csv=not asked.errors.endswith(".jsonl"))
        print(f"{len(wrong['label']):,} wrong answers: {asked.errors}")
