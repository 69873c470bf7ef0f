"""Goldens: what must not change while the code does.

python tests/goldens/goldens.py                      all: g1, g2, g4 against goldens.json, g3 against the base commit
python tests/goldens/goldens.py --only g1:ragged g4  some: the beginnings of their names
python tests/goldens/goldens.py --write              g1 and g2: write goldens.json

    g1  which row comes when: SHA-256 of the row numbers of epochs 0 and 1, for nine kinds of rows, on 1, 2, 4 and 8
        ranks, fresh and resumed inside epoch 0; and of the validation rows
    g2  SHA-256 of the bytes of the batches, which are the same on the device, the host and the disk tier
    g3  SHA-256 of the weights after about 60 steps of digits and of interactions, echoed 1, 2 and 2.5 times, on 1, 2
        and 4 ranks. Kernels of floats differ among CPUs, so nothing is stored: the base commit trains on this machine,
        and this tree has to reach the same weights, uninterrupted and after SIGKILL inside an epoch
    g4  mistakes in the config: exit code 2, and one line that names the key or the file

Rows carry their numbers, so g1 reads them from the batches: it holds for whatever plans and reads them. Pixels of JPEG
files are compared only where the versions of the decoders are those of goldens.json.
"""

import argparse
import atexit
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, chdir, closing, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import numpy as np
import torch
import yaml

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = "{{cookiecutter.project_slug}}"
PROJECT = ROOT / FOLDER
STORED = HERE / "goldens.json"
sys.path[:0] = [str(PROJECT), str(ROOT / "tests" / "engine")]

import harness
import train
from PIL import Image

from fastgpu.feed import sizes, sources, tiers
from fastgpu.process.config import Config
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import Launch, exit_with_message
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard

WORLDS = (1, 2, 4, 8)
N_ROWS = 700
BATCH_SIZE = 32
POOL_BATCHES = 3
RESUMED_AT = 2  # the pool of epoch 0 with which the resumed run begins
SCRATCH = Path(tempfile.mkdtemp(prefix="goldens-"))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)


@contextmanager
def opened(case: str, rank: int = 0, world_size: int = 1, *, tier: str = "disk") -> Iterator[tuple[Any, Any, int]]:
    """The feeds of the training and of the validation rows of one rank, and its batch size, as train.py opens them."""
    sections = {"data": DATA | CASES[case] | {"tier": tier}, "loader": {"num_readers": 1, "num_workers": 0}}
    cfg = Config.model_validate({"workload": "minimal", "run": {"seed": 3}, "dist": {"device": "cpu"}} | sections)
    world = World(rank, world_size, world_size, harness.CPU)
    rows, val_rows = sources.open_splits(cfg.data, cfg.run.seed)
    chosen = sizes.choose_sizes(cfg, rows, val_rows, world)
    size, pools = chosen.batch_size, chosen.pool_batches
    shard, val_shard = Shard(rank, world_size, chosen.canonical_ranks), Shard(rank, world_size)
    order = BlockSampler(rows, size, shard=shard, pool_batches=pools, seed=cfg.run.seed)
    val_order = BlockSampler(val_rows, size, shard=val_shard, pool_batches=pools, seed=None, drop_last=False)
    feeds = tiers.open_loaders((rows, val_rows), (order, val_order), chosen, harness.CPU, loader=cfg.loader)
    with closing(feeds[0]), closing(feeds[1]):
        yield *feeds, size


def batches(feed: Any, batch_size: int, epoch: int, first: int = 0) -> Iterator[dict[str, list[np.ndarray]]]:
    """{field: [array], or [values, offsets] of ragged rows} of each batch, beginning with pool number `first`."""
    for pool in feed.pools(epoch, first):
        for batch in pool.rows.batches(batch_size):
            yield {name: arrays_of(batch[name]) for name in sorted(batch.columns)}


def arrays_of(column: Any) -> list[np.ndarray]:
    if isinstance(column, torch.Tensor):
        return [column.numpy()]
    offsets = column.offsets.numpy()
    return [column.values.numpy()[: offsets[-1]], offsets]


# ------------------------------------------------------------------------------------------ rows


