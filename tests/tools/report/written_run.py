"""The folder of a run, written without one."""

import json
from pathlib import Path

VALUES = {
    "train/loss": 0.5,
    "train/lr": 0.003,
    "data/wait_pct": 3.0,
    "data/fresh_rows_per_s": 12_345.6,
    "train/trained_rows_per_s": 24_691.2,
    "host/cpu_user_pct": 12.0,
    "gpu0/util_pct": 97.0,
    "gpu0/util_min_pct": 80.0,
    "gpu1/util_pct": 50.0,
    "gpu0/power_w": 300.0,
}


def write_points(folder: Path, points: list[dict[str, float]]) -> Path:
    """metrics.jsonl in a folder, which is made. Points that say nothing else are of part 1."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"part": 1} | point) + "\n" for point in points))
    return folder


def write_run(folder: Path) -> Path:
    """A run's folder. The values of its tags rise a little from each point to the next."""
    points = [
        {"step": number, "time_s": 10.0} | {tag: value * (1 + number / 1000) for tag, value in VALUES.items()}
        for number in range(5)
    ]
    write_points(folder, [*points, {"step": 5, "time_s": 50.0, "val/loss": 0.25, "val/top1_pct": 99.0}])
    (folder / "config.yaml").write_text("workload: images\ndata: {batch_size: 32}  # <b>&\nmodel: {width: 8}\n")
    (folder / "run.json").write_text(json.dumps({"best": ["top1_pct", "higher"]}))
    return folder
