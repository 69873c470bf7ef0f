"""The results of bench/run.py as tables: medians, spreads, and ratios that are taken round by round."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from contenders import FIXED, MEMCPY, OURS, SEQUENTIAL
from peers import PEERS
from publish import TARGET_COLUMNS, Table, ratios, spread

Results = Mapping[str, Any]
"""Results of one mode on one data set: {contender: {"rounds": [...]} or {"failed": reason}}."""
Values = Sequence[float]
"""One value for each round."""
NOT_MEASURED = "not measured"
MAX_LOAD = 0.87
"""Highest load (demand / supply) that counts for the worst feed ratio: the supply is at least 1.15 x the demand."""


def tables(results: Mapping[str, Any]) -> list[Table]:
    """The targets, then one table for each mode and data set."""
    page = [targets(results)]
    page += [_warm(name, results) for name in results["warm"]]
    page += [_accelerator(name, results) for name in results["accelerator"]]
    page += [_cold(name, results) for name in results["cold"]]
    if results["memory"]:
        page.append(_memory(results["memory"]))
    return page


def targets(results: Mapping[str, Any]) -> Table:
    celeba = results["warm"].get("celeba", {})
    cifar = results["warm"].get("cifar", {})
    cold = results["cold"].get("celeba", {})
    paced = results["accelerator"].get("celeba", {})
    rows = [
        ["CelebA rows, warm: disk tier / best h5py + DataLoader", _against(celeba, _is_h5py), "4x / 6x"],
        [
            "CelebA rows, warm: disk tier / memcpy by as many threads",
            _spread(_ratios(celeba, OURS, MEMCPY), ".2f"),
            "0.75 / 0.9",
        ],
        ["CelebA rows, warm: disk tier / best peer", _against(celeba, _is_peer), "1x / 1.3x"],
        ["CIFAR rows, warm: disk tier / best h5py + DataLoader", _against(cifar, _is_h5py), "8x / 15x"],
        ["CIFAR rows, warm: disk tier / best peer", _against(cifar, _is_peer), "1.2x / 2x"],
        [
            "CelebA rows, cold: disk tier / sequential read",
            _spread(_ratios(cold, OURS, SEQUENTIAL), ".2f"),
            "0.8 / 0.95",
        ],
        ["CelebA rows, cold: disk tier / best peer", _against(cold, _is_peer), "1.2x / 1.5x"],
        ["worst feed ratio where supply >= 1.15 x demand", _worst_feed_ratio(paced), "0.99 / 0.995"],
        ["host memory of the disk tier beyond its buffers", _worst_memory(results["memory"]), "< 100 MB"],
    ]
    return Table("targets", TARGET_COLUMNS, rows)


def _warm(name: str, results: Mapping[str, Any]) -> Table:
    data = results["data"][name]
    contenders = results["warm"][name]
    shape = "x".join(map(str, data["shape"]))
    note = (
        f"Batches of {data['batch_size']} rows in host memory, full epochs. Worker processes, and threads of the "
        f"peers: {results['workers']}; reader threads, and threads of the limits: {results['readers']}; the threads of "
        "torch are left at their default. Every contender may use every core. CPU time and memory are those of the "
        "process and its children; memory does not include pages of mapped files. The h5py contenders have the labels "
        "in memory."
    )
    rows = []
    for contender, result in contenders.items():
        if "failed" in result:
            rows.append([contender, result["failed"], *[""] * 5])
            continue
        cpu_s = median(1000 * each["cpu_s"] / each["rows"] for each in result["rounds"])
        memory_gb = median(each["memory_bytes"] for each in result["rounds"]) / 1e9
        against_h5py = _ratios(contenders, contender, _best(contenders, _is_h5py))
        against_memcpy = _ratios(contenders, contender, MEMCPY)
        cells = [f"{cpu_s:.3f}", f"{memory_gb:.2f}", _spread(against_h5py, ".2f"), _spread(against_memcpy, ".2f")]
        rows.append([contender, *_speed_cells(contenders, contender, data), *cells])
    columns = ["contender", "rows/s", "GB/s", "CPU s / 1000 rows", "memory, GB", "/ best h5py", "/ memcpy limit"]
    return Table(f"warm, {name}: {data['n_rows']:,} rows of {shape} uint8", columns, rows, note)


def _accelerator(name: str, results: Mapping[str, Any]) -> Table:
    data = results["data"][name]
    contenders = results["accelerator"][name]
    loads = _loads(contenders)
    rows = []
    for contender, result in contenders.items():
        if "failed" in result:
            rows.append([contender, result["failed"], *[""] * (len(loads) - 1)])
        else:
            rows.append([contender, *(_spread(_feed_ratios(contenders, contender, load), ".3f") for load in loads)])
    note = (
        "Feed ratio: rows/s of a contender / rows/s of the fixed batch, in front of a device that is busy for some "
        f"time with each batch of {data['batch_size']} rows and takes no CPU time. Columns: demand of the device / "
        "supply of our disk tier, which is measured at the start of the same round; 0.87 means a supply of 1.15 x the "
        "demand."
    )
    return Table(f"accelerator, {name}: feed ratio", ["contender", *loads], rows, note)


def _cold(name: str, results: Mapping[str, Any]) -> Table:
    data = results["data"][name]
    contenders = results["cold"][name]
    rows = []
    for contender, result in contenders.items():
        if "failed" in result:
            rows.append([contender, result["failed"], *[""] * 3])
            continue
        against_sequential = _spread(_ratios(contenders, contender, SEQUENTIAL), ".2f")
        cached_pct = 100 * max(each["cached"] for each in result["rounds"])
        rows.append([contender, *_speed_cells(contenders, contender, data), against_sequential, f"{cached_pct:.1f} %"])
    note = (
        "One epoch in a new process, after its files were evicted from the page cache; worker processes: "
        f"{results['workers']}, reader threads: {results['readers']}. Below a virtual machine, the host may still hold "
        "parts of the file, for the sequential read as well."
    )
    columns = ["contender", "rows/s", "GB/s", "/ sequential read", "still cached before, maximum"]
    return Table(f"cold, {name}", columns, rows, note)


def _memory(by_data: Mapping[str, Any]) -> Table:
    n_epochs: list[str] = next((list(result["epochs"]) for result in by_data.values() if "epochs" in result), [])
    rows = []
    for name, result in by_data.items():
        if "failed" in result:
            rows.append([name, result["failed"], *[""] * (1 + len(n_epochs))])
        else:
            sizes = (result["imports"], result["buffers"], *_beyond_bytes(result))
            rows.append([name, *(f"{n_bytes / 1e6:.0f}" for n_bytes in sizes)])
    note = (
        "MB of anonymous and shared memory of the process of the disk tier. Beyond: neither imports nor buffers. It is "
        "negative where an epoch has so few pools that one slot only ever holds the short last pool, so that its other "
        "pages are never touched."
    )
    columns = ["data", "after imports", "size of the buffers", *(f"beyond, {n} epochs" for n in n_epochs)]
    return Table("memory of the disk tier", columns, rows, note)


def _beyond_bytes(result: Mapping[str, Any]) -> list[float]:
    """Memory beyond imports and buffers, after each number of epochs."""
    return [n_bytes - result["imports"] - result["buffers"] for n_bytes in result["epochs"].values()]


def _worst_memory(by_data: Mapping[str, Any]) -> str:
    beyond: list[float] = []
    for result in by_data.values():
        if "epochs" in result:
            beyond += _beyond_bytes(result)
    return f"{max(beyond) / 1e6:.0f} MB" if beyond else NOT_MEASURED


def _worst_feed_ratio(contenders: Results) -> str:
    """The lowest median over the rounds, among the loads up to MAX_LOAD."""
    by_load = [_feed_ratios(contenders, OURS, load) for load in _loads(contenders) if float(load) <= MAX_LOAD]
    return _spread(min(filter(None, by_load), key=median, default=()), ".3f")


def _loads(contenders: Results) -> list[str]:
    """The loads at which both our disk tier and the fixed batch were measured."""
    if not _rounds(contenders, OURS) or not _rounds(contenders, FIXED):
        return []
    return [load for load in _rounds(contenders, OURS)[0] if load != "supply"]


def _feed_ratios(contenders: Results, contender: str, load: str) -> Values:
    """One ratio for each round in which both were measured. A contender that failed has none."""
    pairs = zip(_rounds(contenders, contender), _rounds(contenders, FIXED), strict=False)
    return [speeds[load] / fixed[load] for speeds, fixed in pairs if load in speeds and load in fixed]


def _rounds(contenders: Results, contender: str) -> list[dict[str, float]]:
    """The rounds of a contender: none if it did not take part or failed."""
    return contenders.get(contender, {}).get("rounds", [])


def _speeds(contenders: Results, contender: str) -> Values:
    """Bytes per second in each round."""
    return [result["bytes_per_s"] for result in _rounds(contenders, contender)]


def _speed_cells(contenders: Results, contender: str, data: Mapping[str, Any]) -> list[str]:
    """The cells of rows/s and GB/s."""
    speeds = _speeds(contenders, contender)
    return [_spread([speed / data["row_bytes"] for speed in speeds], ",.0f"), f"{median(speeds) / 1e9:.2f}"]


def _best(contenders: Results, belongs: Callable[[str], bool]) -> str | None:
    """The contender of a kind with the highest median speed."""
    names = [name for name in contenders if belongs(name) and _speeds(contenders, name)]
    return max(names, key=lambda name: median(_speeds(contenders, name)), default=None)


def _is_h5py(name: str) -> bool:
    return name.startswith("h5py")


def _is_peer(name: str) -> bool:
    return name in PEERS


def _ratios(contenders: Results, contender: str, other: str | None) -> Values:
    """Speed of one contender / speed of another in each round; empty if one of them was not measured."""
    speeds = _speeds(contenders, contender)
    other_speeds = _speeds(contenders, other) if other else []
    return ratios(speeds, other_speeds) if speeds and other_speeds else []


def _against(contenders: Results, belongs: Callable[[str], bool]) -> str:
    """Our disk tier against the fastest contender of a kind, with its name."""
    other = _best(contenders, belongs)
    times_faster = _ratios(contenders, OURS, other)
    return f"{_spread(times_faster, '.2f', 'x')} ({other})" if times_faster else NOT_MEASURED


def _spread(values: Values, form: str, unit: str = "") -> str:
    """`publish.spread` of what may not have been measured."""
    return spread(values, form, unit) if values else NOT_MEASURED
