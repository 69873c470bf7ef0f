"""The command of predict.py. It does not import torch, so --help and errors appear without delay."""

import signal
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fastgpu.process.commands import argument, flag, parse
from fastgpu.process.config import Dist
from fastgpu.process.files import check_target
from fastgpu.process.launch import UserError, exit_with_message
from fastgpu.process.tools import check_exist, start_tool

__all__ = ["main"]

TABLES = (".csv", ".jsonl")
NO_CHECKPOINT = "name the folder of a run, such as runs/mine, or of a checkpoint"
PROGRAMS = (".pt2", ".onnx")


@dataclass(frozen=True, kw_only=True)
class Predict:
    """Use a trained model: predictions, metrics of labelled rows, or one file.

    python predict.py CHECKPOINT INPUT... [-o FILE]    a line for each row
    python predict.py CHECKPOINT INPUT... --evaluate   metrics and confusions
    python predict.py CHECKPOINT --export FILE         for torch.export or ONNX

    CHECKPOINT is the folder of a run (its best checkpoint is used), a folder in
    its `checkpoints`, or a copy of one. INPUT: image files and folders of them,
    or HDF5 files (`file.h5::/group`, `part-*.h5`), or one .npy or .npz file, or
    one .csv file with a line for each item that a user has.
    """

    checkpoint: str = argument("folder of a run or a checkpoint")
    inputs: tuple[str, ...] = argument("rows; labelled ones for --evaluate", metavar="INPUT", default=())
    output: str = flag(
        "FILE.csv, with ' before formulas, or FILE.jsonl; default: CSV to stdout",
        *("-o", "--output"),
        default="-",
        metavar="FILE",
    )
    id: tuple[str, ...] = flag(
        "of INPUT, such as user: written beside each row", type=str, action="append", default=(), metavar="FIELD"
    )
    top: int | None = flag("number of classes or items for each row, best first", metavar="N")
    all: bool = flag("write the probability of every class, by its name, too", default=False)
    evaluate: bool = flag("evaluate on labelled INPUT: metrics and confusions", default=False)
    errors: str = flag("with --evaluate: the rows with wrong answers, as CSV or JSON lines", default="", metavar="FILE")
    export: str = flag(
        "write FILE.onnx, or FILE.pt2 for torch.export, with model.json in it", default="", metavar="FILE"
    )
    force: bool = flag("replace the file of -o, --errors or --export, if there is one", default=False)
    batch_size: int | None = flag("rows of a batch; default: as in training", metavar="N")
    device: Literal["auto", "cuda", "cpu"] = flag("default: auto", default="auto")

    def __post_init__(self) -> None:
        if bool(self.inputs) == bool(self.export):
            raise UserError("give INPUT or --export FILE, one of them; see --help")
        if (self.evaluate or self.export) and (self.output != "-" or self.id or self.top or self.all):
            raise UserError("-o, --id, --top and --all are for predictions, not for --evaluate and --export")
        if self.export and (self.batch_size or self.device != "auto"):
            raise UserError("--batch-size and --device are for INPUT, not for --export")
        if self.errors and not self.evaluate:
            raise UserError("--errors is for --evaluate, which compares the answers with labels")
        if any(number is not None and number < 1 for number in (self.batch_size, self.top)):
            raise UserError("--batch-size and --top should be at least 1")
        files = {"-o": (self.output, TABLES), "--errors": (self.errors, TABLES), "--export": (self.export, PROGRAMS)}
        targets = {name: file for name, file in files.items() if file[0] not in ("", "-")}
        for name, (target, suffixes) in targets.items():
            if not target.endswith(suffixes):
                raise UserError(f"{name} is {target}; it should end in {' or '.join(suffixes)}")
        check_exist(self.checkpoint, cure=NO_CHECKPOINT)
        check_exist(*self.inputs)
        for target, _ in targets.values():
            check_target(Path(target), replace=self.force)


def main(argv: Sequence[str]) -> None:
    """Run `predict.py` with these words. The result goes to stdout, everything else to stderr."""
    start_tool()
    with exit_with_message():
        asked = parse(Predict, argv, program="predict.py")
    if asked.output == "-" and not asked.errors:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends what writes no table

    # Torch is imported after the checks that do not need it, because the import takes seconds.
    from fastgpu.predict.program import run
    from fastgpu.process.world import init_distributed

    terminal = sys.stdout
    with exit_with_message(OSError), redirect_stdout(sys.stderr), init_distributed(Dist(device=asked.device)) as world:
        run(asked, world, terminal)
