"""Does the GPU wait for data? Trains networks on rows from each tier, and the same loop on one batch that stays there.

python bench/gpu.py                          three cases, some minutes each
python bench/gpu.py --quick --device cpu     the same code on tiny rows: does it run?

train.build makes what is measured, and the loop is that of train.py: batches, the transform of the workload, the step,
and the clock. A round measures each contender for some seconds: rows from disk (in the page cache), host memory and the
device, and those of a tuned DataLoader. Before that, it takes as many unmeasured steps as were prepared ahead while the
others were measured.
"""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import partial
from itertools import count, repeat
from statistics import median
from typing import Any, NamedTuple

import data
import publish
import torch
from contenders import ram_batches
from data import DataSpec
from jpegs import batches_of, by_pillow
from peers import PROJECT, Task, loader
from processes import kept_warm
from publish import spread, take_turns
from tables import compare, speeds
from torch.utils.data import Dataset
from train import Training, build, train_step

from fastgpu.feed import open_rows
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World, choose_kernels
from fastgpu.rows.rows import Rows
from fastgpu.telemetry.clock import Clock
from fastgpu.telemetry.monitor import Monitor

LEAD_S = 1.0
"""Time of the same work before a measurement: the clocks rise, and NVML's watts are the mean of the last second."""
PREFETCH_FACTOR = 4
FIXED = "a batch that stays on the device"
TIERS = {"disk tier": "disk", "host tier": "host", "device tier": "device"}
"""{contender: data.tier}"""
TUNED = "DataLoader, tuned"
COUNTERS = {"wait_pct": "data wait %", "gpu0/util_pct": "GPU-Util %", "gpu0/power_w": "W"}
Batches = Iterable[Rows]


class Case(NamedTuple):
    """Rows, and the network that is trained on them."""

    spec: DataSpec
    make: Callable[[DataSpec], None]
    config: str
    """A file of the project."""
    keys: dict[str, Any]
    """Other keys of it."""
    dataset: Callable[[Task], Dataset[Any]] | None = None
    """The same images for a DataLoader, in whole batches. None: no DataLoader competes."""


QUICK_KEYS = {"model.width": 4, "data.image_size": 32}
RESNET18 = {"model.width": 64, "model.blocks": 2, "model.flip": "true", "optim.name": "sgd"}
CASES = {
    "encoded": Case(
        DataSpec("JPEG files, ResNet-18", 4_096, (3, 256, 341), 256),
        data.make_jpegs,
        "config.yaml",
        {**RESNET18, "model.crop_padding": 0, "data.image_size": 224, "data.min_crop_scale": 0.08},
        partial(batches_of, read=by_pillow),
    ),
    "cifar": Case(
        DataSpec("rows of CIFAR-10, ResNet-18", 51_200, (3, 32, 32), 512),
        partial(data.make, n_classes=10),
        "config.yaml",
        {**RESNET18, "model.crop_padding": 4},
        ram_batches,
    ),
    "recsys": Case(
        DataSpec("users of MovieLens-20M, Mult-VAE", 136_677, (20_108,), 500),
        data.make_users,
        "configs/recsys.yaml",
        {"model.hidden_dim": 600, "model.latent_dim": 200},
    ),
}


def loop(batches: Batches, clock: Clock, parts: Training, rng: torch.Generator) -> Iterator[None]:
    """The loop of train.py, which stops after each step."""
    for batch in clock.timed(batches):
        train_step(parts, parts.workload.transform(batch, rng), 1.0)
        yield


def batches_of_parts(parts: Training) -> Iterator[Rows]:
    """The batches of the training rows, epoch after epoch."""
    for epoch in count():
        yield from parts.loader.batches(epoch)


def batches_of_loader(case: Case, spec: DataSpec, device: torch.device) -> Iterator[Rows]:
    """Batches of a DataLoader with workers on all CPUs that work ahead, pinned memory and copies without waiting.

    A BatchSampler asks for whole batches.
    """
    task = Task(spec.h5, spec.folder, spec.batch_size, available_cpus())
    is_pinned = device.type == "cuda"
    options = {"prefetch_factor": PREFETCH_FACTOR, "pin_memory": is_pinned}
    tuned = loader(task, rows=case.dataset, in_batches=True, **options)
    for number in count():
        for batch in tuned.epoch(number):
            labels = torch.zeros(spec.batch_size, dtype=torch.int64, device=device)
            yield Rows({"images": batch[0].to(device, non_blocking=True), "labels": labels})


def build_parts(case: Case, spec: DataSpec, tier: str, world: World) -> Training:
    """What train.py would train. Raises UserError if such rows cannot be kept on this tier."""
    val = spec.folder / "users-val.h5" if case.make is data.make_users else spec.h5
    keys = {"data.train": spec.h5, "data.val": val, "data.batch_size": spec.batch_size, "data.tier": tier, **case.keys}
    words = (f"{key}={value}" for key, value in keys.items())
    config = load_config(["--config", str(PROJECT / case.config), *words])
    return build(config, open_rows(config), world)


