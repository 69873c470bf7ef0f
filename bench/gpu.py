"""Does the GPU wait for data? Trains networks on rows from each tier, and the same loop on one batch that stays there.

python bench/gpu.py                              three cases, some minutes each
python bench/gpu.py --cases cifar                these cases only
python bench/gpu.py --quick --device cpu         the same code on tiny rows: does it run?

    encoded     JPEG files for a ResNet-18 at 224 x 224
    cifar       rows in the shape of CIFAR-10 for a ResNet-18
    recsys      users and items as in MovieLens-20M for a Mult-VAE

train.build makes what is measured, and the loop is that of train.py: batches, the transform of the workload, the step,
and the clock. A round measures each contender for some seconds: rows from disk (in the page cache), host memory and the
device, and those of a tuned DataLoader. Before that, it takes as many unmeasured steps as were prepared ahead while the
others were measured. The page is written after each case.
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
import project
import publish
import torch
from contenders import mapped_rows
from data import DataSpec
from jpegs import Files, by_pillow
from peers import Task
from processes import kept_warm
from publish import FailedError, ratios, spread, take_turns
from torch.utils.data import DataLoader, Dataset
from train import Parts, build, train_step

from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import UserError
from fastgpu.process.machine import available_cpus
from fastgpu.process.world import World
from fastgpu.rows.rows import Rows
from fastgpu.telemetry.clock import Clock
from fastgpu.telemetry.monitor import Monitor

LR = 1e-3
LEAD_S = 1.0
"""Time of the same work before a measurement: the clocks rise, and NVML's watts are the mean of the last second."""
PREFETCH_FACTOR = 4
N_CLASSES = 10
FIXED = "a batch that stays on the device"
TIERS = {"disk tier": "disk", "host tier": "host", "device tier": "device"}
"""{contender: data.tier}"""
TUNED = "DataLoader, tuned"
COUNTERS = {"gpu0/util_pct": "GPU-Util %", "gpu0/power_w": "W"}
Batches = Iterable[Rows]


class Case(NamedTuple):
    """Rows, and the network that is trained on them."""

    spec: DataSpec
    make: Callable[[DataSpec], None]
    config: str
    """A file of the project."""
    keys: dict[str, Any]
    """Other keys of it."""
    quick_keys: dict[str, Any]
    dataset: Callable[[Task], Dataset[Any]] | None = None
    """The same images for a DataLoader. None: no DataLoader competes."""


# ---------------------------------------------------------------------------------------------- cases


def make_classes(spec: DataSpec) -> None:
    """Rows of pixels with a class each."""
    parts = ({**part, "labels": part["labels"] % N_CLASSES} for part in data.numbered(spec.n_rows, spec.shape))
    data.write(spec.h5, spec.n_rows, parts, {"n_classes": N_CLASSES})


RESNET18 = {"model.width": 64, "model.blocks": 2, "model.flip": "true", "optim.name": "sgd"}
CASES = {
    "encoded": Case(
        DataSpec("JPEG files, ResNet-18", 4_096, (3, 256, 341), 256),
        data.make_jpegs,
        "config.yaml",
        {**RESNET18, "model.crop_padding": 0, "data.image_size": 224, "data.min_crop_scale": 0.08},
        {"model.width": 4, "data.image_size": 32},
        lambda task: Files(task, by_pillow),
    ),
    "cifar": Case(
        DataSpec("rows of CIFAR-10, ResNet-18", 51_200, (3, 32, 32), 512),
        make_classes,
        "config.yaml",
        {**RESNET18, "model.crop_padding": 4},
        {"model.width": 4},
        mapped_rows,
    ),
    "recsys": Case(
        DataSpec("users of MovieLens-20M, Mult-VAE", 136_677, (20_108,), 500),
        data.make_users,
        "configs/recsys.yaml",
        {"model.hidden_dim": 600, "model.latent_dim": 200},
        {},
    ),
}


# ---------------------------------------------------------------------------------------------- loops