def write_jpegs(path: Path, rows: int, start: int = 0) -> str:
    """An HDF5 file of JPEG files of several sizes, and the `number` of each."""
    rng = np.random.default_rng(start)
    files = []
    for _ in range(rows):
        height, width = rng.integers(20, 40, 2)
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (3, 3, 3), np.uint8)).resize((width, height)).save(file, "JPEG")
        files.append(file.getvalue())
    with h5py.File(path, "w") as file:
        group = file.create_group("images")
        group.attrs["codec"] = "jpeg"
        group["indptr"] = np.cumsum([0, *map(len, files)])
        group["values"] = np.frombuffer(b"".join(files), np.uint8)
        file["number"] = np.arange(start, start + rows)
    return path.name


OWN_DATASET = """
from torch.utils.data import Dataset
from harness import numbered

class Own(Dataset):
    def __init__(self, path):
        self.images = numbered(int(path))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        return self.images[row], row % 5
"""


def write_all(folder: Path) -> None:
    """The files that the cases read. Of the labels, some are more frequent than others."""
    parts = [(f"part-{number}.h5", rows, 1000 * number) for number, rows in enumerate((300, 37, 363))]
    chunks = {"part-1.h5": 5, "part-2.h5": 40}
    for name, rows, start in [("rows.h5", N_ROWS, 0), ("val.h5", 90, 5000), *parts]:
        harness.write_rows(folder / name, rows, chunk=chunks.get(name, 16), start=start)
        with h5py.File(folder / name, "r+") as file:
            file["labels"][:] = np.arange(start, start + rows) ** 2 % 7 % 5
    harness.write_ragged(folder / "ragged.h5", N_ROWS, chunks=(64,))
    harness.write_ragged(folder / "ragged-val.h5", 90, 5000, chunks=(64,))
    write_jpegs(folder / "jpegs.h5", 400)
    write_jpegs(folder / "jpegs-val.h5", 50, 5000)
    (folder / "golden_dataset.py").write_text(OWN_DATASET)


DATA = {"train": "rows.h5", "val": "val.h5", "fields": {"images": "images", "labels": "labels"}}
DATA |= {"batch_size": BATCH_SIZE, "pool_batches": POOL_BATCHES}
PARTS = ["part-0.h5", "part-1.h5", "part-2.h5"]
RAGGED = {"train": "ragged.h5", "val": "ragged-val.h5", "fields": {"items": "items", "number": "number"}}
JPEGS = {"train": "jpegs.h5", "val": "jpegs-val.h5", "fields": {"images": "images", "number": "number"}}
DATASET = {"train": str(N_ROWS), "val": "90", "dataset": "golden_dataset:Own"}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several-files": {"train": PARTS},
    "ragged": RAGGED,
    "jpeg-centre": JPEGS | {"image_size": 16},
    "jpeg-random-part": JPEGS | {"image_size": 16, "min_crop_scale": 0.3},
    "own-dataset": DATASET,
    "validation-share": {"val": "10%"},
    "weights": {"train": {"part-0.h5": 1, "part-1.h5": 2.5, "part-2.h5": 1}},
    "balanced-classes": {"balance": "classes"},
}
"""{kind of rows: keys of the section `data`}"""
PIXELS = ("jpeg-centre", "jpeg-random-part")


def sha256(*parts: Any) -> str:
    """Of arrays with their types and shapes, and of whatever json can write."""
    digest = hashlib.sha256()
    for part in parts:
        is_array = isinstance(part, np.ndarray)
        digest.update((f"{part.dtype.str}{part.shape}" if is_array else json.dumps(part)).encode())
        digest.update(part.tobytes() if is_array else b"")
    return digest.hexdigest()[:32]


# ------------------------------------------------------------------------------------------ g1, g2: rows and bytes


class Ids(NamedTuple):
    """The row numbers of each global batch: the batches of all ranks, one rank after the other."""

    fresh: list[list[int]]
    """Epochs 0 and 1."""
    resumed: list[list[int]]
    """The same, beginning inside epoch 0."""
    val: list[list[int]]


def read_ids(case: str, world_size: int) -> Ids:
    """What all ranks see."""
    ranks = []
    for rank in range(world_size):
        with opened(case, rank, world_size) as (feed, val_feed, size):
            fresh = ids(feed, size, 0) + ids(feed, size, 1)
            resumed = ids(feed, size, 0, RESUMED_AT) + ids(feed, size, 1)
            ranks.append((fresh, resumed, ids(val_feed, size, 0)))
    of_kinds = zip(*ranks, strict=True)
    return Ids(*([list(chain(*parts)) for parts in zip(*of_ranks, strict=True)] for of_ranks in of_kinds))


