"""Does the GPU wait for data? Two networks trained from each tier, against the same loop on one batch on the device.

python bench/gpu.py [--rows 12000] [--seconds 20]
python bench/gpu.py --device cpu          the same code on tiny sizes: does it run? Nothing is written without --out

The rows go the project's way: HDF5 file, BlockSampler, feed, echo, the workload's transform, Step and Clock. A round
measures every contender for a few seconds, after as many steps off the clock as had been prepared ahead meanwhile.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, repeat
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import h5py
import numpy as np
import project  # noqa: F401
import report
import torch
import torch.nn.functional as F
from fastgpu.feed import sizes as auto
from fastgpu.feed.echo import echo
from fastgpu.feed.tiers import Feed, Tier, make_feed
from fastgpu.process.config import Augment, Model
from fastgpu.rows.order import BlockSampler
from fastgpu.rows.rows import Rows
from fastgpu.storage.layout import BLOCK_BYTES
from fastgpu.storage.store import open_store
from fastgpu.telemetry.clock import Clock, Throughput
from fastgpu.training.optim import make_optimizer
from fastgpu.training.step import Step
from torch import Tensor, nn
from workloads.images import Normalize, Workload

DATA = report.ROOT / "bench" / "data"
CLASSES = 40
LR = 1e-3
PREFETCH_POOLS = 2  # config.yaml's
COPY_BYTES, COPIES = 256 << 20, 20
FIXED, NOT_PINNED = "fixed batch", "disk, not pinned"
TIERS: tuple[Tier, ...] = ("disk", "host", "device")
FEED_RATIO, WAIT_PCT = 0.99, 1.0  # what we must reach

Batches = Iterable[Rows]


class Sizes(NamedTuple):
    rows: int
    shape: tuple[int, int, int]
    batch_size: int
    rounds: int
    seconds: float
    """Of each contender in all rounds together, for each network."""


SIZES = {"cuda": Sizes(12_000, (3, 218, 178), 256, 4, 20.0), "cpu": Sizes(8, (3, 32, 32), 4, 1, 0.1)}


class Round(NamedTuple):
    steps_per_s: float
    wait_pct: float


class Measured(NamedTuple):
    """One contender with one network."""

    rounds: list[Round]
    syncs: str
    """What stopped the loop under the sync debug mode; empty if nothing did."""


# ---------------------------------------------------------------------------------------------- networks


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 convolutions and a shortcut (He et al., arXiv:1512.03385), stride in the 3x3 one."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        channels_out = 4 * channels
        self.body = nn.Sequential(
            *_conv_norm(channels_in, channels, 1),
            nn.ReLU(inplace=True),
            *_conv_norm(channels, channels, 3, stride),
            nn.ReLU(inplace=True),
            *_conv_norm(channels, channels_out, 1),
        )
        same = stride == 1 and channels_in == channels_out
        self.shortcut = nn.Identity() if same else nn.Sequential(*_conv_norm(channels_in, channels_out, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


def _conv_norm(channels_in: int, channels: int, kernel: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(channels)


def resnet50(classes: int) -> nn.Sequential:
    """(B, 3, H, W) -> logits (B, classes)."""
    layers = [*_conv_norm(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels_in = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        channels = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(channels_in, channels, 2 if stage and not block else 1))
            channels_in = 4 * channels
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels_in, classes))


# ---------------------------------------------------------------------------------------------- rows and loops


def make_file(folder: Path, rows: int, shape: tuple[int, ...]) -> Path:
    """Random bytes and labels, in blocks of 2 MiB as the project writes them; an earlier file of this kind is used."""
    path = folder / f"gpu-{rows}-{'x'.join(map(str, shape))}.h5"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    random, partial = np.random.default_rng(0), path.with_suffix(".partial")
    block = min(rows, max(1, BLOCK_BYTES // int(np.prod(shape))))
    aligned = {"alignment_threshold": 65536, "alignment_interval": 4096}
    with h5py.File(partial, "w", libver="latest", **aligned) as file:
        images = file.create_dataset("images", (rows, *shape), "uint8", chunks=(block, *shape))
        for start in range(0, rows, block):
            stop = min(start + block, rows)
            images[start:stop] = random.integers(0, 256, (stop - start, *shape), np.uint8)
        labels = random.integers(0, CLASSES, rows)
        labels[0] = CLASSES - 1  # the workload counts the classes by the highest label
        file["labels"] = labels
    partial.rename(path)
    return path


def endless(feed: Feed, batch_size: int, rng: torch.Generator) -> Iterator[Batches]:
    """The batches of each pool, epoch after epoch."""
    for epoch in count():
        for pool in feed.pools(epoch):
            yield echo(pool.rows, batch_size, 1, rng)


def loop(pools: Iterable[Batches], clock: Clock, step: Step, workload: Workload, rng: torch.Generator) -> Iterator[int]:
    """train.py's loop, stopped after each step; yields the batch's rows."""
    for batches in clock.waits(pools):
        for batch in batches:
            step(workload.transform(batch, rng), LR)
            clock.count(len(batch), len(batch))
            yield len(batch)


def run_for(steps: Iterator[int], clock: Clock, device: torch.device, lead_steps: int, seconds: float) -> Throughput:
    """`lead_steps` off the clock, then at least `seconds` of whole steps, from an idle device to an idle device."""
    for _ in range(lead_steps):
        next(steps)
    _wait_for(device)
    clock.restart()
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        next(steps)
    _wait_for(device)
    return clock.lap()


def find_sync(steps: Iterator[int], number: int) -> str:
    """What made the host wait for the device within so many steps: the error's first line, or nothing."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(number):
            next(steps)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def copy_gb_per_s(device: torch.device) -> float:
    """Of page-locked host memory to the device, nothing else under way: the median of COPIES."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(COPIES):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        rates.append(COPY_BYTES / began.elapsed_time(ended) / 1e6)  # bytes a ms -> GB/s
    return median(rates)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------- measuring


def measure(sizes: Sizes, device: torch.device, folder: Path) -> dict[str, dict[str, Measured]]:
    """{network: {contender: its rounds}}."""
    path = make_file(folder, sizes.rows, sizes.shape)
    store = open_store("rows", str(path), {"images": "images", "labels": "labels"})
    canonical_ranks = auto.choose_lanes("auto", sizes.batch_size, 1, len(store.block_rows), store.name)
    pool_batches = auto.choose_pool_batches("auto", sizes.batch_size, store.row_bytes, len(store))
    order = BlockSampler(store.block_rows, sizes.batch_size, canonical_ranks=canonical_ranks, pool_batches=pool_batches)
    readers = auto.choose_readers("auto", 1)
    feeds: dict[str, Feed] = {tier: make_feed(store, order, tier, device, readers, PREFETCH_POOLS) for tier in TIERS}
    feeds[NOT_PINNED] = make_feed(store, order, "disk", device, readers, PREFETCH_POOLS, pin_memory=False)
    workload = Workload(store, store, **Model().model_dump(), **Augment(flip=True, crop_padding=4).model_dump())
    resnet = nn.Sequential(Normalize(store.attributes, 3), resnet50(workload.classes))
    found = {}
    for name, network in {"ResNet-50": resnet, "small CNN": workload.model()}.items():
        model = network.to(device, memory_format=torch.channels_last)
        step = Step(model, workload.loss, make_optimizer(model, "sgd", LR, 0.0, 0.9), "bf16", device)
        found[name] = _measure_network(name, step, workload, feeds, pool_batches, sizes, device)
    for feed in feeds.values():
        feed.close()
    return found


def _measure_network(
    name: str,
    step: Step,
    workload: Workload,
    feeds: dict[str, Feed],
    pool_batches: int,
    sizes: Sizes,
    device: torch.device,
) -> dict[str, Measured]:
    rng, clock = torch.Generator(device).manual_seed(0), Clock(device)
    a_batch = next(iter(feeds["device"].pools(0))).rows.take(torch.arange(sizes.batch_size, device=device))

    def start(contender: str) -> Iterator[int]:
        fixed: Iterator[Batches] = repeat([a_batch] * pool_batches)
        pools = fixed if contender == FIXED else endless(feeds[contender], sizes.batch_size, rng)
        return loop(pools, clock, step, workload, rng)

    found = {contender: Measured([], "") for contender in (FIXED, *feeds)}
    loops = {contender: start(contender) for contender in found}
    for contender, steps in loops.items():
        run_for(steps, clock, device, pool_batches, 0.0)  # the allocator has its memory, the libraries their plans
        if device.type == "cuda" and (syncs := find_sync(steps, pool_batches + 1)):
            found[contender] = Measured([], syncs)
            loops[contender] = start(contender)  # an error has ended the loop
    for number in range(sizes.rounds):
        forth = list(loops)
        for contender in forth if number % 2 == 0 else reversed(forth):  # so that a drift of the clocks evens out
            lead_steps = (PREFETCH_POOLS + 1) * pool_batches
            lap = run_for(loops[contender], clock, device, lead_steps, sizes.seconds / sizes.rounds)
            got = Round(lap.trained_rows / sizes.batch_size / lap.seconds, 100 * lap.wait_s / lap.seconds)
            found[contender].rounds.append(got)
            print(f"{name}, round {number + 1}: {contender}: {lap}", file=sys.stderr, flush=True)
    return found


def feed_ratios(of: dict[str, Measured], contender: str) -> list[float]:
    """Its rate over the fixed batch's, round by round."""
    pairs = zip(of[contender].rounds, of[FIXED].rounds, strict=True)
    return [mine.steps_per_s / fixed.steps_per_s for mine, fixed in pairs]


