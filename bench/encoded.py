"""How fast do encoded images become batches? Compares the feed with DataLoaders and, if asked, with other loaders.

python bench/encoded.py            this project, DataLoaders over Pillow and simplejpeg, the bare decoder and resize
python bench/encoded.py --peers    FFCV, DALI, SPDL, WebDataset, LitData, too (installed by `make bench-peers`)

All decode the same made-up JPEG files (see jpegs.py): the feed from the HDF5 file of `convert.py images
--keep-encoded`, FFCV, WebDataset and LitData from files of their own with the same bytes, the others from a folder.
Each contender is a process of its own, which is stopped while the others are measured in turns.
"""

import argparse
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from statistics import median
from typing import Any

import jpegs
import layouts
import numpy as np
import project
import publish
from data import DataSpec
from jpegs import BARE, CONTENDERS, OURS, PEERS, PILLOW
from PIL import Image
from processes import ContenderError, Process, kept_warm
from tables import _spread as spread

from fastgpu.process.machine import available_cpus

N_IMAGES = 2_000
BATCH = 256
NOISE = 19
"""Grey levels of noise that give the files the size of published ones."""
QUALITY = 92
KINDS = {
    DataSpec("500x375", N_IMAGES, (3, 375, 500), BATCH): [],
    DataSpec("341x256", N_IMAGES, (3, 256, 341), BATCH): ["--size", "256", "--quality", "85"],
}
"""{files: flags of convert.py}"""
LEAD_S = (0, 1.5)
SPAN_S = (2.5, 6)
OPEN_S = 900
FFCV = "FFCV"
LIBRARIES = (FFCV, "DALI", "SPDL")


def make(spec: DataSpec, flags: list[str]) -> None:
    """The HDF5 file, and beside it a folder with the same JPEG files."""
    if spec.h5.exists():
        return
    source = spec.folder.parent / f"jpegs-{N_IMAGES}"
    if not source.exists():
        (source / "all").mkdir(parents=True)
        rng = np.random.default_rng(0)
        pictures = layouts.pictures(layouts.N_PICTURES, (3, 375, 500)).transpose(0, 2, 3, 1)
        for number in range(N_IMAGES):
            noise = NOISE * rng.standard_normal((375, 500, 3), np.float32)
            pixels = (pictures[number % len(pictures)] + noise).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(source / f"all/{number:05d}.jpg", quality=QUALITY)
    shutil.rmtree(spec.folder, ignore_errors=True)
    (spec.folder / "jpegs").mkdir(parents=True)
    target = spec.folder / "encoded.h5"
    command = [sys.executable, project.FOLDER / "convert.py", "images", source, target, "--keep-encoded", *flags]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    for number, data in enumerate(rows_of(target)):
        (spec.folder / f"jpegs/{number:05d}.jpg").write_bytes(data.tobytes())
    target.rename(spec.h5)


def rows_of(path: Any) -> list[np.ndarray]:
    """The bytes of each row of a file."""
    import h5py

    with h5py.File(path) as file:
        return np.split(file["images/values"][:], file["images/indptr"][1:-1])


def measure(spec: DataSpec, names: list[str], n_rounds: int) -> dict[str, Any]:
    """{contender: {"rounds": [results of `worker.run`]} or {"failed": reason}}"""
    results: dict[str, Any] = {name: {"rounds": []} for name in names}
    with ExitStack() as stack:
        processes: dict[str, Process] = {}
        for number in range(-1, n_rounds):  # the first round makes the contenders
            for name in names:
                if "failed" in results[name]:
                    continue
                try:
                    if number < 0:
                        process = Process(name, spec, n_workers=available_cpus(), is_peer=name in PEERS)
                        processes[name] = stack.enter_context(process)
                    each = processes[name].ask("run", OPEN_S, lead_s=LEAD_S, span_s=SPAN_S, step_s=0)
                except (ContenderError, FileNotFoundError) as failure:
                    results[name] = {"failed": str(failure)}
                    print(f"{name}: {failure}", file=sys.stderr)
                    continue
                if number >= 0:
                    results[name]["rounds"].append(each)
                    text = f"{images_per_s(each):,.0f} images/s, {cpu_s(each):.2f} CPU s / 1,000"
                    print(f"{spec.name}, round {number + 1}: {name}: {text}", file=sys.stderr, flush=True)
    return results


def images_per_s(each: Mapping[str, float]) -> float:
    return each["rows"] / each["seconds"]