class Bench:
    """The contenders of a case, in front of one model."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, stack: ExitStack):
        """Threads and processes end with `stack`."""
        world = World(rank=0, world_size=1, local_world_size=1, device=device)
        choose_kernels(world.device, deterministic=False)  # as train.py does before it builds
        self.synchronize = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self.clock = Clock(world, spec.batch_size)
        self.monitor = stack.enter_context(Monitor(world, poll_s=0.2))
        self.failed: dict[str, str] = {}
        sources = {}
        for name, tier in TIERS.items():
            try:
                parts = build_parts(case, spec, tier, world)
            except UserError as error:
                self.failed[name] = str(error)
                continue
            for val_loader in parts.val_loaders.values():
                val_loader.close()
            stack.callback(parts.loader.close)
            sources[name] = batches_of_parts(parts)
            if tier == "disk":
                self.parts = parts
        if case.dataset:
            sources[TUNED] = batches_of_loader(case, spec, device)
        first = next(iter(self.parts.loader.batches(0)))
        # Ragged rows take indices from host memory; others are moved.
        sources[FIXED] = repeat(first.take(torch.arange(spec.batch_size)))
        rng = torch.Generator(world.device).manual_seed(0)
        self.loops = {name: loop(batches, self.clock, self.parts, rng) for name, batches in sources.items()}
        stack.callback(self.loops.clear)  # ends the workers of DataLoaders

    def measure(self, name: str, seconds: float) -> dict[str, float]:
        """Whole steps for at least so many seconds, from idle device to idle device."""
        n_ahead = (self.parts.config.loader.prefetch_pools + 1) * self.parts.config.data.pool_batches
        self._step(name, n_ahead, min(LEAD_S, seconds))
        self.clock.restart()
        self.monitor.means()
        self._step(name, 1, seconds)
        interval = self.clock.interval()
        read = self.monitor.means()
        n_rows = interval.steps * self.parts.config.data.batch_size
        numbers = {"rows": n_rows, "seconds": interval.seconds, "wait_pct": 100 * interval.wait_s / interval.seconds}
        return numbers | {tag: read[tag] for tag in COUNTERS if tag in read}

    def _step(self, name: str, n_steps: int, seconds: float) -> None:
        """At least so many steps and seconds, but not more than three times the seconds; then wait for the device."""
        t0 = time.perf_counter()
        for n_done in count(1):
            next(self.loops[name])
            elapsed_s = time.perf_counter() - t0
            if elapsed_s > seconds and (n_done >= n_steps or elapsed_s > 3 * seconds):
                break
        self.synchronize()


def targets(name: str, contenders: dict[str, Any]) -> list[list[str]]:
    """The worst tier counts."""
    measured = [tier for tier in TIERS if not isinstance(contenders[tier], str)]
    feed, tier = min((median(compare(contenders, tier, FIXED)), tier) for tier in measured)
    wait_pct, waiting = max((median(each["wait_pct"] for each in contenders[tier]), tier) for tier in measured)
    return [
        [f"feed ratio, {name}", f"{feed:.4f} ({tier})", ">= 0.99"],
        [f"data wait, {name}", f"{wait_pct:.2f} % ({waiting})", "<= 1 %"],
    ]


def table(spec: DataSpec, contenders: dict[str, Any]) -> publish.Table:
    rows = []
    for name, rounds in contenders.items():
        if isinstance(rounds, str):
            rows.append([name, rounds, *[""] * (1 + len(COUNTERS))])
            continue
        cells = [spread(speeds(contenders, name), ",.0f"), spread(compare(contenders, name, FIXED), ".4f")]
        cells += [spread([each[tag] for each in rounds if tag in each], ".2f") for tag in COUNTERS]
        rows.append([name, *cells])
    note = (
        f"Batches of {spec.batch_size}, files in the page cache. The feed ratio is taken within a round. Data wait is "
        "measured by events on the device. Tuned: workers on all CPUs that prepare 4 batches each, whole batches "
        "(BatchSampler, batch_size=None), pinned memory, and copies that Python does not wait for. The DataLoader "
        "shuffles fully, this project in pools."
    )
    return publish.Table(spec.name, ["rows from", "rows/s", "feed ratio", *COUNTERS.values()], rows, note)


def main() -> None:
    parser = publish.parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one contender in one round (2)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA device")
    results: dict[str, Any] = {}
    page: list[publish.Table] = []
    rows: list[list[str]] = []
    for name, case in CASES.items():
        spec = case.spec
        if args.quick:
            spec = spec.small()
            case.keys.update({key: value for key, value in QUICK_KEYS.items() if key in case.keys})
        case.make(spec)
        with ExitStack() as stack, kept_warm([spec.h5]):
            bench = Bench(case, spec, torch.device(args.device), stack)
            ways = {way: partial(bench.measure, way, args.seconds) for way in bench.loops}
            results[name] = bench.failed | take_turns(spec.name, ways, args.rounds)
        rows += targets(spec.name, results[name])
        page.append(table(spec, results[name]))
    publish.write_result("gpu", [publish.Table("targets", publish.TARGET_COLUMNS, rows), *page], results, args)


if __name__ == "__main__":
    main()
