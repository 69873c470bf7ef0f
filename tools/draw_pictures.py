"""Draw the pictures of the pages, as SVG that can be read on light and on dark: `make pictures`.

What was measured comes from bench/results/*.json and docs/pictures/timeline.json (made by bench/timeline.py), with its
date and machine below it. The way of a sample and the picture of echo are drawings.
"""

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from facts import PROJECT, ROOT
from matplotlib.axes import Axes

sys.path.insert(0, str(ROOT / "bench"))
import publish
from peers import PEERS

TEXT = "#768390"
"""A grey that is readable on white and on black."""
OURS, OTHERS, PALE = "#2f81f7", "#d29922", "#76839040"
IN_BOX = "#0d1117"
"""Text on either colour."""
PICTURES = ROOT / "docs" / "pictures"
STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pictures",  # the same file each time
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": TEXT,
    "axes.edgecolor": TEXT,
    "axes.labelcolor": TEXT,
    "axes.titlecolor": TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}


def source_of(result: dict[str, Any]) -> str:
    """Where and when something was measured."""
    machine = result["machine"]
    parts = [f"{machine['cores']} cores", machine["cpu"], f"GPU: {machine['gpu']}", f"torch {machine['torch']}"]
    return ", ".join([*parts, machine["date"][:10]])


def save(name: str, figure: plt.Figure, folder: Path = PICTURES) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.svg", transparent=True, metadata={"Date": None}, bbox_inches="tight")
    plt.close(figure)


# ---------------------------------------------------------------------------------------------- what was measured


def draw_bars(axes: Axes, title: str, speeds: dict[str, list[float]]) -> None:
    """Median samples/s of each contender, the fastest on top, with the lowest and the highest of its rounds."""
    order = sorted(speeds, key=lambda name: median(speeds[name]))
    for place, name in enumerate(order):
        values = speeds[name]
        middle = median(values)
        axes.barh(place, middle, color=OURS if name.startswith("this project") else OTHERS, height=0.65)
        axes.plot([min(values), max(values)], [place, place], color=TEXT, linewidth=2)
        beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
        axes.annotate(f"{middle:,.0f}", (max(values), place), **beside)
    axes.set_yticks(range(len(order)), order)
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, 1.2 * max(map(max, speeds.values())))


def draw_peers() -> None:
    """Samples/s of this project, DataLoaders and peers, each in the fastest of its ways."""
    rows = {
        "this project": ("fastgpu, disk",),
        "DataLoader over h5py": ("h5py",),
        "DataLoader over RAM": ("RAM",),
        **{name: (first,) for first, name in PEERS.items()},
    }
    files = {
        "this project": ("fastgpu, JPEG",),
        "DataLoader, Pillow": ("DataLoader + Pillow", "DataLoader of batches + Pillow"),
        "DataLoader, simplejpeg": ("DataLoader + simplejpeg", "DataLoader of batches + simplejpeg"),
        **{name: (f"{first}, JPEG",) for first, name in PEERS.items()},
    }
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.4), constrained_layout=True)
    panels = [
        ("loader", "celeba", rows, "images/s: rows of 3 x 218 x 178 bytes, page cache"),
        ("encoded", "500x375", files, "images/s: JPEG of 500 x 375, random crops to 224 x 224"),
    ]
    for panel, (what, case, names, title) in zip(axes, panels, strict=True):
        ((result, _),) = publish.newest(what)
        fastest = {name: publish.speeds(result, case, ways) for name, ways in names.items()}
        draw_bars(panel, title, {name: rates for name, rates in fastest.items() if rates})
        panel.set_xlabel(source_of(result), fontsize=8, loc="left")
    save("peers", figure)


