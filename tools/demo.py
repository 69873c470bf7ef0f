"""`make demo`: bake the template for one workload into build/demo and train the project there.

python tools/demo.py images | recsys

Uses every GPU, or two gloo processes on a CPU, and ends with what to look at. Exits as torchrun does.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

import h5py
import torch
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build"


def main(workload: str) -> int:
    shutil.rmtree(BUILD / "demo", ignore_errors=True)
    answers = {"project_slug": "demo", "workload": workload}
    cookiecutter(str(ROOT), no_input=True, output_dir=str(BUILD), extra_context=answers)
    processes = torch.cuda.device_count() or 2
    command = ["torchrun", "--standalone", f"--nproc-per-node={processes}", "train.py", "run.name=demo"]
    print(f"$ cd build/demo && {' '.join(command)}", flush=True)
    t0 = time.monotonic()
    threads = str(max(1, (os.cpu_count() or 1) // processes))
    command[0] = str(Path(sys.executable).with_name("torchrun"))
    done = subprocess.run(command, cwd=BUILD / "demo", env={"OMP_NUM_THREADS": threads} | os.environ, check=False)
    if done.returncode:
        return done.returncode
    lines = [json.loads(line) for line in (BUILD / "demo/runs/demo/metrics.jsonl").read_text().splitlines()]
    rows_per_s, wait_pct = (
        statistics.median(line[tag] for line in lines if tag in line)
        for tag in ("data/fresh_rows_per_s", "data/wait_pct")
    )
    result = f"validation accuracy  {lines[-1].get('val/top1_pct', 0):.2f} %"
    if workload == "recsys":
        with h5py.File(BUILD / "demo/data/interactions-val.h5") as file:
            known = [file.attrs[f"{name}_ndcg_at_100"] for name in ("popularity", "oracle")]
        scores = (
            f"{lines[-1]['val/ndcg_at_100']:.3f}; popularity {known[0]:.3f}, the law behind the data {known[1]:.3f}"
        )
        result = f"NDCG@100             {scores}"
    print(
        f"\n{result}\n"
        f"fresh rows           {rows_per_s:,.0f} a second (median)\n"
        f"data wait            {wait_pct:.1f} % of the time (median)\n"
        f"training took        {time.monotonic() - t0:.0f} s, start-up included\n"
        f"charts               .venv/bin/tensorboard --logdir build/demo/runs    then open http://localhost:6006\n"
        f"the project          build/demo: edit config.yaml, run ../../.venv/bin/python train.py"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