# ---------------------------------------------------------------------------------------------- the page


def tables(
    found: dict[str, dict[str, Measured]], sizes: Sizes, device: torch.device, h2d: float | None
) -> list[report.Table]:
    """The targets, a line for each network and contender, and the copy alone."""
    columns = ["network", "rows from", "steps/s", "rows/s", "GB/s", "feed ratio", "data wait %", "syncs"]
    row_bytes, rows = int(np.prod(sizes.shape)), []
    for network, of in found.items():
        for contender, measured in of.items():
            rate = median(each.steps_per_s for each in measured.rounds)
            line = [network, contender, f"{rate:.2f}", f"{rate * sizes.batch_size:,.0f}"]
            line.append(f"{rate * sizes.batch_size * row_bytes / 1e9:.2f}")
            line.append("1" if contender == FIXED else _spread(feed_ratios(of, contender), 4))
            line.append(_spread([each.wait_pct for each in measured.rounds], 2))
            rows.append([*line, (measured.syncs or "none") if device.type == "cuda" else "not measured"])
    page = [targets_table(found, device), report.Table("training", columns, rows, _how(sizes))]
    if h2d is not None:
        note = (
            f"Median of {COPIES} copies of {COPY_BYTES >> 20} MiB, page-locked, one at a time, nothing else under way."
        )
        page.append(report.Table("the copy alone", ["host to device, GB/s"], [[f"{h2d:.1f}"]], note))
    return page


