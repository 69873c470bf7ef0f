"""What bench/gpu.py runs as a user does: train.py behind a slow source, and diagnose.py where a cause was planted."""

import json
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import h5py
import numpy as np
import project
import torch
import torch.nn.functional as F
from gpu_cases import CASES, write_config

from fastgpu.process.machine import available_cpus
from fastgpu.storage.layout import BLOCK_BYTES
from fastgpu.telemetry.clock import Throughput

ECHOES = ("1", "2")
N_EPOCHS = 4
POOL_BATCHES = 4
"""The feed reads ahead while validation runs: in few large pools, a whole epoch."""
WAITING = '''"""The workload for images, with a step that asks for the value of the loss, as many training loops do."""

from torch import Tensor, nn

from fastgpu.rows.rows import Rows
from workloads import images


class Workload(images.Workload):
    """Waits for the device in each step."""

    def loss(self, model: nn.Module, batch: Rows) -> Tensor:
        loss = super().loss(model, batch)
        loss.item()
        return loss
'''


class Planted(NamedTuple):
    """A cause, how it is brought about, and its cure: words of a command line."""

    what: str
    cause: str
    case: str
    """The rows: one of `CASES`; empty: those of `compressed_images`."""
    words: list[str]
    cure: list[str]


FACES = ["model.width=8", "model.blocks=1"]
PLANTED = (
    Planted("compressed rows, one reader", "DECODE", "", ["loader.num_readers=1"], ["data.tier=device"]),
    Planted(
        "JPEG files, one reader",
        "DECODE",
        "ResNet-18, JPEG files",
        ["data.tier=disk", "loader.num_readers=1"],
        [f"loader.num_readers={available_cpus()}"],
    ),
    Planted("nothing", "COMPUTE", "ResNet-18, 224 x 224", ["data.tier=device"], []),
    Planted(
        "the loss is asked for in each step",
        "HOST",
        "CIFAR-10",
        ["data.tier=device", "workload=waiting"],
        ["workload=images"],
    ),
    Planted(
        "heavy augmentation",
        "AUGMENT",
        "CelebA",
        [*FACES, "data.tier=device", "model.min_crop_scale=0.2", "model.mixup_alpha=0.2"],
        ["model.min_crop_scale=1", "model.mixup_alpha=0"],
    ),
)


def copy_project(folder: Path) -> Path:
    """The project with one more workload, which a user would have written into it."""
    target = folder / "project"
    ignored = shutil.ignore_patterns("__pycache__", ".*", "runs", "tests", "docs")
    shutil.copytree(project.FOLDER, target, ignore=ignored, dirs_exist_ok=True)
    (target / "workloads" / "waiting.py").write_text(WAITING)
    return target


def run(words: list[Any], cwd: Path) -> str:
    """Run a script of the project. Returns what it printed; raises RuntimeError with its last words."""
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.stderr.strip()[-1000:]}")
    return done.stdout