def loop(pools: Iterable[Batches], clock: Clock, parts: Parts, rng: torch.Generator) -> Iterator[None]:
    """The loop of train.py, which stops after each step."""
    for batches in clock.timed(pools):
        for batch in batches:
            train_step(parts, parts.workload.transform(batch, rng), LR)
            clock.count(len(batch), len(batch))
            yield


def pools_of(parts: Parts) -> Iterator[Batches]:
    """The batches of each pool, epoch after epoch."""
    for epoch in count():
        for pool in parts.loader.pools(epoch):
            yield pool.rows.batches(parts.sizes.batch_size)


def pools_of_loader(case: Case, spec: DataSpec, device: torch.device) -> Iterator[Batches]:
    """Batches of a DataLoader with workers on all CPUs that work ahead, pinned memory and copies without waiting."""
    task = Task(spec.h5, spec.folder, spec.batch_size, available_cpus(), 0)
    options = {"num_workers": available_cpus(), "persistent_workers": True, "prefetch_factor": PREFETCH_FACTOR}
    options["pin_memory"] = device.type == "cuda"
    loader = DataLoader(case.dataset(task), spec.batch_size, shuffle=True, drop_last=True, **options)
    while True:
        for batch in loader:
            labels = torch.zeros(spec.batch_size, dtype=torch.int64, device=device)
            yield [Rows({"images": batch[0].to(device, non_blocking=True), "labels": labels})]


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def build_parts(case: Case, spec: DataSpec, tier: str, world: World) -> Parts:
    """What train.py would train. Raises FailedError if such rows cannot be kept on this tier."""
    val = spec.folder / "users-val.h5" if spec.shape[1:] == () else spec.h5
    keys = {"data.train": spec.h5, "data.val": val, "data.batch_size": spec.batch_size, "data.tier": tier, **case.keys}
    words = ["--config", str(project.FOLDER / case.config), *(f"{key}={value}" for key, value in keys.items())]
    try:
        return build(load_config(words), world)
    except UserError as error:
        raise FailedError(str(error)) from None


class Bench:
    """The contenders of a case, in front of one model."""

    def __init__(self, case: Case, spec: DataSpec, device: torch.device, stack: ExitStack):
        """Threads and processes end with `stack`."""
        self.device = device
        self.spec = spec
        world = World(rank=0, world_size=1, local_world_size=1, device=device)
        self.clock = Clock(world)
        self.monitor = stack.enter_context(Monitor(world, poll_s=0.2))
        self.loops: dict[str, Iterator[None]] = {}
        self.failed: dict[str, str] = {}
        sources = {}
        for name, tier in TIERS.items():
            try:
                parts = build_parts(case, spec, tier, world)
            except FailedError as failure:
                self.failed[name] = str(failure)
                continue
            parts.val_loader.close()
            stack.callback(parts.loader.close)
            sources[name] = pools_of(parts)
            if tier == "disk":
                self.parts = parts
        if case.dataset:
            sources[TUNED] = pools_of_loader(case, spec, device)
        first_pool = next(iter(self.parts.loader.pools(0))).rows
        fixed = first_pool.take(torch.arange(spec.batch_size, device=first_pool.device))
        sources[FIXED] = repeat([fixed] * self.parts.sizes.pool_batches)
        rng = torch.Generator(device).manual_seed(0)
        self.loops = {name: loop(pools, self.clock, self.parts, rng) for name, pools in sources.items()}
        stack.callback(self.loops.clear)  # ends the workers of DataLoaders

    def measure(self, name: str, seconds: float) -> dict[str, float]:
        """Whole steps for at least so many seconds, from idle device to idle device."""
        if name in self.failed:
            raise FailedError(self.failed[name])
        steps = self.loops[name]
        n_ahead = (self.parts.config.loader.prefetch_pools + 1) * self.parts.sizes.pool_batches
        t0 = time.perf_counter()
        for n_steps in count(1):
            next(steps)
            lead_s = time.perf_counter() - t0
            if lead_s > 3 * seconds or (lead_s > min(LEAD_S, seconds) and n_steps >= n_ahead):
                break
        wait_for(self.device)
        self.clock.restart()
        self.monitor.take()
        t0 = time.perf_counter()
        while time.perf_counter() - t0 < seconds:
            next(steps)
        wait_for(self.device)
        interval = self.clock.take()
        read = self.monitor.take()
        numbers = {
            "steps_per_s": interval.steps / interval.seconds,
            "wait_pct": 100 * interval.wait_s / interval.seconds,
        }
        return {**numbers, **{tag: read[tag] for tag in COUNTERS if tag in read}}


