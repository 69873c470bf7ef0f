"""How fast do encoded images become batches? Compares the feed with DataLoaders and, if asked, with other loaders.

python bench/encoded.py            this project, DataLoaders over Pillow and simplejpeg, the bare decoder and resize
python bench/encoded.py --peers    FFCV, DALI and SPDL, too (installed by `make bench-peers`)

All decode the same made-up JPEG files (see jpegs.py): the feed from the HDF5 file of `convert.py images
--keep-encoded`, FFCV from a file of its own with the same bytes, the others from a folder.
Each contender is a process of its own, which is stopped while the others are measured in turns.
"""

import argparse
import shutil
import signal
import subprocess
import sys
from contextlib import ExitStack
from statistics import median
from typing import Any

import jpegs
import layouts
import numpy as np
import project
import publish
from data import DataSpec
from files import rows_of
from jpegs import BARE, CONTENDERS, OURS, PEERS, PILLOW, SIMPLEJPEG
from PIL import Image
from processes import PEERS_PYTHON, ContenderError, Process, kept_warm, make_cold
from publish import ratios, spread

from fastgpu.process.machine import available_cpus

N_IMAGES = 2_000
BATCH = 256
NOISE = 19
"""Grey levels of noise that give the files the size of published ones."""
KINDS = {
    DataSpec("500x375", N_IMAGES, (3, 375, 500), BATCH): [],
    DataSpec("341x256", N_IMAGES, (3, 256, 341), BATCH): ["--size", "256", "--quality", "85"],
}
"""{files: flags of convert.py}"""
FIRST_S = (0, 1.5)
LEAD_S = (0, 1.5)
SPAN_S = (2.5, 6)
COLD_S = (0, 20)
"""Seconds (minimum, maximum) of a first measurement that does not count, and of the others with what precedes them."""
ANSWER_S = 900
RATE = "images_per_s"
COST = "cpu_s_per_1000"
FEED_RATIO = "feed_ratio"
MARGIN = 1.15
"""Supply / demand of the simulated device by which the feed ratio is measured."""
COLD = "cold"
LIBRARIES = ("FFCV", "DALI", jpegs.SPDL)
Results = dict[str, Any]
"""{contender: its rounds, {RATE: ..., COST: ...}, or the reason why it has none}"""


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
            Image.fromarray(pixels).save(source / f"all/{number:05d}.jpg", quality=92)
    shutil.rmtree(spec.folder, ignore_errors=True)
    (spec.folder / "jpegs").mkdir(parents=True)
    target = spec.folder / "encoded.h5"
    command = [sys.executable, project.FOLDER / "convert.py", "images", source, target, "--keep-encoded", *flags]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    for number, data in enumerate(rows_of(target)):
        (spec.folder / f"jpegs/{number:05d}.jpg").write_bytes(data.tobytes())
    target.rename(spec.h5)


def measure(spec: DataSpec, names: list[str], n_rounds: int) -> Results:
    """All contenders in turns."""
    results: Results = {name: [] for name in names}
    processes: dict[str, Process] = {}
    with ExitStack() as stack:
        for number in range(n_rounds + 1):
            for name in names:
                if isinstance(results[name], str):
                    continue
                try:
                    if number == 0:
                        process = Process(name, spec, n_workers=available_cpus(), is_peer=name in PEERS)
                        processes[name] = stack.enter_context(process)
                        processes[name].ask("run", ANSWER_S, lead_s=None, span_s=FIRST_S, step_s=0)
                        continue
                    each = processes[name].ask("run", ANSWER_S, lead_s=LEAD_S, span_s=SPAN_S, step_s=0)
                except ContenderError as failure:
                    results[name] = str(failure)
                    continue
                values = {RATE: each["rows"] / each["seconds"], COST: 1000 * each["cpu_s"] / each["rows"]}
                if name == OURS:  # in front of a device that is a little slower
                    demand = values[RATE] / MARGIN
                    each = processes[name].ask(
                        "run", ANSWER_S, lead_s=LEAD_S, span_s=SPAN_S, step_s=spec.batch_size / demand
                    )
                    values[FEED_RATIO] = each["rows"] / each["seconds"] / demand
                results[name].append(values)
                print(f"{spec.name}, round {number}: {name}: {values}", file=sys.stderr, flush=True)
    return results


def measure_cold(spec: DataSpec, names: list[str], n_rounds: int) -> Results:
    """One epoch of each contender in a new process, after its files were dropped from the page cache."""
    results: Results = {name: [] for name in names}
    for _ in range(n_rounds):
        for name in names:
            if isinstance(results[name], str):
                continue
            try:
                with Process(name, spec, n_workers=available_cpus(), is_peer=name in PEERS) as process:
                    make_cold(process.ask("files", ANSWER_S)["files"])
                    each = process.ask("run", ANSWER_S, lead_s=None, span_s=COLD_S, step_s=0)
            except ContenderError as failure:
                results[name] = str(failure)
                continue
            results[name].append({RATE: each["rows"] / each["seconds"], COST: 1000 * each["cpu_s"] / each["rows"]})
            print(f"{spec.name}, cold: {name}: {results[name][-1]}", file=sys.stderr, flush=True)
    return results


