"""Does the GPU wait for data? Trains two networks from each tier, and the same loop on one batch that stays there.

python bench/gpu.py [--rows 12000] [--seconds 20]
python bench/gpu.py --device cpu          the same code on tiny sizes: does it run? Writes nothing without --out

train.build makes what is measured: HDF5 file, BlockSampler, feed, workload. The loop is that of train.py: the
transform of the workload, train_step, Clock. A round measures each contender for a few seconds. Before that, it takes
as many unmeasured steps as were prepared ahead while the others were measured.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import count, repeat
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
import project  # noqa: F401
import publish
import torch
from files import IMAGES
from torch import nn
from train import Parts, build, train_step

from fastgpu.convert.partial import complete_or_absent
from fastgpu.convert.writer import Writer
from fastgpu.feed.tiers import Feed, Placement, make_feed
from fastgpu.process.config import Config, Data, Loader, Optim, Tier, Train
from fastgpu.process.world import World
from fastgpu.rows.field import Field
from fastgpu.rows.rows import Rows
from fastgpu.telemetry.clock import Clock, Throughput
from fastgpu.training.optim import make_optimizer
from fastgpu.training.step import to_device
from workloads.images import Normalize, ResNet

DATA = publish.ROOT / "bench" / "data"
N_CLASSES = 40
LR = 1e-3
COPY_BYTES = 256 << 20
N_COPIES = 20
FIXED = "fixed batch"
NOT_PINNED = "disk, not pinned"
TIERS: tuple[Tier, ...] = ("disk", "host", "device")
FEED_RATIO = 0.99
"""The feed ratio that must be reached."""
WAIT_PCT = 1.0
"""The data wait that must not be exceeded."""

Batches = Iterable[Rows]


class Sizes(NamedTuple):
    """How much is measured."""

    rows: int
    shape: tuple[int, int, int]
    """(C, H, W) of an image."""
    batch_size: int
    rounds: int
    seconds: float
    """Time of each contender in all rounds together, for each network."""


SIZES = {"cuda": Sizes(12_000, (3, 218, 178), 256, 4, 20.0), "cpu": Sizes(8, (3, 32, 32), 4, 1, 0.1)}


class Round(NamedTuple):
    """One contender in one round."""

    steps_per_s: float
    wait_pct: float


class Measured(NamedTuple):
    """One contender with one network."""

    rounds: list[Round]
    syncs: str
    """The error that stopped the loop in the sync debug mode; empty if there was none."""


# ---------------------------------------------------------------------------------------------- rows and loops


def make_file(folder: Path, n_rows: int, shape: tuple[int, ...]) -> Path:
    """A file of random bytes and labels, as the project writes it. A file that exists is kept."""
    path = folder / f"gpu-{n_rows}-{'x'.join(map(str, shape))}.h5"
    if path.exists():
        return path
    rng = np.random.default_rng(0)
    labels = rng.integers(0, N_CLASSES, n_rows)
    labels[0] = N_CLASSES - 1  # the workload takes the number of classes from the highest label
    fields = {"images": Field(np.dtype(np.uint8), shape), "labels": Field(labels.dtype, ())}
    with complete_or_absent(path) as partial, Writer(partial / path.name, n_rows, fields) as writer:
        for part in np.array_split(labels, -(-n_rows // 64)):
            writer.append({"images": rng.integers(0, 256, (len(part), *shape), np.uint8), "labels": part})
    return path


def endless(feed: Feed, batch_size: int) -> Iterator[Batches]:
    """The batches of each pool, epoch after epoch."""
    for epoch in count():
        for pool in feed.pools(epoch):
            yield pool.rows.batches(batch_size)


def loop(pools: Iterable[Batches], clock: Clock, parts: Parts, rng: torch.Generator) -> Iterator[None]:
    """The loop of train.py, which stops after each step."""
    for batches in clock.timed(pools):
        for batch in batches:
            train_step(parts, parts.workload.transform(batch, rng), LR)
            clock.count(len(batch), len(batch))
            yield


def run_for(
    steps: Iterator[None], clock: Clock, device: torch.device, *, lead_steps: int, seconds: float
) -> Throughput:
    """Take `lead_steps` unmeasured steps, then whole steps for at least `seconds`, from idle device to idle device."""
    for _ in range(lead_steps):
        next(steps)
    _wait_for(device)
    clock.restart()
    t0 = time.perf_counter()
    while time.perf_counter() - t0 < seconds:
        next(steps)
    _wait_for(device)
    return clock.take()


def find_sync(steps: Iterator[None], n_steps: int) -> str:
    """The first operation in so many steps that makes the host wait for the device: the first line of its error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(n_steps):
            next(steps)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def copy_gb_per_s(device: torch.device) -> float:
    """Speed of a copy from page-locked host memory to the device while nothing else runs: the median of N_COPIES."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    rates = []
    for _ in range(N_COPIES):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source, non_blocking=True)
        end.record()
        end.synchronize()
        rates.append(COPY_BYTES / begin.elapsed_time(end) / 1e6)  # bytes/ms -> GB/s
    return median(rates)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# ---------------------------------------------------------------------------------------------- measurements


def measure(sizes: Sizes, device: torch.device, folder: Path) -> dict[str, dict[str, Measured]]:
    """{network: {contender: its measurements}}"""
    path = str(make_file(folder, sizes.rows, sizes.shape))
    config = Config(
        workload="images",
        data=Data(train=path, val=path, fields=IMAGES, batch_size=sizes.batch_size, tier="disk"),
        model={"flip": True, "crop_padding": 4},
        optim=Optim(name="sgd", lr=LR, weight_decay=0.0, momentum=0.9, clip_grad_norm=0.0),
        train=Train(precision="bf16", channels_last=True),
    )
    parts = build(config, World(rank=0, world_size=1, local_world_size=1, device=device))
    parts.val_feed.close()
    feeds: dict[str, Feed] = {"disk": parts.feed}
    placement = Placement("disk", device, parts.sizes.n_readers)
    for tier in ("host", "device"):
        feeds[tier] = make_feed(parts.source, parts.feed.order, placement._replace(tier=tier), config.loader)
    feeds[NOT_PINNED] = make_feed(parts.source, parts.feed.order, placement, Loader(pin_memory=False))

    normalize = Normalize(parts.source.attributes, 3, np.dtype(np.uint8))
    resnet_50 = ResNet(sizes.shape, N_CLASSES, 64, [3, 4, 6, 3], block="bottleneck")
    networks = {"ResNet-50": nn.Sequential(normalize, resnet_50), "small CNN": parts.workload.model()}
    results = {}
    for name, network in networks.items():
        model = to_device(network, device, channels_last=True)
        optimizer = make_optimizer(model, config.optim)
        network_parts = parts._replace(model=model, ddp=model, optimizer=optimizer)
        results[name] = _measure_network(name, network_parts, feeds, sizes)
    for feed in feeds.values():
        feed.close()
    return results


def _measure_network(name: str, parts: Parts, feeds: dict[str, Feed], sizes: Sizes) -> dict[str, Measured]:
    resident_rows = next(iter(feeds["device"].pools(0))).rows
    device = resident_rows["images"].device
    fixed_batch = resident_rows.take(torch.arange(sizes.batch_size, device=device))
    pool_batches = parts.sizes.pool_batches
    rng = torch.Generator(device).manual_seed(0)
    clock = Clock(device)

    def start(contender: str) -> Iterator[None]:
        pools: Iterator[Batches]
        if contender == FIXED:
            pools = repeat([fixed_batch] * pool_batches)
        else:
            pools = endless(feeds[contender], sizes.batch_size)
        return loop(pools, clock, parts, rng)

    results = {contender: Measured([], "") for contender in (FIXED, *feeds)}
    loops = {contender: start(contender) for contender in results}
    for contender, steps in loops.items():
        # The first pool lets the allocator get its memory and the libraries choose their kernels.
        run_for(steps, clock, device, lead_steps=pool_batches, seconds=0.0)
        syncs = find_sync(steps, pool_batches + 1) if device.type == "cuda" else ""
        if syncs:
            results[contender] = Measured([], syncs)
            loops[contender] = start(contender)  # the error has ended the loop
    lead_steps = (parts.config.loader.prefetch_pools + 1) * pool_batches
    for number in range(sizes.rounds):
        contenders = list(loops)
        if number % 2:  # every other round backwards, so that a drift of the clock rates evens out
            contenders.reverse()
        for contender in contenders:
            seconds = sizes.seconds / sizes.rounds
            throughput = run_for(loops[contender], clock, device, lead_steps=lead_steps, seconds=seconds)
            steps_per_s = throughput.trained_rows / sizes.batch_size / throughput.seconds
            wait_pct = 100 * throughput.wait_s / throughput.seconds
            results[contender].rounds.append(Round(steps_per_s, wait_pct))
            print(f"{name}, round {number + 1}: {contender}: {throughput}", file=sys.stderr, flush=True)
    return results


def feed_ratios(contenders: dict[str, Measured], contender: str) -> list[float]:
    """Speed of a contender / speed of the fixed batch in each round."""
    speeds, fixed = ([result.steps_per_s for result in contenders[name].rounds] for name in (contender, FIXED))
    return publish.ratios(speeds, fixed)


# ---------------------------------------------------------------------------------------------- the page


def tables(
    results: dict[str, dict[str, Measured]], sizes: Sizes, device: torch.device, h2d_gb_per_s: float | None
) -> list[publish.Table]:
    """The targets, a table with a line for each network and contender, and the copy alone."""
    columns = ["network", "rows from", "steps/s", "rows/s", "GB/s", "feed ratio", "data wait %", "syncs"]
    row_bytes = int(np.prod(sizes.shape))
    rows = []
    for network, contenders in results.items():
        for contender, measured in contenders.items():
            steps_per_s = median(result.steps_per_s for result in measured.rounds)
            rows_per_s = steps_per_s * sizes.batch_size
            ratio = "1" if contender == FIXED else publish.spread(feed_ratios(contenders, contender), ".4f")
            wait_pct = publish.spread([result.wait_pct for result in measured.rounds], ".2f")
            syncs = measured.syncs or "none"
            if device.type != "cuda":
                syncs = "not measured"
            speeds = [f"{steps_per_s:.2f}", f"{rows_per_s:,.0f}", f"{rows_per_s * row_bytes / 1e9:.2f}"]
            rows.append([network, contender, *speeds, ratio, wait_pct, syncs])
    page = [targets_table(results, device), publish.Table("training", columns, rows, _training_note(sizes))]
    if h2d_gb_per_s is not None:
        note = (
            f"Median of {N_COPIES} copies of {COPY_BYTES >> 20} MiB from page-locked memory, one at a time, while "
            "nothing else runs."
        )
        cells = [[f"{h2d_gb_per_s:.1f}"]]
        page.append(publish.Table("the copy alone", ["host to device, GB/s"], cells, note))
    return page


def _training_note(sizes: Sizes) -> str:
    image = "x".join(map(str, sizes.shape))
    return (
        f"{sizes.rows:,} uint8 rows of {image} in an HDF5 file in the page cache, batch size {sizes.batch_size}, bf16 "
        "autocast, channels_last, SGD with momentum, random crop and flip on the device, no torch.compile. Pools, "
        "canonical ranks and readers are chosen by `auto`; pools prepared ahead: "
        f"{Loader().prefetch_pools}. Median [minimum-maximum] of {sizes.rounds} rounds of "
        f"{sizes.seconds / sizes.rounds:g} s. The feed ratio is taken within a round. Data wait is measured by events "
        "on the device. GB/s: bytes of the images that were trained on. Syncs: what the host waited for in "
        "torch.cuda.set_sync_debug_mode('error'), which does not see that a copy from memory that is not page-locked "
        "makes the host wait."
    )


def targets_table(results: dict[str, dict[str, Measured]], device: torch.device) -> publish.Table:
    rows = []
    n_free = 0
    for network, contenders in results.items():
        ratios = {tier: median(feed_ratios(contenders, tier)) for tier in TIERS}
        waits_pct = {tier: median(result.wait_pct for result in contenders[tier].rounds) for tier in TIERS}
        worst = min(TIERS, key=ratios.__getitem__)
        longest = max(TIERS, key=waits_pct.__getitem__)
        rows.append([f"feed ratio, {network}, the worst tier", f"{ratios[worst]:.4f} ({worst})", f">= {FEED_RATIO}"])
        wait = f"{waits_pct[longest]:.2f} % ({longest})"
        rows.append([f"data wait, {network}, the worst tier", wait, f"<= {WAIT_PCT:g} %"])
        n_free += sum(not contenders[tier].syncs for tier in TIERS)
    free = "not measured"
    if device.type == "cuda":
        free = f"{n_free} of {len(results) * len(TIERS)} loops"
    rows.append(["steady loops without a host-device synchronisation", free, "all"])
    return publish.Table("targets", publish.TARGET_COLUMNS, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="feed ratio and data wait on a GPU")
    parser.add_argument("--device", choices=list(SIZES), default="cuda")
    parser.add_argument("--rows", type=int, help="number of rows in the file (12000)")
    parser.add_argument("--seconds", type=float, help="time of each contender, for each network (20)")
    parser.add_argument("--out", type=Path, help="folder of the result (bench/results; none on a CPU)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA device")
    sizes = SIZES[args.device]
    if args.rows is not None:
        sizes = sizes._replace(rows=args.rows)
    if args.seconds is not None:
        sizes = sizes._replace(seconds=args.seconds)
    device = torch.device("cpu")
    h2d_gb_per_s = None
    out = args.out
    if args.device == "cuda":
        device = torch.device("cuda", 0)
        h2d_gb_per_s = copy_gb_per_s(device)
        out = out or publish.RESULTS
    results = measure(sizes, device, DATA)
    page = tables(results, sizes, device, h2d_gb_per_s)
    for table in page:
        print(f"{table.title}\n{table.markdown()}")
    if out:
        rounds = {}
        for network, contenders in results.items():
            rounds[network] = {name: measured._asdict() for name, measured in contenders.items()}
        command = f"python bench/gpu.py --device {device.type} --rows {sizes.rows} --seconds {sizes.seconds:g}"
        raw = {"sizes": sizes._asdict(), "h2d_gb_per_s": h2d_gb_per_s, "rounds": rounds}
        publish.write("gpu", page, raw, command, folder=out)


if __name__ == "__main__":
    main()
