"""The folder of a run, written without one."""

import json
from pathlib import Path

VALUES = {
    "train/loss": 0.5,
    "data/wait_pct": 3.0,
    "data/fresh_rows_per_s": 12_345.6,
    "train/trained_rows_per_s": 24_691.2,
    "host/cpu_user_pct": 12.0,
    "gpu0/util_pct": 97.0,
    "gpu0/util_min_pct": 80.0,
    "gpu1/util_pct": 50.0,
    "gpu0/sm_active_pct": 61.0,
    "gpu0/power_w": 300.0,
}


def write_points(folder: Path, points: list[dict[str, float]]) -> Path:
    """metrics.jsonl in a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(point) + "\n" for point in points))
    return folder


def write_run(folder: Path, n_points: int = 5) -> Path:
    """A run's folder. The values of its tags rise a little from each point to the next."""
    points = []
    for number in range(n_points):
        values = {tag: value * (1 + number / 1000) for tag, value in VALUES.items()}
        points.append({"step": number, "time_s": 10.0 * number} | values)
    points.append({"step": n_points, "time_s": 10.0 * n_points, "val/loss": 0.25, "val/top1_pct": 99.0})
    write_points(folder, points)
    (folder / "config.yaml").write_text("workload: images\ndata: {batch_size: 64}  # <b>&\nmodel: {width: 8}\n")
    description = {"command": ["train.py"], "best": ["top1_pct", "higher"]}
    (folder / "run.json").write_text(json.dumps(description))
    return folder