def ids(feed: Any, batch_size: int, epoch: int, first: int = 0) -> list[list[int]]:
    """The row numbers of each batch of a rank. Fails if images are not those of their numbers."""
    found = batches(feed, batch_size, epoch, first)
    return [
        batch["number"][0].tolist() if "number" in batch else harness.numbers_of(batch["images"][0]) for batch in found
    ]


def g1(name: str) -> dict[str, str]:
    """{what: SHA-256} of one case, such as `ragged`."""
    found = {}
    worlds = {world_size: read_ids(name, world_size) for world_size in WORLDS}
    for world_size, all_ids in worlds.items():
        if all_ids.fresh != worlds[1].fresh:
            raise DiffersError(f"{world_size} ranks see other global batches than one")
        if all_ids.resumed != all_ids.fresh[RESUMED_AT * POOL_BATCHES :]:
            raise DiffersError(f"a run of {world_size} ranks that is resumed sees other rows than one that goes on")
        for kind, numbers in all_ids._asdict().items():
            found[f"{world_size} ranks, {kind}"] = sha256(numbers)
    return found


def sha256_of_batches(feed: Any, batch_size: int, epoch: int, first: int = 0) -> str:
    digests = []
    for batch in batches(feed, batch_size, epoch, first):  # a batch is valid until the next one is asked for
        digests += [sha256(field, *columns) for field, columns in batch.items()]
    return sha256(digests)


def g2(name: str) -> dict[str, str]:
    """{what: SHA-256} of the batches of one case, in bytes: of epoch 0, and of a rank that is resumed in epoch 1."""
    found: dict[str, list[str]] = {}
    for tier in ("disk",) if name == "jpeg-random-part" else ("disk", "host", "device"):
        with opened(name, tier=tier) as (feed, val_feed, size):
            found.setdefault("train", []).append(sha256_of_batches(feed, size, 0))
            found.setdefault("val", []).append(sha256_of_batches(val_feed, size, 0))
        with opened(name, 1, 2, tier=tier) as (feed, _, size):
            found.setdefault("train, rank 1 of 2, resumed", []).append(sha256_of_batches(feed, size, 1, RESUMED_AT))
    for split, of_tiers in found.items():
        if len(set(of_tiers)) > 1:
            raise DiffersError(f"the tiers give other {split} rows")
    return {split: of_tiers[0] for split, of_tiers in found.items()}


class DiffersError(Exception):
    """What was found is not what should be."""


def decoders() -> dict[str, str]:
    """Versions of what decodes images."""
    packages = {"Pillow": "PIL", "simplejpeg": "simplejpeg"}
    return {package: version(package) if find_spec(module) else "none" for package, module in packages.items()}


# ------------------------------------------------------------------------------------------ g3: weights

SHORT = yaml.safe_load("""
run: {name: a, checkpoint_every_steps: 4, resume: auto}
data: {pool_batches: 3, tier: disk}
loader: {num_readers: 1}
train: {precision: fp32}
dist: {device: cpu}
log: {every_steps: 10}
""")
DATA_OF = yaml.safe_load("""
digits:
  workload: images
  data: {train: "digits.h5::/train", val: "digits.h5::/val", fields: {images: images, labels: labels}, batch_size: 64}
  model: {width: 8, flip: true, crop_padding: 1}
interactions:
  workload: recsys
  data:
    train: interactions-train.h5
    val: interactions-val.h5
    fields: {items: items}
    val_fields: {items: items, held_out: held_out}
    batch_size: 200
  model: {hidden_dim: 32, latent_dim: 8}
""")
"""{data that the template ships: config}"""
EPOCHS = {1: 3, 2: 2, 2.5: 1}
"""{data.echo: train.epochs}"""


@cache
def base_project() -> Path:
    """The project of the last commit before the cuts, which docs/given-up.md names."""
    found = re.search(r"at commit `([0-9a-f]+)`", (ROOT / "docs" / "given-up.md").read_text())
    assert found, "docs/given-up.md names no commit"
    with tarfile.open(fileobj=io.BytesIO(subprocess.check_output(["git", "archive", found[1]], cwd=ROOT))) as archive:
        archive.extractall(SCRATCH / "base", filter="data")
    return SCRATCH / "base" / FOLDER