def _how(sizes: Sizes) -> str:
    image = "x".join(map(str, sizes.shape))
    return (
        f"{sizes.rows:,} uint8 rows of {image} in an HDF5 file that the page cache holds, batches of "
        f"{sizes.batch_size}, bf16 autocast, channels_last, SGD with momentum, random crop and flip on the device, no "
        "torch.compile; pools, lanes and readers as `auto` chooses them, pools prepared ahead: "
        f"{PREFETCH_POOLS}. Median [lowest to highest] of {sizes.rounds} rounds of {sizes.seconds / sizes.rounds:g} s; "
        "the feed ratio is taken within a round. Data wait is measured by events on the device. GB/s: bytes of images "
        "trained on. Syncs: what the host waited for under torch.cuda.set_sync_debug_mode('error'), which does not see "
        "that a copy of memory that is not page-locked makes it wait."
    )


def targets_table(found: dict[str, dict[str, Measured]], device: torch.device) -> report.Table:
    rows = []
    for network, of in found.items():
        ratios = {tier: median(feed_ratios(of, tier)) for tier in TIERS}
        waits = {tier: median(each.wait_pct for each in of[tier].rounds) for tier in TIERS}
        worst, longest = min(ratios, key=ratios.__getitem__), max(waits, key=waits.__getitem__)
        what = f"{network}, the worst tier"
        rows.append([f"feed ratio, {what}", f"{ratios[worst]:.4f} ({worst})", f">= {FEED_RATIO}"])
        rows.append([f"data wait, {what}", f"{waits[longest]:.2f} % ({longest})", f"<= {WAIT_PCT:g} %"])
    free = sum(not of[tier].syncs for of in found.values() for tier in TIERS)
    known = f"{free} of {len(found) * len(TIERS)} loops" if device.type == "cuda" else "not measured"
    rows.append(["steady loops without a host-device synchronisation", known, "all"])
    return report.Table("targets", ["what", "measured", "must / aim"], rows)


def _spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} [{min(values):.{digits}f} to {max(values):.{digits}f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description="feed ratio and data wait on a GPU")
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--rows", type=int, help="of the file (12000)")
    parser.add_argument("--seconds", type=float, help="of each contender, for each network (20)")
    parser.add_argument("--out", type=Path, help="folder of the result (bench/results; none on a CPU)")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA device")
    asked: dict[str, Any] = {name: getattr(arguments, name) for name in ("rows", "seconds")}
    sizes = SIZES[arguments.device]._replace(**{name: value for name, value in asked.items() if value is not None})
    device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
    h2d = copy_gb_per_s(device) if device.type == "cuda" else None
    found = measure(sizes, device, DATA)
    page = tables(found, sizes, device, h2d)
    for table in page:
        print(f"{table.title}\n{table.markdown()}")
    out = arguments.out or (report.RESULTS if device.type == "cuda" else None)
    if out:
        raw = {name: {each: measured._asdict() for each, measured in of.items()} for name, of in found.items()}
        command = f"python bench/gpu.py --device {device.type} --rows {sizes.rows} --seconds {sizes.seconds:g}"
        report.write("gpu", page, {"sizes": sizes._asdict(), "h2d_gb_per_s": h2d, "rounds": raw}, command, out)


if __name__ == "__main__":
    main()