def values_of(results: Results, name: str, key: str) -> list[float]:
    return [each[key] for each in results[name]]


def against(results: Results, name: str, key: str = RATE, *, times: int = 1) -> str:
    """Feed / (times x contender)."""
    if isinstance(results[name], str):
        return "not measured"
    others = [times * value for value in values_of(results, name, key)]
    return spread(ratios(values_of(results, OURS, key), others), ".2f")


def feed_ratio(results: Results) -> str:
    return spread([each[FEED_RATIO] for each in results[OURS]], ".3f")


def targets(results: Results) -> publish.Table:
    """The rows of bench/README.md, for the larger files."""
    libraries = [name for name in LIBRARIES if not isinstance(results[name], str)]
    best = max(libraries, key=lambda name: median(values_of(results, name, RATE)), default="FFCV")
    rows = [
        ["feed / DataLoader + Pillow", against(results, PILLOW), "3 / 5"],
        ["feed / best of FFCV, DALI, SPDL", f"{against(results, best)} ({best})", "1 / 1.3"],
        [
            "feed / (CPUs x decoder and resize in a thread)",
            against(results, BARE, times=available_cpus()),
            "0.9 / 0.97",
        ],
        ["CPU time of the feed / FFCV", against(results, "FFCV", COST), "1 / 0.8"],
        ["feed / FFCV with half of the images as pixels", against(results, jpegs.MIXED), "-"],
        [f"feed ratio at a supply of {MARGIN} x demand", feed_ratio(results), "0.99 / 0.995"],
    ]
    rows = [[f"JPEG of 500 x 375 to random parts: {what}", *cells] for what, *cells in rows]
    return publish.Table("targets", publish.TARGET_COLUMNS, rows)


def table(spec: DataSpec, results: Results, state: str = "in the page cache") -> publish.Table:
    rows = []
    for name, rounds in results.items():
        if isinstance(rounds, str):
            rows.append([name, rounds, "", "", ""])
            continue
        cells = [spread(values_of(results, name, key), form) for key, form in ((RATE, ",.0f"), (COST, ".2f"))]
        rows.append([name, *cells, against(results, name), against(results, name, COST)])
    kb = np.mean([len(data) for data in rows_of(spec.h5)]) / 1e3
    columns = ["contender", "images/s", "CPU s / 1,000 images", "feed / this: images/s", "feed / this: CPU s"]
    return publish.Table(f"made-up JPEG files, {spec.shape[2]} x {spec.shape[1]}, {kb:.0f} kB, {state}", columns, rows)


def page(results: dict[str, Results], *, has_peers: bool) -> list[publish.Table]:
    """All tables. results: {name of the files, or COLD: what was measured}."""
    tables = [targets(next(iter(results.values())))] if has_peers else []
    tables += [table(spec, results[spec.name]) for spec in KINDS]
    tables.append(table(next(iter(KINDS)), results[COLD], "not in the page cache"))
    note = (
        f"A random part of {100 * jpegs.MIN_SCALE:g} to 100 % of the area becomes 224 x 224 pixels. {N_IMAGES:,} "
        f"files, shuffled, batches of {BATCH}. {available_cpus()} CPUs, and as many reader threads, worker processes "
        "or threads of a peer. Not in the page cache: one epoch in a new process, whose files were just dropped, "
        "which FFCV begins by compiling. "
        "Lowest and highest of the rounds in brackets; ratios are taken in a round. Bare: decoder (simplejpeg) and "
        "resize (torch) of bytes in memory; on each CPU: in as many processes. FFCV with half of the images as pixels "
        "reads 3 times the bytes. Where other work shares the machine, CPU seconds say more than images/s."
    )
    tables[-1] = tables[-1]._replace(note=note)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", action="store_true", help="compare with other loaders, too")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.peers and not PEERS_PYTHON.exists():
        parser.error("the other loaders are not installed; make bench/.venv-peers/installed does it")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so no process is left behind
    results = {}
    for spec, flags in KINDS.items():
        make(spec, flags)
        with kept_warm(path for path in spec.folder.rglob("*") if path.is_file()):
            results[spec.name] = measure(spec, [*CONTENDERS, *(PEERS if args.peers else ())], args.rounds)
    large = next(iter(KINDS))
    names = [OURS, SIMPLEJPEG, PILLOW, *((*LIBRARIES, jpegs.MIXED) if args.peers else ())]
    results[COLD] = measure_cold(large, names, args.rounds)
    command = f"python bench/encoded.py{' --peers' * args.peers} --rounds {args.rounds}"
    publish.write("encoded", page(results, has_peers=args.peers), results, command)


if __name__ == "__main__":
    main()
