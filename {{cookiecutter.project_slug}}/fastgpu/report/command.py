"""The command of report.py."""

import csv
import shutil
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastgpu.process.commands import argument, flag, parse
from fastgpu.process.launch import UserError, exit_with_message, say
from fastgpu.process.tools import check_exist, csv_cell, start_tool
from fastgpu.report import ledger, results

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a run did, also while it runs and after a kill.

    python report.py runs/a               values of the run, where its time went
    python report.py --compare runs/*     metric, settings that differ, speed
    python report.py --csv runs/*         the same for a spreadsheet

    TensorBoard draws the curves: tensorboard --logdir runs
    """

    runs: tuple[Path, ...] = argument("folder of a run", metavar="RUN")
    compare: bool = flag("a line for each run, the best run first; a table for each metric", default=False)
    csv: bool = flag("all in one table, as CSV", default=False)
    sort: str = flag(
        "a scalar or setting, such as data/wait_pct or optim.lr: the run with the lowest value is first",
        default="",
        metavar="KEY",
    )

    def __post_init__(self) -> None:
        if self.sort and not (self.compare or self.csv):
            raise UserError("--sort is for --compare and --csv")
        check_exist(*self.runs, cure="name the folder of a run, such as runs/mine")


def report(asked: Report) -> None:
    """Print the report. Raises UserError, or OSError if the output cannot be written."""
    read = [results.read_run(run) for run in asked.runs]
    runs = [run for run in read if run.points]
    empty = [str(run.folder) for run in read if not run.points]
    if not runs:
        raise UserError(f"{', '.join(empty)}: no points in metrics.jsonl; it is no run, or has just begun")
    if empty:  # a sweep may have runs that failed at their start
        say(f"left out: {len(empty)} without a point in metrics.jsonl: {', '.join(empty)}", sys.stderr)
    if asked.sort and not any(asked.sort in results.facts(run) for run in runs):
        cure = "name a scalar such as data/wait_pct, a setting such as optim.lr, goodput or steps"
        raise UserError(f"--sort is {asked.sort}, which no run has; {cure}")
    if asked.csv:
        lines = results.compare(runs, str, asked.sort)
        csv.writer(sys.stdout, lineterminator="\n").writerows(map(csv_cell, line) for line in lines)
    elif asked.compare:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        tables = [results.compare(group, results.number, asked.sort) for group in results.by_metric(runs)]
        print("\n\n".join(results.as_text(table, width) for table in tables))
    else:
        for run in runs:
            show(run)


def show(run: results.Run) -> None:
    """Print the values of a run, and where its time went."""
    lines = [[f"  {name}", results.number(value)] for name, value in results.summary(run).items()]
    print(f"{run.folder}\n{results.as_text(lines)}")
    if run.ledger:
        rows = [[f"    {ledger.KINDS.get(kind, ' ')} {kind}", *values] for kind, *values in ledger.as_rows(run.ledger)]
        print(f"  where the time went:\n    {ledger.bar(run.ledger)}\n{results.as_text(rows)}")


def main(argv: Sequence[str]) -> None:
    """Run `report.py` with these words. It does not import torch, so it answers without delay."""
    start_tool()
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program
    with exit_with_message(OSError):
        report(parse(Report, argv, program="report.py"))