def compressed_images(folder: Path, *, is_tiny: bool) -> Path:
    """The config of a compressed file of smooth pictures, which one reader decodes more slowly than a GPU trains."""
    n_rows, shape = (64, (3, 26, 22)) if is_tiny else (4_096, (3, 218, 178))
    path = folder / f"gzip-{n_rows}.h5"
    if not path.exists():
        rng = np.random.default_rng(0)
        coarse = torch.from_numpy(rng.normal(128, 60, (min(n_rows, 256), 3, 7, 6)).astype(np.float32))
        smooth = F.interpolate(coarse, shape[1:], mode="bicubic") + rng.normal(0, 2, (len(coarse), *shape))
        images = np.resize(smooth.clamp(0, 255).to(torch.uint8).numpy(), (n_rows, *shape))
        partial = path.with_suffix(".partial")
        with h5py.File(partial, "w") as file:
            chunks = (min(n_rows, BLOCK_BYTES // images[0].nbytes), *shape)
            file.create_dataset("images", data=images, chunks=chunks, compression="gzip")
            file["labels"] = np.arange(n_rows) % 10
        partial.rename(path)
    data = {"train": str(path), "fields": {"images": "images", "labels": "labels"}, "batch_size": 64, "tier": "disk"}
    data["pool_batches"] = POOL_BATCHES
    if is_tiny:
        data["batch_size"] = 8
    model = {"width": 8 if is_tiny else 32, "flip": True}
    return write_config(folder / f"gzip-{n_rows}.yaml", "images", data, model, with_sgd=True)


def measure_echo(folder: Path, *, is_tiny: bool) -> list[dict[str, str]]:
    """A row of the page for each value of data.echo."""
    cwd = copy_project(folder)
    config = compressed_images(folder, is_tiny=is_tiny)
    rows = []
    for echo in ECHOES[1:2] if is_tiny else ECHOES:
        runs = folder / f"echo-{echo}"
        shutil.rmtree(runs, ignore_errors=True)
        words = [f"data.echo={echo}", "loader.num_readers=1", f"train.epochs={N_EPOCHS}", f"run.folder={runs}"]
        run(["train.py", "--config", config, "run.name=run", *words], cwd)
        lines = map(json.loads, (runs / "run/metrics.jsonl").read_text().splitlines())
        last = last_epoch(lines)
        util = f"{last['gpu0/util_pct']:.1f}" if "gpu0/util_pct" in last else "-"
        rows.append(
            {
                "data.echo": echo,
                "fresh rows/s": f"{last['data/fresh_rows_per_s']:,.0f}",
                "trained rows/s": f"{last['train/trained_rows_per_s']:,.0f}",
                "passes": f"{last['data/echo']:.2f}",
                "data wait %": f"{last['data/wait_pct']:.1f}",
                "GPU-Util %": util,
            }
        )
    return rows


def last_epoch(lines: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """{tag: value} of the last epoch in metrics.jsonl. One of its points may be about less than a pool."""
    epochs: list[list[Mapping[str, float]]] = [[]]
    for line in lines:
        if "seconds" in line:
            epochs[-1].append(line)
        else:  # validation
            epochs.append([])
    points = epochs[-2]
    total = Throughput()
    for point in points:
        total = total.plus(Throughput(*(point[field] for field in Throughput._fields)))
    values = total.scalars()
    utils = [(point["gpu0/util_pct"], point["seconds"]) for point in points if "gpu0/util_pct" in point]
    if utils:
        values["gpu0/util_pct"] = fmean(*zip(*utils, strict=True))
    return values


def measure_causes(folder: Path, known: Collection[str], *, is_tiny: bool) -> Iterator[dict[str, str]]:
    """A row of the page for each planted cause that is not `known` yet."""
    cwd = copy_project(folder)
    for plan in PLANTED[:1] if is_tiny else PLANTED:
        if plan.what in known:
            continue
        config = CASES[plan.case](folder).config if plan.case else compressed_images(folder, is_tiny=is_tiny)
        words = ["--config", str(config), *plan.words]
        slow = diagnose(words, folder, cwd)
        given = 1.0
        if plan.cure:
            cured = diagnose([*words, *plan.cure], folder, cwd)
            given = loop_rows_per_s(cured) / loop_rows_per_s(slow)
        verdict = slow["verdict"]
        yield {
            "planted": plan.what,
            "expected": plan.cause,
            "named": verdict["cause"],
            "feed ratio": f"{slow['feed_ratio']:.3f}",
            "change": verdict["change"],
            "gain predicted": f"{verdict['gain']:.2f}",
            "cure": " ".join(plan.cure) or "-",
            "gain given": f"{given:.2f}",
        }


def diagnose(words: list[str], folder: Path, cwd: Path) -> dict[str, Any]:
    """The numbers of diagnose.py."""
    numbers: dict[str, Any] = json.loads(run(["diagnose.py", "--json", *words, f"run.folder={folder / 'runs'}"], cwd))
    return numbers


def loop_rows_per_s(numbers: dict[str, Any]) -> float:
    return float(numbers["ceilings"]["the training loop"]["rows_per_s"])