def write_short(folder: Path, name: str, echo: float) -> None:
    """config.yaml of a run, and its data."""
    config = SHORT | DATA_OF[name]
    config["data"] = SHORT["data"] | DATA_OF[name]["data"] | {"echo": echo}
    config["train"] = SHORT["train"] | {"epochs": EPOCHS[echo]}
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    for path in (PROJECT / "data").glob("*.h5"):
        (folder / path.name).symlink_to(path)


def train_short(project: Path, folder: Path, ranks: int, *, kill: bool = False) -> str:
    """Train to the end, without torchrun, which would take seconds to start; returns the SHA-256 of the weights.

    kill: all ranks get SIGKILL once a checkpoint is there, and the run is resumed.
    """
    port = harness.free_port()
    with ExitStack() as stack:
        log = stack.enter_context((folder / "log.txt").open("ab"))
        processes = []
        for rank in range(ranks):
            launch = harness.launch_variables(Launch(rank, ranks, rank, ranks), port) if ranks > 1 else {}
            environment = os.environ | launch | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
            command = harness.train_command(root=project)
            process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
            processes.append(stack.enter_context(process))
            stack.callback(process.kill)
        if kill:
            harness.wait_until(lambda: any(folder.glob("runs/a/checkpoints/last-*/state.json")), processes[0])
            for process in processes:
                process.kill()
        codes = {process.wait(600) for process in processes}
    if codes != {-signal.SIGKILL if kill else 0}:
        raise DiffersError(f"{project}: exit codes {codes}: {(folder / 'log.txt').read_text()[-500:]}")
    if kill:
        return train_short(project, folder, ranks)
    weights = harness.weights_of(folder / "runs" / "a")
    return sha256(*(part for name in sorted(weights) for part in (name, weights[name].numpy())))


def g3(name: str) -> dict[str, str]:
    """Compare this tree with the base commit: digits:echo2:ranks4"""
    data, echo, ranks = re.fullmatch(r"(\w+):echo([\d.]+):ranks(\d)", name).groups()  # type: ignore[union-attr]
    expected = ""
    for what, project in (("base", base_project()), ("this tree", PROJECT), ("killed and resumed", PROJECT)):
        folder = SCRATCH / f"{name}-{what}".replace(" ", "-").replace(":", "-")
        write_short(folder, data, float(echo))
        digest = train_short(project, folder, int(ranks), kill=what == "killed and resumed")
        expected = expected or digest
        if digest != expected:
            raise DiffersError(f"{what}: other weights than at the base commit")
    return {}


# ------------------------------------------------------------------------------------------ g4: mistakes

MISTAKES: dict[str, tuple[str, list[str], tuple[str, ...]]] = {
    # name: (YAML of a second file, words of the command line, what the line has to name)
    "misspelt key": ("data:\n  batch_siz: 5", [], ("data.batch_siz", "data.batch_size", "more.yaml:2")),
    "text for a boolean": ("", ["train.compile=maybe"], ("train.compile", "maybe")),
    "number for a text": ("run: {name: 9}", [], ("run.name",)),
    "no such optimizer": ("", ["optim.name=adamx"], ("optim.name", "adamx")),
    "no such precision": ("", ["train.precision=fp8"], ("train.precision", "fp8")),
    "negative learning rate": ("optim: {lr: -1}", [], ("optim.lr",)),
    "echo below one": ("", ["data.echo=0.5"], ("data.echo",)),
    "warmup above one": ("", ["optim.warmup_share=2"], ("optim.warmup_share",)),
    "negative epochs": ("", ["train.epochs=-1"], ("train.epochs",)),
    "negative seed": ("", ["run.seed=-1"], ("run.seed",)),
    "share as a number": ("", ["data.val=10"], ("data.val",)),
    "no such workload": ("", ["workload=minimol"], ("workload", "minimol")),
    "workload in capitals": ("", ["workload=Minimal"], ("workload", "Minimal")),
    "unknown setting of the workload": ("", ["model.hiden_dim=3"], ("model.hiden_dim",)),
    "no such file": ("", ["data.train=nowhere.h5"], ("data.train", "nowhere.h5")),
    "no such file for validation": ("", ["data.val=nowhere.h5"], ("data.val", "nowhere.h5")),
    "no file matches": ("", ["data.train=nowhere-*.h5"], ("data.train", "nowhere-*.h5")),
    "no HDF5 file": ("", ["data.train=text.h5"], ("text.h5",)),
    "no such group": ("", ["data.train=rows.h5::/training"], ("rows.h5", "training")),
    "no such field": ("", ["data.fields={x: xx, y: y}"], ("xx", "rows.h5")),
    "batch larger than the rows": ("", ["data.batch_size=4096"], ("data.batch_size", "4096")),
    "parts that do not divide": ("", ["optim.accumulation_steps=3"], ("data.batch_size", "optim.accumulation_steps")),
    "no such Dataset": ("", ["data.dataset=nowhere:Rows"], ("data.dataset", "nowhere")),
    "balance without labels": ("", ["data.balance=classes"], ("data.balance", "labels")),
    "no GPU": ("", ["dist.device=gpu"], ("dist.device", "gpu")),
}
"""Those that a file of YAML or a command line can have by itself are in tests/engine/process/test_config_loader.py."""