def measure_case(case: Case, spec: DataSpec, args: Any) -> dict[str, list[dict[str, float]] | str]:
    """{contender: one measurement for each round, or why it failed}"""
    case.make(spec)
    with ExitStack() as stack, kept_warm([spec.h5]):
        bench = Bench(case, spec, torch.device(args.device), stack)
        ways = {name: partial(bench.measure, name, args.seconds) for name in (*bench.failed, *bench.loops)}
        return take_turns(spec.name, ways, args.rounds)


# ---------------------------------------------------------------------------------------------- the page


def feed_ratios(contenders: dict[str, Any], name: str) -> list[float]:
    """Speed of a contender / speed of the fixed batch in each round."""
    return ratios(*([each["steps_per_s"] for each in contenders[which]] for which in (name, FIXED)))


def targets(name: str, contenders: dict[str, Any]) -> list[list[str]]:
    """The worst tier counts."""
    measured = [tier for tier in TIERS if not isinstance(contenders[tier], str)]
    feed = {tier: median(feed_ratios(contenders, tier)) for tier in measured}
    waits_pct = {tier: median(each["wait_pct"] for each in contenders[tier]) for tier in measured}
    worst = min(measured, key=feed.__getitem__)
    longest = max(measured, key=waits_pct.__getitem__)
    return [
        [f"feed ratio, {name}", f"{feed[worst]:.4f} ({worst})", ">= 0.99"],
        [f"data wait, {name}", f"{waits_pct[longest]:.2f} % ({longest})", "<= 1 %"],
    ]


def table(spec: DataSpec, contenders: dict[str, Any]) -> publish.Table:
    columns = ["rows from", "rows/s", "feed ratio", "data wait %", *COUNTERS.values()]
    rows = []
    for name, rounds in contenders.items():
        if isinstance(rounds, str):
            rows.append([name, rounds, *[""] * (len(columns) - 2)])
            continue
        rates = [each["steps_per_s"] * spec.batch_size for each in rounds]
        cells = [spread(rates, ",.0f"), spread(feed_ratios(contenders, name), ".4f")]
        cells.append(spread([each["wait_pct"] for each in rounds], ".2f"))
        cells += [spread([each[tag] for each in rounds if tag in each], ".1f") for tag in COUNTERS]
        rows.append([name, *cells])
    note = (
        f"Batches of {spec.batch_size}, files in the page cache. The feed ratio is taken within a round. Data wait is "
        "measured by events on the device. Tuned: workers on all CPUs that prepare 4 batches each, pinned memory, and "
        "copies that Python does not wait for."
    )
    return publish.Table(spec.name, columns, rows, note)


def main() -> None:
    parser = publish.parser(__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--seconds", type=float, default=2.0, help="of one contender in one round (2)")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("not measured: torch sees no CUDA device")
    results: dict[str, Any] = {}
    page: list[publish.Table] = []
    rows: list[list[str]] = []
    for name in args.cases:
        case = CASES[name]
        spec = case.spec.small() if args.quick else case.spec
        if args.quick:
            case.keys.update(case.quick_keys)
        results[name] = measure_case(case, spec, args)
        rows += targets(spec.name, results[name])
        page.append(table(spec, results[name]))
        publish.write_result("gpu", [publish.Table("targets", publish.TARGET_COLUMNS, rows), *page], results, args)


if __name__ == "__main__":
    main()