def cpu_s(each: Mapping[str, float]) -> float:
    """CPU seconds per 1,000 images."""
    return 1000 * each["cpu_s"] / each["rows"]


def ratios(
    results: Mapping[str, Any], other: str | None, value: Callable[[Mapping[str, float]], float] = images_per_s
) -> list[float]:
    """Feed / other contender, round by round; empty if one was not measured."""
    pairs = zip(results[OURS].get("rounds", []), results.get(other, {}).get("rounds", []), strict=False)
    return [value(ours) / value(theirs) for ours, theirs in pairs]


def fastest(results: Mapping[str, Any], beginnings: tuple[str, ...]) -> str | None:
    """The contender with the highest median rate among those of some libraries."""
    rounds = {
        name: each["rounds"] for name, each in results.items() if name.startswith(beginnings) and each.get("rounds")
    }
    return max(rounds, key=lambda name: median(map(images_per_s, rounds[name])), default=None)


def targets(results: Mapping[str, Any]) -> publish.Table:
    """The rows of bench/README.md, for the larger files."""
    best = fastest(results, LIBRARIES)
    scaling = [ratio / available_cpus() for ratio in ratios(results, BARE)]
    what = "JPEG, 500 x 375 -> random part, 224 x 224"
    rows = [
        [f"{what}: feed / DataLoader + Pillow", spread(ratios(results, PILLOW), ".2f", "x"), "3x / 5x"],
        [
            f"{what}: feed / best of FFCV, DALI, SPDL",
            f"{spread(ratios(results, best), '.2f', 'x')} ({best})",
            "1x / 1.3x",
        ],
        [
            f"{what}: feed / ({available_cpus()} x decoder and resize in one thread)",
            spread(scaling, ".2f"),
            "0.9 / 0.97",
        ],
        [f"{what}: CPU time / FFCV's", spread(ratios(results, FFCV, cpu_s), ".2f", "x"), "1x / 0.8x"],
    ]
    return publish.Table("targets", publish.TARGET_COLUMNS, rows)


def table(spec: DataSpec, results: Mapping[str, Any]) -> publish.Table:
    rows = []
    for name, result in results.items():
        if "failed" in result:
            rows.append([name, result["failed"], "", "", ""])
            continue
        rates, costs = (list(map(value, result["rounds"])) for value in (images_per_s, cpu_s))
        against = [spread(ratios(results, name, value), ".2f") for value in (images_per_s, cpu_s)]
        rows.append([name, spread(rates, ",.0f"), spread(costs, ".2f"), *against])
    kb = np.mean([len(data) for data in rows_of(spec.h5)]) / 1e3
    columns = ["contender", "images/s", "CPU s / 1,000 images", "feed's images/s / this", "feed's CPU s / this"]
    return publish.Table(f"JPEG files, {spec.shape[2]} x {spec.shape[1]}, {kb:.0f} kB", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="compare with other loaders, too")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=[*CONTENDERS, *PEERS], metavar="NAME", help="writes no page")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so no process is left behind
    names = args.only or [*CONTENDERS, *(PEERS if args.peers else ())]
    results = {}
    for spec, flags in KINDS.items():
        make(spec, flags)
        with kept_warm(path for path in spec.folder.rglob("*") if path.is_file()):
            results[spec.name] = measure(spec, names, args.rounds)
    tables = [targets(next(iter(results.values())))] if args.peers else []
    tables += [table(spec, results[spec.name]) for spec in KINDS]
    note = (
        f"A random part of {100 * jpegs.MIN_SCALE:g} to 100 % of the area becomes 224 x 224 pixels. {N_IMAGES:,} "
        f"made-up files in the page cache, shuffled, batches of {BATCH}. {available_cpus()} CPUs, and as many reader "
        "threads, worker processes or threads of a peer. Lowest and highest of the rounds in brackets; ratios are "
        "taken within a round. Bare: decoder (simplejpeg) and resize (torch) of bytes in memory; on each CPU: in as many processes. "
        "Where other work shares the machine, CPU seconds say more than images/s."
    )
    tables[-1] = tables[-1]._replace(note=note)
    if args.only:
        print("\n".join(each.markdown() for each in tables))
    else:
        flags = f" --rounds {args.rounds}" if args.rounds != 3 else ""
        publish.write("encoded", tables, results, f"python bench/encoded.py{' --peers' * args.peers}{flags}")


if __name__ == "__main__":
    main()
