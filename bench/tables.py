"""What bench/run.py found, as tables: medians, spreads, and ratios that were taken round by round."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from contenders import FIXED, MEMCPY, OURS, SEQUENTIAL
from peers import PEERS
from report import Table

Found = Mapping[str, Any]  # of one mode and data set: contender -> {"rounds": [...]} or {"failed": why}
Values = Sequence[float]  # one of each round
NONE = "not measured"


def tables(found: Mapping[str, Any]) -> list[Table]:
    result = [targets(found)]
    workers, readers = found["workers"], found["readers"]
    for name, of in found["warm"].items():
        result.append(_warm(name, of, found["data"][name], workers, readers))
    for name, of in found["accelerator"].items():
        result.append(_accelerator(name, of, found["data"][name]))
    for name, of in found["cold"].items():
        result.append(_cold(name, of, found["data"][name], workers, readers))
    if found["memory"]:
        result.append(_memory(found["memory"]))
    return result


def targets(found: Mapping[str, Any]) -> Table:
    celeba, cifar = found["warm"].get("celeba", {}), found["warm"].get("cifar", {})
    cold, paced = found["cold"].get("celeba", {}), found["accelerator"].get("celeba", {})
    rows = [
        [
            "CelebA rows, warm: disk tier / best h5py + DataLoader",
            _against(
                celeba,
                _is_h5py,
            ),
            "4x / 6x",
        ],
        [
            "CelebA rows, warm: disk tier / memcpy by as many threads",
            _spread(_ratios(celeba, OURS, MEMCPY), ".2f"),
            "0.75 / 0.9",
        ],
        [
            "CelebA rows, warm: disk tier / best peer",
            _against(
                celeba,
                PEERS.__contains__,
            ),
            "1x / 1.3x",
        ],
        [
            "CIFAR rows, warm: disk tier / best h5py + DataLoader",
            _against(
                cifar,
                _is_h5py,
            ),
            "8x / 15x",
        ],
        [
            "CIFAR rows, warm: disk tier / best peer",
            _against(
                cifar,
                PEERS.__contains__,
            ),
            "1.2x / 2x",
        ],
        [
            "CelebA rows, cold: disk tier / sequential read",
            _spread(_ratios(cold, OURS, SEQUENTIAL), ".2f"),
            "0.8 / 0.95",
        ],
        [
            "CelebA rows, cold: disk tier / best peer",
            _against(
                cold,
                PEERS.__contains__,
            ),
            "1.2x / 1.5x",
        ],
        ["worst feed ratio where supply >= 1.15 x demand", _worst_feed_ratio(paced), "0.99 / 0.995"],
        ["host memory of the disk tier beyond its buffers", _worst_memory(found["memory"]), "< 100 MB"],
    ]
    return Table("targets", ["what", "measured", "must / aim"], rows)


def _warm(name: str, found: Found, data: Mapping[str, Any], workers: int, readers: int) -> Table:
    shape = "x".join(map(str, data["shape"]))
    note = (
        f"Batches of {data['batch_rows']} rows in host memory, full epochs. Worker processes, and the peers' threads: "
        f"{workers}; reader threads, and the limits' threads: {readers}; torch's threads are left as they are. Every "
        "contender may use every core. CPU time and memory are those of the process and its children; memory without "
        "pages of mapped files. The labels of the h5py contenders are in memory."
    )
    rows = []
    for contender, got in found.items():
        if "failed" in got:
            rows.append([contender, got["failed"], *[""] * 5])
            continue
        rounds = got["rounds"]
        rows.append(
            [
                contender,
                *_speed_cells(found, contender, data),
                f"{median(1000 * each['cpu_s'] / each['rows'] for each in rounds):.3f}",
                f"{median(each['memory_bytes'] for each in rounds) / 1e9:.2f}",
                _spread(_ratios(found, contender, _best(found, _is_h5py)), ".2f"),
                _spread(_ratios(found, contender, MEMCPY), ".2f"),
            ]
        )
    columns = ["contender", "rows/s", "GB/s", "CPU s / 1000 rows", "memory, GB", "/ best h5py", "/ memcpy limit"]
    return Table(f"warm, {name}: {data['rows']:,} rows of {shape} uint8", columns, rows, note)


def _accelerator(name: str, found: Found, data: Mapping[str, Any]) -> Table:
    loads = _loads(found)
    rows = []
    for contender, got in found.items():
        if "failed" in got:
            rows.append([contender, got["failed"], *[""] * (len(loads) - 1)])
        else:
            rows.append([contender, *(_spread(_feed_ratios(found, contender, load), ".3f") for load in loads)])
    note = (
        f"Feed ratio: rows/s of a contender / rows/s of the fixed batch, in front of a device that is busy for T ms "
        f"with each batch of {data['batch_rows']} rows and takes no CPU time. Columns: the device's demand over the "
        "supply of our disk tier, measured at the start of the same round; 0.87 is a supply of 1.15 x demand."
    )
    return Table(f"accelerator, {name}: feed ratio", ["contender", *loads], rows, note)


def _cold(name: str, found: Found, data: Mapping[str, Any], workers: int, readers: int) -> Table:
    rows = []
    for contender, got in found.items():
        if "failed" in got:
            rows.append([contender, got["failed"], *[""] * 3])
            continue
        rows.append(
            [
                contender,
                *_speed_cells(found, contender, data),
                _spread(_ratios(found, contender, SEQUENTIAL), ".2f"),
                f"{100 * max(each['cached'] for each in got['rounds']):.1f} %",
            ]
        )
    note = (
        f"One epoch in a fresh process, after its files were evicted from the page cache; workers {workers}, reader "
        f"threads {readers}. Below a virtual machine, the host may still hold some of the file: "
        "it does so for the sequential read as well."
    )
    columns = ["contender", "rows/s", "GB/s", "/ sequential read", "still cached before, at most"]
    return Table(f"cold, {name}", columns, rows, note)


def _memory(found: Mapping[str, Any]) -> Table:
    rows, epochs = [], next((list(got["epochs"]) for got in found.values() if "epochs" in got), [])
    for name, got in found.items():
        if "failed" in got:
            rows.append([name, got["failed"], *[""] * (1 + len(epochs))])
        else:
            rows.append(
                [name, *(f"{each / 1e6:.0f}" for each in (got["imports"], got["buffers"], *_beyond_bytes(got)))]
            )
    note = (
        "MB of anonymous and shared memory of the disk tier's process. Beyond: what is neither imports nor buffers; "
        "less than nothing where an epoch has so few pools that one slot only ever holds the short last one, and its "
        "other pages are never touched."
    )
    columns = ["data", "after imports", "buffers asked for", *(f"beyond, {n} epochs" for n in epochs)]
    return Table("memory of the disk tier", columns, rows, note)


def _beyond_bytes(got: Mapping[str, Any]) -> list[float]:
    return [each - got["imports"] - got["buffers"] for each in got["epochs"].values()]


def _worst_memory(found: Mapping[str, Any]) -> str:
    beyond = [each for got in found.values() if "epochs" in got for each in _beyond_bytes(got)]
    return f"{max(beyond) / 1e6:.0f} MB" if beyond else NONE


def _worst_feed_ratio(found: Found) -> str:
    """The lowest of the medians over the rounds, of all loads that leave the supply its margin."""
    loads = [load for load in _loads(found) if float(load) <= 0.87]
    points = [ratios for load in loads if (ratios := _feed_ratios(found, OURS, load))]
    return _spread(min(points, key=median), ".3f") if points else NONE


def _loads(found: Found) -> list[str]:
    """Those at which our disk tier and the fixed batch were measured."""
    both = [*zip(_rounds(found, OURS), _rounds(found, FIXED), strict=False)]
    return [load for load in both[0][0] if load != "supply"] if both else []


def _feed_ratios(found: Found, contender: str, load: str) -> Values:
    """One of each round that has both; a contender that failed has none."""
    pairs = zip(_rounds(found, contender), _rounds(found, FIXED), strict=False)
    return [one[load] / fixed[load] for one, fixed in pairs if load in one and load in fixed]


def _rounds(found: Found, contender: str) -> list[dict[str, float]]:
    """Empty if it did not take part or has failed."""
    return found.get(contender, {}).get("rounds", [])


def _speeds(found: Found, contender: str) -> Values:
    return [each["bytes_per_s"] for each in _rounds(found, contender)]


def _speed_cells(found: Found, contender: str, data: Mapping[str, Any]) -> list[str]:
    speeds = _speeds(found, contender)
    return [_spread([each / data["row_bytes"] for each in speeds], ",.0f"), f"{median(speeds) / 1e9:.2f}"]


def _best(found: Found, belongs: Callable[[str], bool]) -> str | None:
    """The fastest of a kind, by its median."""
    return max(
        (name for name in found if belongs(name) and _speeds(found, name)),
        key=lambda name: median(_speeds(found, name)),
        default=None,
    )


def _is_h5py(name: str) -> bool:
    return name.startswith("h5py")


def _ratios(found: Found, one: str, other: str | None) -> Values:
    """Of two contenders, round by round; empty if one of them was not measured."""
    speeds = _speeds(found, one), _speeds(found, other) if other else []
    return [a / b for a, b in zip(*speeds, strict=True)] if all(speeds) else []


def _against(found: Found, belongs: Callable[[str], bool]) -> str:
    """Our disk tier against the fastest of a kind, which is named."""
    other = _best(found, belongs)
    ratios = _ratios(found, OURS, other)
    return f"{_spread(ratios, '.2f', 'x')} ({other})" if ratios else NONE


def _spread(values: Values, form: str, unit: str = "") -> str:
    """median [min-max]"""
    if not values:
        return NONE
    return f"{median(values):{form}}{unit} [{min(values):{form}}-{max(values):{form}}]"