def g4(name: str) -> dict[str, str]:
    """Exit code 2 and one line that names the place of the mistake, of train.py up to the first step."""
    text, words, named = MISTAKES[name.replace("-", " ")]
    Path("more.yaml").write_text(text)
    Path("text.h5").write_text("no rows")
    stderr = io.StringIO()
    code: object = None
    try:
        with redirect_stderr(stderr), redirect_stdout(io.StringIO()), exit_with_message():
            train.build(load_config(["--config", "config.yaml", "--config", "more.yaml", *words]), harness.ALONE)
    except SystemExit as end:
        code = end.code
    lines = [line for line in stderr.getvalue().splitlines() if not line.startswith("warning:")]
    is_right = code == 2 and len(lines) == 1 and lines[0].startswith("error: ")
    if not is_right or not all(word in lines[0] for word in named):
        raise DiffersError(f"exit code {code}; {named} should be named: {lines}")
    return {}


# ------------------------------------------------------------------------------------------ all of them

GROUPS: dict[str, tuple[Callable[[str], dict[str, str]], list[str]]] = {
    "g1": (g1, list(CASES)),
    "g2": (g2, list(CASES)),
    "g4": (g4, [name.replace(" ", "-") for name in MISTAKES]),
    "g3": (g3, [f"{name}:echo{echo}:ranks{ranks}" for name in DATA_OF for echo in EPOCHS for ranks in (1, 2, 4)]),
}
WRITERS: dict[str, Callable[[Path], None]] = {"g1": write_all, "g2": write_all, "g4": harness.write_minimal}
NAMES = [f"{group}:{name}" for group, (_, names) in GROUPS.items() for name in names]


def compare(name: str, stored: dict[str, Any], *, write: bool) -> str:
    """What is wrong with a golden; empty if nothing is. write: keep what is found."""
    group, _, case = name.partition(":")
    folder = SCRATCH / group
    if not folder.exists():
        folder.mkdir()
        WRITERS.get(group, lambda folder: None)(folder)
    try:
        with chdir(folder):
            found = GROUPS[group][0](case)
    except Exception as error:  # one golden that breaks must not hide the others
        return f"{type(error).__name__}: {error}"
    if write and found:
        stored["goldens"][name] = found
    if not found or (group == "g2" and case in PIXELS and decoders() != stored["decoders"]):
        return ""
    expected = stored["goldens"].get(name, {})
    wrong = [what for what in expected | found if expected.get(what) != found.get(what)]
    return f"other rows: {'; '.join(wrong)}" if wrong else ""


def main() -> int:
    """Returns the exit code: 1 if a golden is not what it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--write", action="store_true", help="write goldens.json (g1 and g2)")
    args = parser.parse_args()
    beginnings = tuple(["g1", "g2"] if args.write else args.only or GROUPS)
    names = [name for name in NAMES if name.startswith(beginnings)]
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raises SystemExit, so nothing is left behind
    stored = {"goldens": {}, "decoders": decoders()} if args.write else json.loads(STORED.read_text())
    if decoders() != stored["decoders"]:
        print(f"note: pixels of JPEG files are not compared: {decoders()}, not {stored['decoders']}")
    n_wrong = 0
    for name in names:
        problem = compare(name, stored, write=args.write)
        n_wrong += bool(problem)
        if problem or name.startswith("g3"):
            print(f"{'DIFFERS' if problem else 'same'}  {name}  {problem}", flush=True)
    if args.write and not n_wrong:
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    print(f"{len(names) - n_wrong} of {len(names)} goldens hold")
    return int(n_wrong > 0 or not names)


if __name__ == "__main__":
    sys.exit(main())
