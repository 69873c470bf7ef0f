"""Goldens: which rows come when, and their bytes, are what they were.

python tests/goldens/goldens.py                      all of them
python tests/goldens/goldens.py --only g1:ragged g2  some: the beginnings of their names
python tests/goldens/goldens.py --over-http          the same, with the files on a web server
python tests/goldens/goldens.py --write              write goldens.json

    g1  which row comes when: SHA-256 of the row numbers of epochs 0 and 1, for nine kinds of rows, on 1, 2, 4 and 8
        ranks, fresh and resumed inside epoch 0; and of the validation rows
    g2  SHA-256 of the bytes of the batches, which are the same on the device, the host and the disk tier

Rows carry their numbers, so g1 reads them from the batches: it holds for whatever plans and reads them. Pixels of JPEG
files are compared only where the versions of the decoders are those of goldens.json. Weights are not stored, because
kernels of floats differ among CPUs: tests/engine/test_reference.py compares them with those of a plain loop.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, closing, contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
STORED = HERE / "goldens.json"
sys.path[:0] = [str(PROJECT), str(ROOT / "tests")]

from PIL import Image
from torch.utils.data import Dataset

from fastgpu import feed
from fastgpu.process.config import Config
from fastgpu.process.world import World
from fastgpu.rows.order import BlockSampler, Shard
from support.images import image_file, write_encoded
from support.object_store import Store, serve
from support.ranks import CPU
from support.rows import numbered, numbers_of, write_ragged, write_rows

WORLDS = (1, 2, 4, 8)
N_ROWS = 700
BATCH_SIZE = 32
POOL_BATCHES = 3
RESUMED_AT = 2  # the pool of epoch 0 with which the resumed run begins


@contextmanager
def opened(case: str, rank: int = 0, world_size: int = 1, *, tier: str = "disk") -> Iterator[tuple[Any, Any, int]]:
    """The feeds of the training and of the validation rows of one rank, and its batch size, as train.py opens them."""
    sections = {"data": DATA | CASES[case] | {"tier": tier}, "loader": {"num_readers": 1, "num_workers": 0}}
    cfg = Config.model_validate({"workload": "minimal", "run": {"seed": 3}, "dist": {"device": "cpu"}} | sections)
    world = World(rank, world_size, world_size, CPU)
    splits = feed.open_rows(cfg)
    if splits.error:
        raise splits.error
    rows, val_rows = splits.train, splits.val["val"]
    cfg = feed.resolve_auto(cfg, splits, world)
    size, pools = cfg.data.batch_size // world_size, cfg.data.pool_batches
    shard = Shard(rank, world_size, int(cfg.data.canonical_ranks))
    val_shard = Shard(rank, world_size)
    sampler = BlockSampler(rows, size, shard=shard, pool_batches=pools, seed=cfg.run.seed)
    val_sampler = BlockSampler(val_rows, size, shard=val_shard, pool_batches=pools, seed=None, drop_last=False)
    memory = feed.ResidentRows((rows, val_rows), cfg, CPU)
    feeds = feed.open_loader(rows, sampler, memory, cfg), feed.open_loader(val_rows, val_sampler, memory, cfg)
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
        corners = Image.fromarray(rng.integers(0, 256, (3, 3, 3), np.uint8))
        files.append(image_file(corners.resize((width, height))))
    return write_encoded(path, files, number=np.arange(start, start + rows))


class Own(Dataset):
    """As many numbered rows as its path says."""

    def __init__(self, path: str):
        self.images = numbered(int(path))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> tuple[np.ndarray, int]:
        return self.images[row], row % 5


def write_all(folder: Path) -> None:
    """The files that the cases read. Of the labels, some are more frequent than others."""
    parts = [(f"part-{number}.h5", rows, 1000 * number) for number, rows in enumerate((300, 37, 363))]
    chunks = {"part-1.h5": 5, "part-2.h5": 40}
    for name, rows, start in [("rows.h5", N_ROWS, 0), ("val.h5", 90, 5000), *parts]:
        write_rows(folder / name, rows, chunk=chunks.get(name, 16), start=start)
        with h5py.File(folder / name, "r+") as file:
            file["labels"][:] = np.arange(start, start + rows) ** 2 % 7 % 5
    write_ragged(folder / "ragged.h5", N_ROWS, chunks=(64,))
    write_ragged(folder / "ragged-val.h5", 90, 5000, chunks=(64,))
    write_jpegs(folder / "jpegs.h5", 400)
    write_jpegs(folder / "jpegs-val.h5", 50, 5000)


DATA = {"train": "rows.h5", "val": "val.h5", "fields": {"images": "images", "labels": "labels"}}
DATA |= {"batch_size": BATCH_SIZE, "pool_batches": POOL_BATCHES}
PARTS = ["part-0.h5", "part-1.h5", "part-2.h5"]
RAGGED = {"train": "ragged.h5", "val": "ragged-val.h5", "fields": {"items": "items", "number": "number"}}
JPEGS = {"train": "jpegs.h5", "val": "jpegs-val.h5", "fields": {"images": "images", "number": "number"}}
DATASET = {"train": str(N_ROWS), "val": "90", "dataset": "__main__:Own"}
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


def put_on_server(folder: Path) -> None:
    """Read the files over HTTP from now on."""
    _, address = serve(Store({f"/files/{path.name}": path.read_bytes() for path in folder.glob("*.h5")}))
    for section in (DATA, *CASES.values()):
        for key in section.keys() & {"train", "val"}:
            section[key] = _url_of(section[key], f"{address}/files")


def _url_of(named: Any, address: str) -> Any:
    if isinstance(named, list):
        return [_url_of(each, address) for each in named]
    if isinstance(named, dict):
        return {_url_of(each, address): weight for each, weight in named.items()}
    return f"{address}/{named}" if named.endswith(".h5") else named


def sha256(*parts: Any) -> str:
    """Of arrays with their types and shapes, and of whatever json can write."""
    digest = hashlib.sha256()
    for part in parts:
        is_array = isinstance(part, np.ndarray)
        digest.update((f"{part.dtype.str}{part.shape}" if is_array else json.dumps(part)).encode())
        digest.update(part.tobytes() if is_array else b"")
    return digest.hexdigest()[:32]


# ------------------------------------------------------------------------------------------ g1, g2: rows and bytes


def read_ids(case: str, world_size: int) -> dict[str, list[list[int]]]:
    """The row numbers of each global batch, which has the batches of all ranks one after the other: of epochs 0 and 1,
    of the same beginning inside epoch 0, and of the validation."""
    ranks: dict[str, list[list[list[int]]]] = {"fresh": [], "resumed": [], "val": []}
    for rank in range(world_size):
        with opened(case, rank, world_size) as (feed, val_feed, size):
            ranks["fresh"].append(ids(feed, size, 0) + ids(feed, size, 1))
            ranks["resumed"].append(ids(feed, size, 0, RESUMED_AT) + ids(feed, size, 1))
            ranks["val"].append(ids(val_feed, size, 0))
    return {kind: [list(chain(*parts)) for parts in zip(*of_ranks, strict=True)] for kind, of_ranks in ranks.items()}


def ids(feed: Any, batch_size: int, epoch: int, first: int = 0) -> list[list[int]]:
    """The row numbers of each batch of a rank. Fails if images are not those of their numbers."""
    return [
        batch["number"][0].tolist() if "number" in batch else numbers_of(batch["images"][0])
        for batch in batches(feed, batch_size, epoch, first)
    ]


def g1(name: str) -> dict[str, str]:
    """{what: SHA-256} of one case, such as `ragged`."""
    found: dict[str, str] = {}
    worlds = {world_size: read_ids(name, world_size) for world_size in WORLDS}
    for world_size, all_ids in worlds.items():
        if all_ids["fresh"] != worlds[1]["fresh"]:
            raise DiffersError(f"{world_size} ranks see other global batches than one")
        if all_ids["resumed"] != all_ids["fresh"][RESUMED_AT * POOL_BATCHES :]:
            raise DiffersError(f"a run of {world_size} ranks that is resumed sees other rows than one that goes on")
        found |= {f"{world_size} ranks, {kind}": sha256(numbers) for kind, numbers in all_ids.items()}
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


# ------------------------------------------------------------------------------------------ all of them

GROUPS: dict[str, Callable[[str], dict[str, str]]] = {"g1": g1, "g2": g2}
NAMES = [f"{group}:{case}" for group in GROUPS for case in CASES]


def compare(name: str, stored: dict[str, Any], *, write: bool) -> str:
    """What is wrong with a golden; empty if nothing is. write: keep what is found."""
    group, _, case = name.partition(":")
    try:
        found = GROUPS[group](case)
    except Exception as error:  # one golden that breaks must not hide the others
        return f"{type(error).__name__}: {error}"
    if write:
        stored["goldens"][name] = found
    if group == "g2" and case in PIXELS and decoders() != stored["decoders"]:
        return ""
    expected = stored["goldens"].get(name, {})
    wrong = [what for what in expected | found if expected.get(what) != found.get(what)]
    return f"other rows: {'; '.join(wrong)}" if wrong else ""


def main() -> int:
    """Returns the exit code: 1 if a golden is not what it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME")
    parser.add_argument("--over-http", action="store_true", help="read the files from a web server")
    parser.add_argument("--write", action="store_true", help="write goldens.json")
    args = parser.parse_args()
    beginnings = tuple(GROUPS if args.write else args.only or GROUPS)
    names = [name for name in NAMES if name.startswith(beginnings)]
    torch.set_num_threads(1)
    stored = {"goldens": {}, "decoders": decoders()} if args.write else json.loads(STORED.read_text())
    if decoders() != stored["decoders"]:
        print(f"note: pixels of JPEG files are not compared: {decoders()}, not {stored['decoders']}")
    n_wrong = 0
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        write_all(Path(folder))
        if args.over_http:
            put_on_server(Path(folder))
        for name in names:
            if problem := compare(name, stored, write=args.write):
                n_wrong += 1
                print(f"DIFFERS  {name}  {problem}", flush=True)
    if args.write and not n_wrong:
        STORED.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    print(f"{len(names) - n_wrong} of {len(names)} goldens hold")
    return int(n_wrong > 0 or not names)


if __name__ == "__main__":
    sys.exit(main())
