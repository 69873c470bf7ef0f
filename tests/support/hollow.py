"""Programs on stand-ins for GPUs (tests/hollow), and the reports that their processes leave."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from support import PROJECT, ROOT
from support.ranks import copy_project, printed_by, train_command
from support.runs import metrics_of

STEPS = ROOT / "tests/hollow/steps.py"
ALLOCATIONS = ("cudaMalloc", "cudaFree", "cudaHostAlloc", "cudaFreeHost", "cudaStreamCreate")
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize")
"""Calls of the runtime that make the host wait for the device. Copies that do so say it in their names."""


class Report(NamedTuple):
    """What a process has done with the stand-in, as runtime.cpp writes it."""

    contexts: list[int]
    """GPUs that it has used."""
    counts: Counter[str]
    """{call: how often}"""
    notes: list[str]
    """Races, and what the stand-in does not implement."""


def hollow(prefix: Path, **settings: object) -> dict[str, str]:
    """Variables for a process: where reports go, and others without their prefix HOLLOW_, such as the devices."""
    return {f"HOLLOW_{name.upper()}": str(value) for name, value in ({"report": prefix} | settings).items()}


def read_reports(prefix: Path) -> list[Report]:
    """The reports of the processes that have used a GPU, sorted by it."""
    reports = []
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
        counts = (text.split("\t") for kind, text in lines if kind == "count")
        reports.append(
            Report(
                [int(text) for kind, text in lines if kind == "context"],
                Counter({call: int(number) for call, number in counts}),
                [text for kind, text in lines if kind == "note"],
            )
        )
    return sorted(reports, key=lambda report: report.contexts)


def train_on_gpus(folder: Path, *words: str, ranks: int = 1, root: Path = PROJECT, **settings: object) -> list[Report]:
    """Run train.py, one rank on each GPU, and check what holds for each run on GPUs. settings: see `hollow`.

    Returns the reports by rank. The calls of each step are in the files `steps.<rank>` of the folder.
    """
    prefix = folder / "report"
    for path in folder.glob("report.*"):
        path.unlink()
    command = train_command(*words, ranks=ranks, root=root)
    script = command.index(str(root / "train.py"))
    command[script:script] = [str(STEPS), str(folder / "steps")]
    settings = {"devices": ranks} | settings
    printed_by(command, root, PYTHONPATH=str(root), **hollow(prefix, **settings))
    reports = read_reports(prefix)
    gpus = [[rank] for rank in range(ranks)] if ranks == settings["devices"] else [[*range(settings["devices"])]]
    contexts = [report.contexts for report in reports]
    assert contexts == gpus, f"contexts of the ranks: {contexts}"
    notes = [note for report in reports for note in report.notes]
    assert not notes, "\n".join(notes)
    return reports


def check_steps(folder: Path, run: str, rank: int = 0) -> None:
    """After the first epoch, steps neither wait nor allocate, but for one wait at a point of the log.

    Steps that end an epoch validate and save.
    """
    steps = [Counter(step) for step in json.loads((folder / f"steps.{rank}").read_text())]
    points = metrics_of(folder / run)
    ends = [point["step"] for point in points if any(tag.startswith("val/") for tag in point)]
    logged = [point["step"] for point in points if "train/loss" in point]
    steady = {step: calls for step, calls in enumerate(steps, 1) if step > ends[0] and step not in ends}
    assert len(steady) > 20
    for step, calls in steady.items():
        assert waits(calls) == (step in logged), f"waits in step {step}: {calls}"
        assert not any(calls[call] for call in ALLOCATIONS), f"allocations in step {step}: {calls}"


def waits(calls: Counter[str]) -> int:
    """How often the host has waited for the device. torch follows up a copy that waits by a cudaStreamSynchronize."""
    n_copies = sum(number for call, number in calls.items() if "host waits" in call)
    return max(n_copies, sum(calls[call] for call in WAITS))


def edited_project(folder: Path, name: str, before: str, after: str) -> Path:
    """A copy of the project, in which a piece of a file is replaced. Returns its folder."""
    project = folder / "project"
    project.mkdir()
    copy_project(project)
    for linked in ("data", "config.yaml", "config.recsys.yaml"):
        (project / linked).symlink_to(PROJECT / linked)
    text = (project / name).read_text()
    assert text.count(before) == 1
    (project / name).write_text(text.replace(before, after))
    return project
