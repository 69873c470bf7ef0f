"""The results of bench/run.py as tables: medians, spreads, and ratios that are taken round by round."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import jpegs
import ours
import recsys
import windows
from contenders import MEMCPY, OURS
from peers import FIXED, PEERS
from publish import NOT_MEASURED, TARGET_COLUMNS, Table, spread

Results = Mapping[str, list[dict[str, float]] | str]
"""{contender: results of worker.run, or why it failed}"""
SEQUENTIAL = "sequential read"
MAX_LOAD = 0.87
"""Highest load (demand / supply) that counts for the worst feed ratio: the supply is at least 1.15 x the demand."""


def tables(suite: str, results: Mapping[str, Any]) -> list[Table]:
    """The targets of a suite, then one table for each mode and data set."""
    page = [Table("targets", TARGET_COLUMNS, TARGETS[suite](results))] if suite in TARGETS else []
    warm = _windows if suite == "windows" else _speeds
    for mode, make in {"warm": warm, "accelerator": _accelerator, "cold": _speeds}.items():
        for name, measured in results[mode].items():
            table = make(mode, results["data"][name], measured)
            page.append(table._replace(note=f"{table.note} {DIFFERENCES.get(suite, '')}".rstrip()))
    return page


def loader_targets(results: Mapping[str, Any]) -> list[list[str]]:
    celeba, cifar = (results["warm"].get(name, {}) for name in ("celeba", "cifar"))
    cold = results["cold"].get("celeba", {})
    memcpy = spread(compare(celeba, OURS, MEMCPY), ".2f")
    sequential = spread(compare(cold, OURS, SEQUENTIAL), ".2f")
    return [
        ["CelebA rows, warm: disk tier / best h5py + DataLoader", against(celeba, OURS, "h5py"), "1.5x / 2x"],
        ["CelebA rows, warm: disk tier / best DataLoader of rows in RAM", against(celeba, OURS, "RAM"), "1x / 1.3x"],
        ["CelebA rows, warm: disk tier / memcpy by as many threads", memcpy, "0.75 / 0.9"],
        ["CelebA rows, warm: disk tier / best peer", against(celeba, OURS, *PEERS), "1x / 1.3x"],
        ["CIFAR rows, warm: disk tier / best h5py + DataLoader", against(cifar, OURS, "h5py"), "8x / 15x"],
        ["CIFAR rows, warm: disk tier / best DataLoader of rows in RAM", against(cifar, OURS, "RAM"), "1x / 2x"],
        ["CIFAR rows, warm: disk tier / best peer", against(cifar, OURS, *PEERS), "1.2x / 2x"],
        ["CelebA rows, cold: disk tier / sequential read", sequential, "0.8 / 0.95"],
        ["CelebA rows, cold: disk tier / best peer", against(cold, OURS, *PEERS), "1.2x / 1.5x"],
        worst_feed_ratio(results, OURS),
    ]


def encoded_targets(results: Mapping[str, Any]) -> list[list[str]]:
    large, small = (results["warm"].get(name, {}) for name in ("500x375", "256x256"))

    def ratio(warm: Results, name: str) -> str:
        return spread(compare(warm, jpegs.OURS, name), ".2f")

    converted = spread(compare(large, jpegs.CONVERT, jpegs.CENTRE), ".2f")
    costs = spread(ratios(cpu_us(large, jpegs.OURS), cpu_us(large, jpegs.FFCV)), ".2f")
    parts = "JPEG of 500 x 375 to random parts: "
    whole = "JPEG of 256 x 256, whole: "
    return [
        [parts + "feed / DataLoader + Pillow", ratio(large, jpegs.PILLOW), "3 / 5"],
        [parts + "feed / best DataLoader", against(large, jpegs.OURS, "DataLoader"), "1 / 1.3"],
        [parts + "feed / best peer", against(large, jpegs.OURS, *jpegs.PEERS), "1 / 1.3"],
        [parts + "feed / FFCV, half of the images as pixels", ratio(large, jpegs.HALF_RAW), ""],
        [parts + "feed / decoder and resize in bare threads", ratio(large, jpegs.BARE), "0.9 / 0.97"],
        [parts + "CPU time of the feed / FFCV", costs, "<= 1 / 0.8"],
        worst_feed_ratio(results, jpegs.OURS),
        [whole + "feed / best peer", against(small, jpegs.OURS, *jpegs.PEERS), "0.95 / 1.2"],
        [whole + "feed / decoder in bare threads", ratio(small, jpegs.BARE), "0.97"],
        ["JPEG files converted / decoded by Pillow in bare threads", converted, "0.9"],
    ]


def recsys_targets(results: Mapping[str, Any]) -> list[list[str]]:
    feed, step = (results["warm"].get(name, {}) for name in ("feed", "step"))
    faster = spread(compare(feed, recsys.OURS, recsys.TOARRAY), ".0f", "x")
    ms = spread([1000 * 500 / rate for rate in speeds(feed, recsys.OURS)], ".2f", " ms")
    steps = spread(compare(step, recsys.SPARSE_STEP, recsys.DENSE_STEP), ".2f", "x")
    return [
        ["500 users, feed: toarray float32 / disk tier, warm", faster, "20x"],
        ["500 users, feed: disk tier, warm", ms, "<= 1 ms"],
        ["Mult-VAE, whole step on a CPU: dense / disk tier", steps, "1.8x"],
    ]


def windows_targets(results: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for size, most in (("4 KiB", "1.7x"), ("1 MiB", "1.2x")):
        warm = results["warm"].get(size, {})
        for name in (windows.OURS, windows.OVERLAPPING):
            costs = spread(ratios(cpu_us(warm, name), cpu_us(warm, windows.ROWS)), ".2f", "x")
            rows.append([f"{size}, CPU time: {name} / {windows.ROWS}", costs, f"<= {most}"])
    small = results["warm"].get("4 KiB", {})
    saved = spread(ratios(cpu_us(small, windows.SLICES), cpu_us(small, windows.OURS)), ".1f", "x")
    rows.append([f"4 KiB, CPU time: {windows.SLICES} / {windows.OURS}", saved, "20x"])
    for size in ("4 KiB", "1 MiB"):
        faster = spread(compare(results["warm"].get(size, {}), windows.OURS, windows.OPEN), ".2f", "x")
        rows.append([f"{size}, speed: {windows.OURS} / {windows.OPEN}", faster, "1x"])
    return rows


TARGETS = {
    "loader": loader_targets,
    "encoded": encoded_targets,
    "recsys": recsys_targets,
    "windows": windows_targets,
}
DIFFERENCES = {
    "loader": (
        "Order: this project reads blocks of 2 MiB in random order and shuffles the rows of a pool of batches; FFCV "
        "with QUASI_RANDOM mixes the rows of some pages of 8 MiB; LitData shuffles chunks of 64 MB, and within a chunk "
        "blocks of 256 rows; all others shuffle fully. Memory: RAM, and the host and device tiers of this project, "
        "keep all rows in the memory of the process; DALI, SPDL and Grain gather rows from a memory-mapped array; FFCV "
        "(but for its own cache), LitData and Streaming map their files. The column MiB has no page cache, but Python "
        "and torch. The plain file is in one piece, as h5py writes by default; other h5py contenders read the file of "
        "convert.py, in blocks of 2 MiB."
    ),
    "encoded": (
        "Random parts of JPEG files, 8 to 100 % of the area, become 224 x 224 pixels; those of 256 x 256 are taken "
        "whole. Pixels: FFCV decodes JPEG that it has encoded again with quality 92; all others decode the bytes of "
        "the files. In half JPEG, FFCV stores half of the images as pixels, which takes about three times the disk. "
        "Resize: this project, simplejpeg, SPDL, Grain, LitData and Streaming by torch with antialiasing, DALI by its "
        "triangular filter, timm and DataLoader + Pillow by Pillow, FFCV by OpenCV (INTER_AREA). Order: this project "
        "reads blocks in random order and shuffles the images of one batch; FFCV with QUASI_RANDOM mixes the images of "
        "some pages of 8 MiB; LitData shuffles chunks of 64 MB, and within a chunk blocks of 256 images; all others "
        "shuffle fully."
    ),
    "idle": (
        "Order: this project shuffles rows in pools of batches, all others shuffle fully. Pixels: each image in the "
        "Dataset becomes float32; the disk tier delivers uint8, and a GPU would convert them. Rows: `each image`, "
        "`batches` and the pixel strings are in memory; PNG files and the disk tier are read from the page cache."
    ),
    "recsys": (
        "Order: this project shuffles rows in pools of batches, `toarray` shuffles fully. Memory: `toarray` keeps the "
        "matrix in the memory of the process, and the disk tier reads it from the page cache. Values: `toarray` makes "
        "dense float32 rows, and this project delivers the numbers of the items."
    ),
    "windows": (
        "Order: this project shuffles windows in pools of batches, all others shuffle fully. Windows with a stride of "
        "1 overlap, and begin at any step."
    ),
}
"""{suite: what differs between its contenders}, below its tables"""


def _speeds(mode: str, data: Mapping[str, Any], contenders: Results) -> Table:
    first = next(iter(contenders))
    rows = []
    for name, rounds in contenders.items():
        times = spread(compare(contenders, name, first), ",.2f")
        cells = [spread(speeds(contenders, name), ",.0f"), times, spread(cpu_us(contenders, name), ",.1f")]
        taken = [each["memory_bytes"] / (1 << 20) for each in rounds_of(contenders, name) if "memory_bytes" in each]
        cells.append(f"{median(taken):,.0f}" if taken else "")
        rows.append([name, *([rounds, "", "", ""] if isinstance(rounds, str) else cells)])
    note = (
        f"Batches of {data['batch_size']} rows in host memory. Where a name says nothing else, {ours.CPUS} worker "
        f"processes or threads of a peer, {ours.READERS} reader threads and threads of the limits. Every contender may "
        "use every core. CPU time and memory are those of the process and its children; memory without the page cache."
    )
    if mode == "cold":
        cached = max(each["cached"] for name in contenders for each in rounds_of(contenders, name))
        note += (
            " One epoch in a new process, after its files were evicted from the page cache: at most "
            f"{100 * cached:.1f} % of them stayed. Below a virtual machine, the host may still hold parts of the file, "
            "for the sequential read as well."
        )
    title = f"{mode}, {data['name']}: {data['n_rows']:,} rows of {' x '.join(map(str, data['shape']))}"
    return Table(title, ["contender", "rows/s", "x the first", "CPU us a row", "MiB"], rows, note)


def _windows(mode: str, data: Mapping[str, Any], contenders: Results) -> Table:
    mib = windows.N_BYTES[data["name"]] / (1 << 20)
    rows = []
    for name, rounds in contenders.items():
        rates = spread([mib * rate for rate in speeds(contenders, name)], ",.0f")
        times = spread(compare(contenders, name, windows.OURS), ",.2f")
        cells = [rates, times, spread(cpu_us(contenders, name), ",.1f")]
        rows.append([name, *([rounds, "", ""] if isinstance(rounds, str) else cells)])
    note = (
        f"Batches of {data['batch_size']} windows in host memory, from {data['n_rows']:,} that do not overlap, in the "
        f"page cache. {ours.CPUS} worker processes or {ours.READERS} reader threads; a memmap is copied in the loop, "
        "which does nothing else. CPU time is that of all threads and processes."
    )
    return Table(
        f"{mode}, windows of {data['name']}", ["contender", "MiB/s", "x the first", "CPU us a window"], rows, note
    )


def _accelerator(mode: str, data: Mapping[str, Any], by_load: Mapping[str, Results]) -> Table:
    names = next(iter(by_load.values()))
    rows = [[name, *(spread(compare(each, name, FIXED), ".3f") for each in by_load.values())] for name in names]
    note = (
        "Feed ratio: rows/s of a contender / rows/s of the fixed batch, in front of a device that is busy for some "
        f"time with each batch of {data['batch_size']} rows and takes no CPU time. Columns: demand of the device / "
        "supply of our disk tier, which is measured just before; 0.87 means a supply of 1.15 x the demand."
    )
    return Table(f"{mode}, {data['name']}: feed ratio", ["contender", *by_load], rows, note)


def rounds_of(contenders: Results, name: str | None) -> list[dict[str, float]]:
    """The rounds of a contender; none if it did not take part or failed."""
    rounds = contenders.get(name or "", [])
    return [] if isinstance(rounds, str) else rounds


def speeds(contenders: Results, name: str | None) -> list[float]:
    """Rows per second in each round."""
    return [each["rows"] / each["seconds"] for each in rounds_of(contenders, name)]


def cpu_us(contenders: Results, name: str) -> list[float]:
    """CPU microseconds for each row in each round."""
    return [1e6 * each["cpu_s"] / each["rows"] for each in rounds_of(contenders, name)]


def compare(contenders: Results, name: str, other: str | None) -> list[float]:
    """Speed of one contender / speed of another in each round; none if one of them was not measured."""
    return ratios(speeds(contenders, name), speeds(contenders, other))


def ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    """The ratio in each round; none if one of the two was not measured."""
    return [a / b for a, b in zip(values, others, strict=True)] if values and others else []


def against(contenders: Results, name: str, *kinds: str) -> str:
    """A contender against the fastest of those whose names begin with a kind. It is named."""
    others = [other for other in contenders if other.startswith(kinds) and speeds(contenders, other)]
    best = max(others, key=lambda other: median(speeds(contenders, other)), default=None)
    return f"{spread(compare(contenders, name, best), '.2f', 'x')} ({best})" if best else NOT_MEASURED


def worst_feed_ratio(results: Mapping[str, Any], name: str) -> list[str]:
    """The feed ratio at the worst of the loads that count."""
    by_load = next(iter(results["accelerator"].values()), {})
    counted = [compare(each, name, FIXED) for load, each in by_load.items() if float(load) <= MAX_LOAD]
    worst = spread(min(filter(None, counted), key=median, default=[]), ".3f")
    return ["worst feed ratio where supply >= 1.15 x demand", worst, "0.99 / 0.995"]
