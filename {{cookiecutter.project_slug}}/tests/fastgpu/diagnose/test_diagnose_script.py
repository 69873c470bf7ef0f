"""The command, on real data and real processes; what it concludes is tested in test_ceilings.py."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml
from harness import ROOT, in_world

from fastgpu.process import machine
from fastgpu.process.world import World

QUICK = ("--seconds", "0.05", "train.precision=fp32")


def diagnose(*arguments: str, cwd: Path, ranks: int = 1) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    data = [f"data.train={ROOT / 'data/digits.h5'}::/train", f"data.val={ROOT / 'data/digits.h5'}::/val"]
    config = ["--config", str(ROOT / "config.yaml")]
    return subprocess.run(
        [sys.executable, *launcher, str(ROOT / "diagnose.py"), *config, *QUICK, *data, *arguments],
        cwd=cwd,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_table_a_picture_and_a_profile(tmp_path):
    done = diagnose("data.tier=disk", "--plot", "x.png", "--trace", "3", "--min-feed", "0.01", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for part in ("compute", "supply from the page cache", "supply", "the training loop", "feed ratio"):
        assert f"{part} " in done.stdout
    assert (tmp_path / "x.png").stat().st_size > 1000
    events = json.loads((tmp_path / "runs" / "trace.json").read_text())["traceEvents"]
    assert sum("Optimizer.step" in event.get("name", "") for event in events) == 3
    assert json.loads((tmp_path / "runs" / "diagnosis.json").read_text())["world"] == "1 CPU process, 72 B"


def test_two_ranks_as_json_and_an_exit_code_for_a_script(tmp_path):
    done = diagnose("--json", "--min-feed", "1", cwd=tmp_path, ranks=2)
    found = json.loads(done.stdout)
    assert done.returncode == (found["feed_ratio"] < 1)
    assert found["world"] == "2 CPU processes over gloo, 72 B"
    assert len(found["measured"]["ranks_compute_s"]) == 2
    assert found["verdict"]["cause"]


def test_wrong_words_end_in_one_line(tmp_path):
    for words, said in {
        ("--plot", "x.pdf"): "--plot is x.pdf; it should end in .html or .png",
        ("--seconds", "0"): "--seconds is 0; it should be above 0 and below an hour",
        ("--seconds", "nan"): "--seconds is nan; it should be above 0",
        ("--min-feed", "95"): "--min-feed is 95; it should be a ratio from 0 to 1, such as 0.95",
        ("--trace", "-1"): "--trace is -1; it should be a number of steps",
        ("--seconds", "soon"): "invalid float value: 'soon'",
        ("--batch",): "--batch says what --tune may change; give both",
        ("data.reader=1",): "did you mean loader.num_readers?",
        ("--quick",): '"--quick" is not understood',
        ("data.train=none.h5",): "none.h5 does not exist",
    }.items():
        done = diagnose(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr, done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_help_names_every_flag():
    done = subprocess.run([sys.executable, "diagnose.py", "-h"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    source = (ROOT / "diagnose.py").read_text()
    for flag in ("--json", "--tune", "--batch", "--seconds", "--min-feed", "--plot", "--trace"):
        assert flag in done.stdout
        assert f'"{flag}"' in source


def test_what_is_not_the_bottleneck_is_not_tuned(tmp_path):
    done = diagnose("--tune", "data.tier=device", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "supplying rows is not what holds this up; there is nothing to tune" in done.stdout
    assert not list(tmp_path.glob("tuned.*"))


SLOW_DATASET = """
import time
import numpy as np
from torch.utils.data import Dataset

class Slow(Dataset):
    class_names = ["a", "b"]

    def __init__(self, path):
        self.images, self.labels = np.load(path), np.zeros(512, np.int64)

    def __len__(self):
        return 512

    def __getitem__(self, row):
        time.sleep(0.002)
        return self.images[row], 0
"""


@pytest.mark.slow
def test_a_slow_dataset_is_named_and_tuned(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW_DATASET)
    np.save(tmp_path / "x.npy", np.random.default_rng(0).integers(0, 255, (512, 1, 8, 8), np.uint8))
    slow = ["data.dataset=slow:Slow", "data.train=x.npy", "data.val=x.npy", "model.width=4", "data.batch_size=16"]
    done = diagnose(*slow, "loader.num_workers=1", "--tune", "--seconds", "0.2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "DECODE" in done.stdout
    assert "decode once instead of in each epoch: python convert.py repack --dataset slow:Slow x.npy" in done.stdout
    (overlay,) = tmp_path.glob("tuned.*.yaml")
    tuned = yaml.safe_load(overlay.read_text())
    assert tuned["loader"]["workers"] > 1
    rates = dict(
        re.findall(r"^# loader.num_workers=(\d+): ([\d,]+) rows/s supplied", overlay.read_text(), re.MULTILINE)
    )
    supplied = {int(workers): int(rate.replace(",", "")) for workers, rate in rates.items()}
    assert supplied[tuned["loader"]["workers"]] > 1.5 * supplied[1]


def _shares_gradients(world: World) -> list[float]:
    """A gradient of this rank after a step of diagnose.py's, which must be every rank's."""
    sys.path.insert(0, str(ROOT))
    os.chdir(ROOT)
    from diagnose import Bench

    bench = Bench([*QUICK[2:], "model.width=4"], world, 0.01)
    found = list[float]()
    first = next(bench.model.parameters())
    bench.step._optimizer.register_step_pre_hook(lambda *_: found.append(first.grad.double().sum().item()))
    for _ in range(2):
        bench.parts.step(bench.transform(bench.batch))
    return found


def _with_room(world: World) -> tuple[str, str]:
    """What a rank settles on whose machine has other CPUs, and other memory, than the other's."""
    from fastgpu.diagnose import tune
    from fastgpu.feed import sizes as auto
    from fastgpu.storage.store import open_store

    machine.available_cpus = lambda: 2 + 6 * world.rank
    rows = open_store("data.train", f"{ROOT}/data/digits.h5::/train", {"images": "images", "labels": "labels"})
    found = []
    for tier in ("disk", "host" if world.rank else "disk"):
        sizes = auto.sizes(rows, rows, 2, 1, world.device, 1, tier, 64, "auto", "auto", "auto", "auto", 2, 2)
        found.append(tune.settle_readers(rows, sizes, world, 0).readers)
    return tuple(found)


def test_ranks_of_unlike_machines_agree_on_what_to_try():
    (first, first_apart), (second, second_apart) = in_world(2, _with_room)
    assert first == second  # tried together
    assert (first_apart, second_apart) == (2, 8)  # nothing was tried: one of them reads from RAM


def test_ranks_share_gradients_while_they_are_measured():
    first, second = in_world(2, _shares_gradients)
    assert first
    assert first == second
