"""What all benchmarks share: taking turns, medians with their spread, and the page of a result.

A page is bench/results/<what>_<hardware>_<yyyymm>.md. Its numbers are beside it, as JSON on one line. The rows of its
table "targets" go to bench/README.md: python bench/publish.py updates the table there from the newest results, the
numbers of all tables in pages below a comment such as `<!-- numbers: layouts -->`, and sentences between comments such
as `<!-- words: gpu -->` and `<!-- words:end -->`: what has been measured on a GPU, the caption of the timeline, and
where the numbers of a table come from (`made-idle`).
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
from typing import Any, NamedTuple

import h5py
import torch
from peers import PEERS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
README = ROOT / "bench" / "README.md"
FAQ = ROOT / "docs" / "faq.md"
PICTURE = ROOT / "docs" / "pictures" / "timeline.json"
PAGES = ROOT / "{{cookiecutter.project_slug}}" / "docs"
IN_README = ("loader", "order", "encoded", "recsys", "windows", "bucket", "gpu")
"""The benchmarks with targets in bench/README.md, in this order."""
NUMBERS = re.compile(r"(?m)(^<!-- numbers: ([\w-]+) -->\n\|.*\n\|.*\n)((?:\|.*\n)+)")
"""A table of a page whose last columns are filled: its head and its rows."""
MARKERS = re.compile(r"(?s)(?<=<!-- results:begin -->\n).*(?=<!-- results:end -->\n)")
TARGET_COLUMNS = ["what", "measured", "required / goal"]
"""Columns of a table "targets": a change must not fall below the required value."""
NOT_MEASURED = "not measured"
OURS, OURS_JPEG = "fastgpu, disk", "fastgpu, JPEG"


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


def take_turns(title: str, ways: Mapping[str, Callable[[], Any]], n_rounds: int) -> dict[str, Any]:
    """{way: what it returned in each round, or why it failed}.

    Every other round goes backwards, so that a drift of the speed of the machine evens out.
    """
    results: dict[str, Any] = {name: [] for name in ways}
    for number in range(n_rounds):
        for name in reversed(ways) if number % 2 else ways:
            if isinstance(results[name], str):
                continue
            try:
                said = ways[name]()
                results[name].append(said)
            except FailedError as failure:
                said = results[name] = str(failure)
            print(f"{title}, round {number + 1}: {name}: {said}", file=sys.stderr, flush=True)
    return results


def spread(values: Sequence[float], form: str, unit: str = "") -> str:
    """The median, and the lowest and highest value: `1.20x [1.07-1.31]`."""
    if not values:
        return NOT_MEASURED
    return f"{median(values):{form}}{unit} [{min(values):{form}}-{max(values):{form}}]"


def machine() -> dict[str, str]:
    """Hardware, versions, date and commit, on which the numbers depend. Nothing in it names a host or a person."""
    model = re.search(r"(?m)^model name\s*: (.+)$", Path("/proc/cpuinfo").read_text())
    git = ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "cpu": model[1] if model else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "ram": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / (1 << 30):.0f} GiB",
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "h5py")},
        "hdf5": h5py.version.hdf5_version,
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit.stdout.strip() or "unknown",
    }


def write_result(what: str, tables: Sequence[Table], data: Mapping[str, Any], args: argparse.Namespace) -> Path:
    """Write the page of a benchmark and its JSON, and print the path of the page. Returns that path.

    data: the values from which the tables were made; they go to the JSON. args: of its `parser`.
    """
    folder = args.out or (Path(tempfile.mkdtemp(prefix="bench-")) if args.quick else RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    facts = machine()
    path = folder / f"{what}_{_hardware(facts)}_{facts['date'][:7].replace('-', '')}.md"
    command = " ".join(["python", f"bench/{Path(sys.argv[0]).name}", *sys.argv[1:]])
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
    """The table of bench/README.md, from the newest result of each kind that has targets. Missed ones are marked."""
    rows: list[list[str]] = []
    for what in IN_README:
        for result, name in newest(what, folder):
            for table in result["tables"]:
                if table["title"] == "targets":
                    for text, measured, required in table["rows"]:
                        mark = ", **missed**" if is_missed(measured, required) else ""
                        rows.append([text, measured, required + mark, f"[{name}](results/{name}.md)"])
    return Table("", [*TARGET_COLUMNS, "page"], rows).markdown()


def is_missed(measured: str, required: str) -> bool:
    """Whether a measured cell, `0.80x [0.70-0.96]`, is below its required value, or above one such as `<= 1.7x`."""
    found = re.match(r"[\d.]+", measured)
    limit = re.match(r"(<=? )?([\d.]+)", required)
    if not found or not limit:
        return False
    value, bound = float(found[0]), float(limit[2])
    return value > bound if limit[1] else value < bound


def _hardware(facts: Mapping[str, str]) -> str:
    """A short name for file names: `nvidia-h200`, or `2-core-xeon` if there is no GPU."""
    if facts["gpu"] != "none":
        return re.sub(r"[^a-z0-9]+", "-", facts["gpu"].lower()).strip("-")
    family = re.search(r"(?:Intel|AMD)(?:\(R\))? (\w+)", facts["cpu"])
    return f"{facts['cores']}-core-{family[1].lower() if family else platform.machine()}"


def newest(
    what: str, folder: Path = RESULTS, is_wanted: Callable[[dict[str, Any]], bool] = bool
) -> list[tuple[dict[str, Any], str]]:
    """The newest result of a benchmark, among those that are wanted, and the name of its page; empty if it has none."""
    found = [(json.loads(path.read_text()), path.stem) for path in folder.glob(f"{what}_*.json")]
    results = [(result, page) for result, page in found if is_wanted(result)]
    return sorted(results, key=lambda result: (result[0]["machine"]["date"], result[1]))[-1:]


def speeds(result: dict[str, Any], case: str, kinds: Sequence[str]) -> list[float]:
    """Rows/s in each round of the fastest contender whose name begins with one of `kinds`; empty if there is none."""
    rates = [
        [each["rows"] / each["seconds"] for each in rounds]
        for name, rounds in result["data"]["warm"][case].items()
        if name.startswith(tuple(kinds)) and not isinstance(rounds, str)
    ]
    return max(rates, key=median, default=[])


def times_as_fast(own: Sequence[float], theirs: Sequence[float]) -> str:
    """The median of the ratios of the rounds."""
    return f"{median(a / b for a, b in zip(own, theirs, strict=True)):.2f}" if theirs else NOT_MEASURED


class Usual(NamedTuple):
    """A row of README.md: this project beside DataLoaders. Each contender is the fastest whose name begins so."""

    text: str
    what: str
    """The benchmark."""
    case: str
    items: tuple[str, ...]
    """DataLoaders that ask their Dataset for one item after the other."""
    batches: tuple[str, ...]
    """DataLoaders that ask for whole batches (BatchSampler, batch_size=None)."""
    ours: str

    def cells(self) -> list[str]:
        ((result, page),) = newest(self.what)
        own, by_items, by_batches = (
            speeds(result, self.case, kinds) for kinds in ((self.ours,), self.items, self.batches)
        )
        rates = [f"{median(each):,.0f}" if each else NOT_MEASURED for each in (by_items, by_batches, own)]
        faster = max(by_items, by_batches, key=lambda each: median(each) if each else 0)
        return [f"[{self.text}](bench/results/{page}.md)", *rates, times_as_fast(own, faster)]


USUAL = [
    Usual(
        "32 x 32, random crop and flip",
        "idle",
        "cifar",
        ("cifar: each image in the Dataset",),
        ("cifar: batches in the Dataset",),
        "cifar: disk tier, batches augmented",
    ),
    Usual(
        "32 x 32, only read; DataLoader: from RAM",
        "loader",
        "cifar",
        ("RAM, workers", "RAM, in process"),
        ("RAM, batches",),
        OURS,
    ),
    Usual(
        "218 x 178, only read; DataLoader: by h5py",
        "loader",
        "celeba",
        ("h5py, in process", "h5py, workers", "h5py, plain file, workers"),
        ("h5py, plain file, batches",),
        OURS,
    ),
    Usual(
        "JPEG, random crops; DataLoader: Pillow",
        "encoded",
        "500x375",
        ("DataLoader + Pillow",),
        ("DataLoader of batches + Pillow",),
        OURS_JPEG,
    ),
    Usual(
        "JPEG, random crops; DataLoader: simplejpeg",
        "encoded",
        "500x375",
        ("DataLoader + simplejpeg",),
        ("DataLoader of batches + simplejpeg",),
        OURS_JPEG,
    ),
]
BESIDE = [
    ("218 x 178, raw", "loader", "celeba", OURS, "{}"),
    ("32 x 32, raw", "loader", "cifar", OURS, "{}"),
    ("JPEG of 256 x 256, whole", "encoded", "256x256", OURS_JPEG, "{}, JPEG"),
    ("JPEG of 500 x 375, random crops", "encoded", "500x375", OURS_JPEG, "{}, JPEG"),
    ("the same, but FFCV stores half of its images as pixels", "encoded", "500x375", OURS_JPEG, "{}, half JPEG"),
]
"""(text, benchmark, case, our contender, what its peers' names begin with, after the first word) of the second table"""


def first_screen() -> str:
    """What README.md shows of the results: this project beside DataLoaders, and beside its peers. Medians only."""
    machines = [newest(what)[0][0]["machine"] for what in ("idle", "loader", "encoded")]
    cores = " or ".join(dict.fromkeys(machine["cores"] for machine in machines))
    columns = [f"images/s, {cores} cores", "DataLoader, single samples", "DataLoader, whole batches"]
    columns += ["this template", "times as fast"]
    rows = [usual.cells() for usual in USUAL]
    text = Table("", columns, rows).markdown()
    pillow, simplejpeg = (cells[-1] for usual, cells in zip(USUAL, rows, strict=True) if usual.what == "encoded")
    (targets,) = [table["rows"] for table in newest("encoded")[0][0]["tables"] if table["title"] == "targets"]
    (required,) = (row[2].split(" / ")[0] for row in targets if row[0].endswith("DataLoader + Pillow"))
    beside = []
    for words, what, case, own, name in BESIDE:
        ((result, page),) = newest(what)
        theirs = [speeds(result, case, (name.format(peer),)) for peer in PEERS]
        cells = [times_as_fast(speeds(result, case, (own,)), rates) if rates else "" for rates in theirs]
        if not any(cells):
            continue  # not measured yet
        beside.append([f"[{words}](bench/results/{page}.md)", *cells])
    text += "\n" + Table("", ["times as fast as", *PEERS.values()], beside).markdown()
    return (
        f"{text}\n- JPEG with random crops: this template is {pillow} times as fast as a DataLoader with Pillow (our "
        f"[target](bench/README.md#results) is {required}), and {simplejpeg} times as fast as one with simplejpeg.\n"
        "- In the first row, augmentation on the CPU takes most of the time, both for whole batches in a DataLoader "
        "and for the template. With a GPU, the template augments on the GPU.\n"
        '- "Times as fast" compares with the faster of the two DataLoaders (whole batches: `BatchSampler`, '
        "`batch_size=None`), and with the fastest documented way of each other project. An empty cell: the page has "
        "no such contender.\n"
        "- The order differs: nearly all others shuffle all rows. This template shuffles blocks, then rows in pools of "
        "256 MiB ([how random a batch is](bench/README.md#results)). The pages say what else differs.\n"
        '- Rates are medians of three rounds. "Times as fast" is the median of the ratios of the rounds, so it can '
        "differ from the quotient of two medians.\n"
        f"- Files are in the page cache; {_list_machines(machines)}. Files that are larger than the memory have "
        f"[a page of their own](bench/results/{newest('beyond-ram')[0][1]}.md).\n"
    )


def _list_machines(machines: Sequence[Mapping[str, str]]) -> str:
    """Where and when the pages of a table were measured. They may be of several days and machines."""
    cpus = " and ".join(dict.fromkeys(f"an {machine['cpu'].replace('(R)', '')}" for machine in machines))
    days = sorted({machine["date"][:10] for machine in machines})
    versions = ", ".join(sorted({machine["torch"] for machine in machines}))
    several = "; the page behind each row names its machine" if len(days) > 1 or " and " in cpus else ""
    return f"{cpus}, torch {versions}, {' to '.join(days[:: max(1, len(days) - 1)])}{several}"


def gpu_words(folder: Path = RESULTS) -> dict[str, str]:
    """{name of a place in a page: its words}: what bench/gpu.py has measured, or that nothing has been measured."""
    found = newest("gpu", folder, lambda each: each["machine"]["gpu"] != "none" and "--quick" not in each["command"])
    if not found:
        return {
            "gpu": "**Not measured on a GPU yet**: all numbers here are from CPUs. `python bench/gpu.py` measures "
            "your GPU ([how](bench/README.md)).",
            "gpu-ko": "**GPU에서는 아직 측정하지 않았습니다.** 여기의 숫자는 모두 CPU에서 잰 것입니다. "
            "`python bench/gpu.py`로 직접 잴 수 있습니다([방법](../../bench/README.md)).",
            "gpu-targets": "On a GPU nothing has been measured yet.",
            "gpu-counters": ", and not on a real GPU yet",
            "gpu-deterministic": "; nothing was run on a GPU yet",
            "gpu-faq": "Nobody has measured that yet, because no GPU was available.",
            "gpu-idle": "**Nothing was measured on a GPU**: `diagnose.py` measures yours.",
            "gpu-idle-ko": "**GPU에서는 아무것도 재지 않았습니다.** 여러분의 GPU는 `diagnose.py`로 잽니다.",
            "gpu-hour": ", because none was measured",
        }
    ((result, page),) = found
    (targets,) = [table["rows"] for table in result["tables"] if table["title"] == "targets"]
    feed = [row[1] for row in targets if row[0].startswith("feed ratio, ")]
    wait = [row[1] for row in targets if row[0].startswith("data wait, ")]
    lowest = min(feed, key=lambda cell: float(cell.split()[0]))
    longest = max(wait, key=lambda cell: float(cell.split()[0]))
    gpu, date = result["machine"]["gpu"], result["machine"]["date"][:10]
    link = f"bench/results/{page}.md"
    text = f"On one {gpu}, the lowest feed ratio of {len(feed)} cases is {lowest}, and the longest data wait {longest}"
    return {
        "gpu": f"{text} ([{date}]({link})).",
        "gpu-ko": f"{gpu} 하나에서 {len(feed)}가지 경우 중 가장 낮은 feed ratio는 {lowest}, 가장 긴 data wait는 "
        f"{longest}입니다([{date}](../../{link})).",
        "gpu-targets": f"{text} ([{date}](../{link})).",
        "gpu-counters": "",
        "gpu-deterministic": "",
        "gpu-faq": f"{text} ([{date}](../{link})).",
        "gpu-idle": "`diagnose.py` measures your GPU.",
        "gpu-idle-ko": "여러분의 GPU는 `diagnose.py`로 잽니다.",
        "gpu-hour": "",
    }


def timeline_words(picture: Path = PICTURE) -> dict[str, str]:
    """{name of a place in a page: the picture of who waits and its caption}, with the numbers of the picture."""
    result = json.loads(picture.read_text())
    cores, date, step = result["machine"]["cores"], result["machine"]["date"][:10], f"{result['step_ms']:g} ms"
    cpu = result["machine"]["cpu"].replace("(R)", "")
    usual, ours = (
        f"{100 * sum(end - begin for who, begin, end in result[way] if who == 'device') / result['span_ms']:.0f} %"
        for way in ("usual", "ours")
    )
    alternative = (
        "Who works and who waits in front of a simulated device: fed by a DataLoader with two workers that reads one "
        f"image after the other by h5py, the device works {usual} of the time; fed by this template, {ours}"
    )
    where = f"{result['rows']}; {cores} CPU cores of an {cpu}, {date}"
    caption = f"*The device is **simulated**: it sleeps {step} for each batch ({where}).*"
    korean_alternative = (
        "시뮬레이션한 디바이스 앞에서 누가 일하고 누가 기다리는가: "
        "h5py로 이미지를 한 장씩 읽는 워커 둘의 DataLoader로는 "
        f"디바이스가 시간의 {usual}를, 이 템플릿으로는 {ours}를 일합니다"
    )
    korean_caption = f"*디바이스는 **시뮬레이션**입니다. 배치마다 {step} 동안 잠듭니다({cpu} {cores}코어, {date}).*"
    return {
        "timeline": f"![{alternative}](docs/pictures/timeline.svg)\n\n{caption}",
        "timeline-ko": f"![{korean_alternative}](../pictures/timeline.svg)\n\n{korean_caption}",
    }


def made_words() -> dict[str, str]:
    """{name of a place in a page: the machine, the date and the command of the numbers in its tables}"""
    words = {}
    for what in {fill.what for fill in FILLS.values()}:
        ((result, _),) = newest(what)
        machine, command = result["machine"], result["command"].removeprefix("python ")
        cpu = machine["cpu"].replace("(R)", "")
        place = f"{machine['cores']} cores of an {cpu}, torch {machine['torch']}, {machine['date'][:10]}"
        words[f"made-{what}"] = f"{place}, `{command}` of the template"
    return words


WORDS = re.compile(r"(?s)(<!-- words: ([\w-]+) -->).*?(?=<!-- words:end -->)")
"""A place in a page whose words are filled in. A block has lines of its own, other words are in a sentence."""
BLOCKS = ("timeline", "timeline-ko", "gpu", "gpu-ko")


def fill_words(text: str, words: Mapping[str, str]) -> str:
    """A page with its words."""

    def filled(found: re.Match[str]) -> str:
        name = found[2]
        return found[1] + (f"\n{words[name]}\n" if name in BLOCKS else words[name])

    return WORDS.sub(filled, text)


class Fill(NamedTuple):
    """Where the numbers of a page's table are: rows and columns of result tables."""

    what: str
    """The benchmark."""
    rows: Sequence[str]
    """What stands for {} in the names of `columns`, for each row of the page's table."""
    columns: Sequence[tuple[str, str, str]]
    """(start of the title of a result table, first cells of its row, its column) for each of the last columns."""

    def cells(self) -> list[list[str]]:
        """The numbers of each row. A cell is empty if there is no such row in the result."""
        ((result, _),) = newest(self.what)
        return [
            [self._cell(result, title, name.format(row), column) for title, name, column in self.columns]
            for row in self.rows
        ]

    @staticmethod
    def _cell(result: dict[str, Any], title: str, name: str, column: str) -> str:
        (table,) = (table for table in result["tables"] if table["title"].startswith(title))
        rows = [row for row in table["rows"] if "|".join(row).startswith(f"{name}|")]
        return rows[0][table["columns"].index(column)] if rows else ""


def measures(title: str) -> list[tuple[str, str, str]]:
    """The three columns of what bench/run.py measures."""
    return [(title, "{}", column) for column in ("rows/s", "CPU us a row", "x the first")]


def both_sizes(column: str) -> list[tuple[str, str, str]]:
    """A column for large and one for small rows."""
    return [(f"warm, {case}", "{}", column) for case in ("celeba", "cifar")]


def echoed(data: str) -> Fill:
    """What echo costs on this data."""
    columns = ("equally many fresh rows", "equally many steps")
    return Fill("echo", ["1", "2", "4"], [("accuracy", f"{data}|{{}}", column) for column in columns])


BEYOND_RAM = ("around, rows/s", "through, rows/s", "around, CPU us/row", "through, CPU us/row")
FILLS = {
    "cifar": Fill(
        "idle",
        [
            "cifar: each image in the Dataset, 0 workers",
            "cifar: each image in the Dataset, 2 workers",
            "cifar: batches in the Dataset, 0 workers",
            "cifar: batches in the Dataset, 2 workers",
            "cifar: disk tier, batches augmented on this CPU",
            "cifar: disk tier, without augmentation",
        ],
        measures("warm, cifar"),
    ),
    "csv": Fill(
        "idle",
        [
            "faces: pixel strings of a CSV, 0 workers",
            "faces: pixel strings of a CSV, 2 workers",
            "faces: PNG files, 0 workers",
            "faces: PNG files, 2 workers",
            "faces: batches of PNG files, 2 workers",
            "faces: batches of pixels in memory, 0 workers",
            "faces: disk tier, converted once",
        ],
        measures("warm, faces"),
    ),
    "workers": Fill(
        "idle",
        ["0", "1", "2", "4", "8"],
        [
            ("warm, faces", "faces: PNG files, {} workers", "rows/s"),
            ("warm, waiting", "waiting: 1 ms a row, {} workers", "rows/s"),
        ],
    ),
    "prefetch": Fill("idle", ["1", "2", "8", "32"], [("warm, uneven", "uneven: prefetch_factor {}", "x the first")]),
    "beyond-ram": Fill(
        "beyond-ram", ["1.25", "1.6", "2.5", "5"], [("files larger", "{}", column) for column in BEYOND_RAM]
    ),
    "bucket": Fill(
        "bucket",
        [
            "local file, 2 readers",
            *(f"URL, {way} readers" for way in ("0 ms, 64", "30 ms, 8", "30 ms, 64", "100 ms, 64")),
            "mounted, 30 ms, 32 readers",
        ],
        [
            ("samples per second", "{}", "epoch 1, samples/s"),
            ("samples per second", "{}", "epochs 2 to 9, samples/s"),
            ("samples per second", "{}", "CPU us per sample"),
        ],
    ),
    "recsys": Fill(
        "recsys",
        ["feed: toarray, float64 and a cast", "feed: toarray, float32", "feed: fastgpu, disk tier"],
        [("warm, feed", "{}", "rows/s")],
    ),
    "recsys-step": Fill(
        "recsys",
        ["step: dense rows by toarray, float32", "step: fastgpu, disk tier"],
        [("warm, step", "{}", "rows/s"), ("warm, step", "{}", "x the first")],
    ),
    "layouts": Fill(
        "layouts",
        ["chunks of 1 row", "chunks that split rows", "gzip", "lz4", "zstd", "fletcher32"],
        both_sizes("x the first"),
    ),
    "chunk-cache": Fill(
        "loader",
        [
            "h5py, in process",
            "h5py, in process, no cache",
            "h5py, workers",
            "h5py, workers, 1 GiB cache",
            "fastgpu, disk",
        ],
        both_sizes("rows/s"),
    ),
    "echo-digits": echoed("digits, top1 %"),
    "echo-users": echoed("users, NDCG@100"),
}


def fill(page: str) -> str:
    """A page with the newest numbers in its tables and sentences."""

    def filled(found: re.Match[str]) -> str:
        lines = found[3].splitlines()
        cells = FILLS[found[2]].cells()
        own = [line.split(" | ")[: -len(new)] for line, new in zip(lines, cells, strict=True)]
        return found[1] + "".join(f"{' | '.join([*words, *new])} |\n" for words, new in zip(own, cells, strict=True))

    return NUMBERS.sub(filled, page)


def publish() -> dict[Path, str]:
    """{page: its text with the newest results between the markers}"""
    shown = first_screen()
    korean = shown.replace("(bench/", "(../../bench/")
    made = {README: targets(), ROOT / "README.md": shown, ROOT / "docs/ko/README.md": korean}
    pages = {page: MARKERS.sub(lambda _, text=text: text, page.read_text()) for page, text in made.items()}
    pages |= {page: fill(page.read_text()) for page in sorted(PAGES.rglob("*.md"))}
    pages[FAQ] = FAQ.read_text()
    words = gpu_words() | timeline_words() | made_words()
    return {page: fill_words(text, words) for page, text in pages.items()}


if __name__ == "__main__":
    for page, text in publish().items():
        page.write_text(text)