def draw_timeline() -> None:
    """Who works and who waits in front of a simulated device, with a plain DataLoader and with this project."""
    result = json.loads((PICTURES / "timeline.json").read_text())
    figure, axes = plt.subplots(2, 1, figsize=(10, 3.3), sharex=True, constrained_layout=True)
    titles = {"usual": "h5py in a Dataset, DataLoader with 2 workers", "ours": "this project, 2 reader threads"}
    for panel, (key, title) in zip(axes, titles.items(), strict=True):
        intervals = result[key]
        workers = sorted({who for who, _, _ in intervals if who != "device"})
        busy_ms = sum(stop - start for who, start, stop in intervals if who == "device")
        for place, who in enumerate([*reversed(workers), "device"]):
            spans = [(start, stop - start) for each, start, stop in intervals if each == who]
            panel.broken_barh([(0, result["span_ms"])], (place - 0.36, 0.72), color=PALE, linewidth=0)
            color = OURS if who == "device" else OTHERS
            panel.broken_barh(spans, (place - 0.36, 0.72), facecolor=color, edgecolor="none")
        panel.set_yticks(range(len(workers) + 1), [*reversed(workers), "simulated device"])
        share = 100 * busy_ms / result["span_ms"]
        panel.set_title(f"{title}: the simulated device works {share:.0f} % of the time", loc="left", fontsize=11)
        panel.set_xlim(0, result["span_ms"])
    step = f"milliseconds. Not a GPU: each step of the simulated device sleeps for {result['step_ms']:g} ms."
    axes[1].set_xlabel(step, fontsize=11, loc="left")
    figure.text(0, -0.06, f"Batches of {result['rows']}, page cache; {source_of(result)}", fontsize=8)
    save("timeline", figure)


# ---------------------------------------------------------------------------------------------- drawings


def box(axes: Axes, corner: tuple[float, float], width: float, text: str, *, color: str) -> None:
    """A box of the height 0.8 and its text. corner: the lower left one."""
    x, y = corner
    axes.add_patch(plt.Rectangle(corner, width, 0.8, facecolor=color, edgecolor=TEXT, linewidth=0.8))
    axes.text(x + width / 2, y + 0.4, text, ha="center", va="center", fontsize=9, color=IN_BOX)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], text: str = "") -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": TEXT})
    axes.text((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 + 0.1, text, ha="center", va="bottom", fontsize=8)


def canvas(width: float, height: float) -> tuple[plt.Figure, Axes]:
    figure, axes = plt.subplots(figsize=(width, height))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def draw_way() -> None:
    """The way of a sample from the disk to a batch, on each of the three tiers."""
    figure, axes = canvas(10, 3.4)
    stages = ["disk", "page cache", "pinned memory", "GPU memory", "batch"]
    width = 1.1
    lefts = [0.9 + 1.95 * number for number in range(len(stages))]
    for left, stage in zip(lefts, stages, strict=True):
        axes.text(left + width / 2, 3.2, stage, ha="center", fontsize=9, weight="bold")
    rows = {
        "disk": {0: "HDF5 chunks", 1: "file pages", 2: "pool", 3: "pool", 4: "rows"},
        "host": {2: "all rows,\na pool", 3: "pool", 4: "rows"},
        "device": {3: "all rows,\na pool", 4: "rows"},
    }
    labels = {
        "disk": {0: "read\nahead", 1: "reader\nthreads", 2: "copy\nstream", 3: "view"},
        "host": {2: "copy\nstream", 3: "view"},
        "device": {3: "view"},
    }
    for line, tier in enumerate(rows):
        y = 2.2 - 1.05 * line
        axes.text(0, y + 0.4, f"{tier} tier", va="center", fontsize=9)
        for stage, text in rows[tier].items():
            box(axes, (lefts[stage], y), width, text, color=OURS if stage >= 3 else OTHERS)
        for stage, text in labels[tier].items():
            arrow(axes, (lefts[stage] + width, y + 0.3), (lefts[stage + 1], y + 0.3), text)
    save("way-of-a-sample", figure, PROJECT / "docs" / "pictures")


def draw_echo() -> None:
    """Two passes over each pool while the next one is read."""
    figure, axes = canvas(10, 2.4)
    axes.text(0, 1.75, "reading", va="center", fontsize=9)
    axes.text(0, 0.75, "training", va="center", fontsize=9)
    for pool in range(3):
        box(axes, (1.1 + 2.9 * pool, 1.4), 2.8, f"pool {pool + 1}", color=OTHERS)
    for pool in range(2):
        for turn, text in enumerate(["as read", "shuffled again"]):
            left = 4.0 + 2.9 * pool + 1.45 * turn
            box(axes, (left, 0.4), 1.4, f"pool {pool + 1}\n{text}", color=OURS)
    axes.text(
        1.1, 0.05, "data.echo=2: reading takes twice as long as training, and the device does not wait", fontsize=9
    )
    save("echo", figure, PROJECT / "docs" / "pictures")


def main() -> None:
    """Draw all of them."""
    with mpl.rc_context(STYLE):
        draw_peers()
        draw_timeline()
        draw_way()
        draw_echo()


if __name__ == "__main__":
    main()
