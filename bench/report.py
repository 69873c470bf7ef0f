"""What a benchmark measured, and on what: bench/results/<what>_<hardware>_<yyyymm>.json, and the same to read as .md.

python bench/report.py            README.md's table, made from the newest results
python bench/report.py --check    exit 1 if README.md's table is not that

A benchmark's table "targets" goes to README.md. Its columns: what, measured, must / aim.
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
IN_README = ("loader", "order", "decode", "recsys", "diagnose", "gpu")  # whose targets README.md shows, in this order
BEGIN, END = "<!-- results:begin -->\n", "<!-- results:end -->\n"


class Table(NamedTuple):
    title: str
    columns: list[str]
    rows: list[list[str]]
    note: str = ""

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


def machine() -> dict[str, str]:
    """What the numbers depend on; nothing that names a host or a person."""
    return {
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "ram": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "gpu": _gpu(),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "h5py")},
        "hdf5": _hdf5_version(),
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": _commit(),
    }


def write(what: str, tables: Sequence[Table], data: dict[str, Any], command: str, folder: Path = RESULTS) -> Path:
    """One page of results and its JSON; `data` is what the tables were made from. Returns the Markdown's path."""
    on = machine()
    path = folder / f"{what}_{_hardware(on)}_{on['date'][:4]}{on['date'][5:7]}.md"
    folder.mkdir(parents=True, exist_ok=True)
    content = {"machine": on, "command": command, "tables": [table._asdict() for table in tables], "data": data}
    path.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n")
    page = f"# {what}\n\nMade by `{command}`.\n\n"
    page += Table("", ["machine", ""], [[name, value] for name, value in on.items()]).markdown()
    for table in tables:
        page += f"\n## {table.title}\n\n{table.markdown()}" + (f"\n{table.note}\n" if table.note else "")
    path.write_text(page)
    print(path)
    return path


def targets(folder: Path = RESULTS) -> str:
    """README.md's table from the newest result of each kind that has targets; empty if there is none."""
    rows: list[list[str]] = []
    for what in IN_README:
        found = [(json.loads(path.read_text()), path.with_suffix(".md")) for path in folder.glob(f"{what}_*.json")]
        if not found:
            continue
        newest, page = max(found, key=lambda each: (each[0]["machine"]["date"], each[1].name))
        link = f"[{page.stem}](bench/results/{page.name})"
        for table in newest["tables"]:
            if table["title"] == "targets":
                rows += [[*row[:3], link] for row in table["rows"]]
    return Table("", ["what", "measured", "must / aim", "page"], rows).markdown() if rows else ""


def insert(readme: str, block: str) -> str:
    """The text with `block` between its two markers. Raises ValueError if it has no such place."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md has no lines {BEGIN.strip()} and {END.strip()}; add them where the table belongs")
    return before + begin + block + end + after


def _hardware(on: dict[str, str]) -> str:
    """nvidia-h200, or 2-core-xeon where there is no GPU."""
    if on["gpu"] != "none":
        return re.sub(r"[^a-z0-9]+", "-", on["gpu"].lower()).strip("-")
    family = re.search(r"(?:Intel|AMD)(?:\(R\))? (\w+)", on["cpu"])
    return f"{on['cores']}-core-{family[1].lower() if family else platform.machine()}"


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.machine()


def _gpu() -> str:
    try:
        import torch
    except ImportError:  # a peer's environment may have none
        return "none"
    count = torch.cuda.device_count()
    if not count:
        return "none"
    name = torch.cuda.get_device_name(0)
    return name if count == 1 else f"{count}x {name}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _hdf5_version() -> str:
    try:
        import h5py
    except ImportError:
        return "not installed"
    return h5py.version.hdf5_version


def _commit() -> str:
    """Of this repository. Results may differ without making it dirty: one benchmark's run is no change to the next."""
    git = ["git", "-C", str(ROOT)]
    try:
        head = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True, stderr=subprocess.DEVNULL)
        changed = subprocess.check_output([*git, "status", "--porcelain", "--", ".", ":!bench/results"], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + (" with changes" if changed else "")


def main() -> None:
    parser = argparse.ArgumentParser(description="README.md's table, made from the newest results")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if README.md's table is another")
    arguments = parser.parse_args()
    path = ROOT / "README.md"
    old = path.read_text()
    new = insert(old, targets())
    if arguments.check and new != old:
        sys.exit("error: README.md's table is not that of the newest results; run python bench/report.py")
    if new != old:
        path.write_text(new)


if __name__ == "__main__":
    main()
