"""What all benchmarks share: taking turns, medians with their spread, and the page of a result.

A page is bench/results/<what>_<hardware>_<yyyymm>.md. Its numbers lie beside it, as JSON on one line. The rows of its
table "targets" go to bench/README.md: python bench/publish.py updates the table there from the newest results.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import h5py
import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "bench" / "README.md"
IN_README = ("loader", "order", "decode", "encoded", "recsys", "diagnose", "gpu")
"""The benchmarks with targets in bench/README.md, in this order."""
MARKERS = re.compile(r"(?s)(<!-- results:begin -->\n).*(<!-- results:end -->\n)")
TARGET_COLUMNS = ["what", "measured", "required / goal"]
"""Columns of a table "targets": a change must not fall below the required value."""
NOT_MEASURED = "not measured"
T = TypeVar("T")


class FailedError(Exception):
    """A contender cannot be measured. The message goes into the table."""


class Table(NamedTuple):
    """A table of a page, with a note below it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        escaped = [" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines]
        return "".join(f"| {line} |\n" for line in escaped)


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has. --quick: small data and short times, to try the benchmark itself."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--quick", action="store_true", help="small data and short times; the numbers mean nothing")
    options.add_argument("--out", type=Path, help="folder of the result (bench/results; with --quick a temporary one)")
    return options


def say(text: str) -> None:
    """Print progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def take_turns(title: str, ways: Mapping[str, Callable[[], T]], n_rounds: int) -> dict[str, list[T] | str]:
    """{way: what it returned in each round, or why it failed}.

    Every other round goes backwards, so that a drift of the speed of the machine evens out.
    """
    results: dict[str, list[T]] = {name: [] for name in ways}
    failed: dict[str, str] = {}
    for number in range(n_rounds):
        names = list(reversed(ways)) if number % 2 else list(ways)
        for name in names:
            if name in failed:
                continue
            try:
                results[name].append(ways[name]())
            except FailedError as failure:
                failed[name] = str(failure)
            say(f"{title}, round {number + 1}: {name}: {failed.get(name) or results[name][-1]}")
    return {**results, **failed}


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and the lowest and highest value: `1.20x [1.07-1.31]`."""
    if not values:
        return NOT_MEASURED
    return f"{median(values):{form}}{unit} [{min(values):{form}}-{max(values):{form}}]"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio in each round; none if one of the two was not measured."""
    return [a / b for a, b in zip(values, others, strict=True)] if values and others else []


def machine() -> dict[str, str]:
    """Hardware, versions, date and commit, on which the numbers depend. Nothing in it names a host or a person."""
    model = re.search(r"(?m)^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text())
    has_gpu = torch.cuda.is_available()
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "ram": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "gpu": torch.cuda.get_device_name(0) if has_gpu else "none",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "h5py")},
        "hdf5": h5py.version.hdf5_version,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": _commit(),
    }


def write_result(what: str, tables: Sequence[Table], data: Mapping[str, Any], args: argparse.Namespace) -> Path:
    """Write the page of a benchmark. args: of its `parser`."""
    folder = args.out or (Path(tempfile.mkdtemp(prefix="bench-")) if args.quick else RESULTS)
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    return write(what, tables, data, command, folder=folder)


def write(what: str, tables: Sequence[Table], data: Mapping[str, Any], command: str, *, folder: Path = RESULTS) -> Path:
    """Write a page of results and its JSON, and print the path of the page. Returns that path.

    data: the values from which the tables were made; they go to the JSON. command: how to measure them again.
    """
    facts = machine()
    year, month = facts["date"].split("-")[:2]
    path = folder / f"{what}_{_hardware(facts)}_{year}{month}.md"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": facts, "command": command, "tables": [table._asdict() for table in tables], "data": data}
    path.with_suffix(".json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    page = f"# {what}\n\nMade by `{command}`.\n\n"
    page += Table("", ["machine", ""], list(facts.items())).markdown()
    for table in tables:
        page += f"\n## {table.title}\n\n{table.markdown()}"
        if table.note:
            page += f"\n{table.note}\n"
    path.write_text(page)
    print(path)
    return path


def targets(folder: Path = RESULTS) -> str:
    """The table of bench/README.md, from the newest result of each kind that has targets."""
    rows: list[list[str]] = []
    for what in IN_README:
        results = [(json.loads(path.read_text()), path.stem) for path in folder.glob(f"{what}_*.json")]
        if not results:
            continue
        newest, name = max(results, key=lambda result: (result[0]["machine"]["date"], result[1]))
        for table in newest["tables"]:
            if table["title"] == "targets":
                rows += [[*row[:3], f"[{name}](results/{name}.md)"] for row in table["rows"]]
    return Table("", [*TARGET_COLUMNS, "page"], rows).markdown()


def insert(readme: str, block: str) -> str:
    """The text of bench/README.md with `block` between its two markers."""
    assert MARKERS.search(readme), "bench/README.md has lost its lines results:begin and results:end"
    return MARKERS.sub(lambda match: match[1] + block + match[2], readme)


def _hardware(facts: Mapping[str, str]) -> str:
    """A short name for file names: `nvidia-h200`, or `2-core-xeon` if there is no GPU."""
    if facts["gpu"] != "none":
        return re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    family = re.search(r"(?:Intel|AMD)(?:\(R\))? (\w+)", facts["cpu"])
    return f"{facts['cores']}-core-{family[1].lower() if family else platform.machine()}"


def _commit() -> str:
    """The commit of this repository. New results do not count as changes: a benchmark may run after another one."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL)
        changed = subprocess.check_output([*git, "status", "--porcelain", "--", ".", ":!bench/results"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + (" with changes" if changed else "")


if __name__ == "__main__":
    README.write_text(insert(README.read_text(), targets()))
