"""Writes the results of a benchmark and its machine: bench/results/<what>_<hardware>_<yyyymm>.json, and a page (.md).

python bench/publish.py            update the table in bench/README.md from the newest results
python bench/publish.py --check    change nothing; exit with 1 if bench/README.md does not show the newest results

The table "targets" of a benchmark goes to bench/README.md. Its columns: what, measured, required / goal.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import torch

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "bench" / "README.md"
IN_README = ("loader", "order", "decode", "encoded", "recsys", "diagnose", "gpu")
"""The benchmarks with targets in bench/README.md, in this order."""
BEGIN = "<!-- results:begin -->\n"
END = "<!-- results:end -->\n"
TARGET_COLUMNS = ["what", "measured", "required / goal"]
"""Columns of a table "targets": a change must not fall below the required value."""


class Table(NamedTuple):
    """A table of a page, with a note below it."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "".join(map(_markdown_line, lines))


def _markdown_line(cells: Sequence[str]) -> str:
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(escaped)} |\n"


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and the lowest and highest value: `1.20x [1.07-1.31]`."""
    return f"{median(values):{form}}{unit} [{min(values):{form}}-{max(values):{form}}]"


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio in each round."""
    return [a / b for a, b in zip(values, others, strict=True)]


def machine() -> dict[str, str]:
    """Hardware, versions, date and commit, on which the numbers depend. Nothing in it names a host or a person."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "ram": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "gpu": _gpu(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "h5py")},
        "hdf5": h5py.version.hdf5_version,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": _commit(),
    }


def write(what: str, tables: Sequence[Table], data: dict[str, Any], command: str, *, folder: Path = RESULTS) -> Path:
    """Write a page of results and its JSON, and print the path of the page. Returns that path.

    data: the values from which the tables were made; they go to the JSON. command: how to measure them again.
    """
    this_machine = machine()
    path = result_path(what, this_machine, folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "machine": this_machine,
        "command": command,
        "tables": [table._asdict() for table in tables],
        "data": data,
    }
    path.with_suffix(".json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    page = f"# {what}\n\nMade by `{command}`.\n\n"
    page += Table("", ["machine", ""], [[name, value] for name, value in this_machine.items()]).markdown()
    for table in tables:
        page += f"\n## {table.title}\n\n{table.markdown()}"
        if table.note:
            page += f"\n{table.note}\n"
    path.write_text(page)
    print(path)
    return path


def result_path(what: str, machine: dict[str, str], folder: Path) -> Path:
    """The page of a benchmark that is written this month."""
    year, month = machine["date"].split("-")[:2]
    return folder / f"{what}_{_hardware(machine)}_{year}{month}.md"


def targets(folder: Path = RESULTS) -> str:
    """The table of bench/README.md, from the newest result of each kind that has targets; empty if there is none."""
    rows: list[list[str]] = []
    for what in IN_README:
        results = [(json.loads(path.read_text()), path.with_suffix(".md")) for path in folder.glob(f"{what}_*.json")]
        if not results:
            continue
        newest, page = max(results, key=lambda result: (result[0]["machine"]["date"], result[1].name))
        link = f"[{page.stem}](results/{page.name})"
        for table in newest["tables"]:
            if table["title"] == "targets":
                rows += [[*row[:3], link] for row in table["rows"]]
    return Table("", [*TARGET_COLUMNS, "page"], rows).markdown() if rows else ""


def insert(readme: str, block: str) -> str:
    """The text of bench/README.md with `block` between its two markers. Raises ValueError if they are missing."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(
            f"bench/README.md has no lines {BEGIN.strip()} and {END.strip()}; add them where the table belongs"
        )
    return before + begin + block + end + after


def _hardware(machine: dict[str, str]) -> str:
    """A short name for file names: `nvidia-h200`, or `2-core-xeon` if there is no GPU."""
    if machine["gpu"] != "none":
        return re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    family = re.search(r"(?:Intel|AMD)(?:\(R\))? (\w+)", machine["cpu"])
    name = family[1].lower() if family else platform.machine()
    return f"{machine['cores']}-core-{name}"


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.machine()
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    return model[1] if model else platform.machine()


def _gpu() -> str:
    count = torch.cuda.device_count()
    if not count:
        return "none"
    name = torch.cuda.get_device_name(0)
    return name if count == 1 else f"{count}x {name}"


def _commit() -> str:
    """The commit of this repository. New results do not count as changes: a benchmark may run after another one."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL)
        changed = subprocess.check_output([*git, "status", "--porcelain", "--", ".", ":!bench/results"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + (" with changes" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="update the table in bench/README.md from the newest results")
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if the table is out of date")
    args = parser.parse_args()
    old = README.read_text()
    new = insert(old, targets())
    if args.check and new != old:
        sys.exit("error: bench/README.md does not show the newest results; run python bench/publish.py")
    if new != old:
        README.write_text(new)


if __name__ == "__main__":
    main()
