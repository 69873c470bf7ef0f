"""What data echoing costs in accuracy: echo 1, 2 and 4 at equally many fresh rows, and at equally many steps.

Trains the digits and the users of the template, five seeds each, with the shipped configs but for the number of epochs.
"""

import json
import os
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import NamedTuple

import publish
from peers import PROJECT

SEEDS = range(5)
ECHOES = (1, 2, 4)


class Case(NamedTuple):
    """A config, and the epochs of a run without echo."""

    words: list[str]
    epochs: int
    metric: str


CASES = {
    "digits, top1 %": Case([], 8, "val/top1_pct"),
    "users, NDCG@100": Case(["--config", "configs/recsys.yaml"], 12, "val/ndcg_at_100"),
}


def result_of(case: Case, echo: int, epochs: int, *, seed: int, folder: Path) -> float:
    """The metric after the last epoch of a run."""
    run = folder / f"{case.metric.replace('/', '-')}-{echo}-{epochs}-{seed}"
    if not run.exists():
        settings = [f"data.echo={echo}", f"train.epochs={epochs}", f"run.seed={seed}", f"run.name={run.name}"]
        command = [sys.executable, "train.py", *case.words, *settings, f"run.folder={folder}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        subprocess.run(command, cwd=PROJECT, env=environment, stdout=sys.stderr, check=True)
    points = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [point[case.metric] for point in points if case.metric in point][-1]


def main() -> None:
    """Train, and write the page."""
    args = publish.parser(__doc__).parse_args()
    seeds = SEEDS[:1] if args.quick else SEEDS
    rows, data = [], {}
    with tempfile.TemporaryDirectory() as name:
        for (text, case), echo in product(CASES.items(), ECHOES):
            n_epochs = ECHOES[-1] if args.quick else case.epochs
            found = {
                epochs: [result_of(case, echo, epochs, seed=seed, folder=Path(name)) for seed in seeds]
                for epochs in (n_epochs, n_epochs // echo)
            }
            data[f"{text}, echo {echo}"] = found
            form = ".2f" if "%" in text else ".3f"
            cells = [publish.spread(values, form) for values in (found[n_epochs], found[n_epochs // echo])]
            rows.append([text, str(echo), *cells])
    columns = ["data", "data.echo", "equally many fresh rows", "equally many steps"]
    lengths = ", ".join(f"{text}: {case.epochs} epochs without echo" for text, case in CASES.items())
    note = (
        f"The metric of the validation rows after the last epoch: median of {len(seeds)} seeds, lowest and highest. "
        "With equally many fresh rows, a run with echo takes echo times as many steps; with equally many steps, it "
        f"reads 1 / echo of the rows. {lengths}."
    )
    publish.write_result("echo", [publish.Table("accuracy with echo", columns, rows, note)], data, args)


if __name__ == "__main__":
    main()
