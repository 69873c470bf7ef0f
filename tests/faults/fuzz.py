"""Feed damaged files of every kind to the functions that read them: each is refused in one message, or read rightly.

    make fuzz                                          10,000 files
    python tests/faults/fuzz.py --files 500            a short form
    python tests/faults/fuzz.py flips --files 500      of one kind: bits of a checkpoint are flipped
    python tests/faults/fuzz.py --only hdf5-gzip:17    one file again, with all that it said; it stays for a look

A file follows from its kind and its number, and is read by a forked process. Faults are: another exception than
UserError, a message that does not end, wrong rows where checksums cover them, a checkpoint with a flipped bit that is
accepted, a crash, a hang, much memory, and files left behind.
"""

import argparse
import gc
import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tarfile
import tempfile
import traceback
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(path) for path in (PROJECT, ROOT / "tests")]

import h5py
import numpy as np
import polars as pl
import torch
from mutations import flip, mutate
from PIL import Image
from torch import nn

import workloads
from fastgpu.convert import command as convert
from fastgpu.convert import writer
from fastgpu.convert.summary import damaged
from fastgpu.feed import Splits, open_splits
from fastgpu.images.column import ImageCodec
from fastgpu.predict.inputs import open_batches
from fastgpu.predict.model import load_model, make_rows
from fastgpu.process.config import Data, LoaderConfig
from fastgpu.process.config_loader import load_config, read_options
from fastgpu.process.launch import UserError, exit_with_message
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.run import checkpoint
from fastgpu.run.record import describe_model
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.store import open_store
from support.ranks import ALONE
from support.rows import ITEMS, numbered, ragged, write_rows
from support.runs import SHORT_CONFIG

WALL_S = 60
MEMORY_BYTES = 2 << 30
MAX_MESSAGE_BYTES = 20_000
N_ROWS = 600
SAVED = Path("run/checkpoints/last-000001")
TEXTS = (".json", ".yaml", ".txt", ".csv")


class Kind(NamedTuple):
    """A kind of file. `make` writes whole files to the current folder, and `use` reads them and returns their digest.

    files: those of which one is damaged. is_covered: whether checksums cover what is read.
    """

    make: Callable[[], object]
    use: Callable[[], object]
    files: str
    is_covered: bool = False


# ---------------------------------------------------------------------------------------------- whole files


def make_hdf5(compression: str) -> None:
    fields = {"images": Field(np.dtype(np.uint8), (1, 8, 8)), "labels": Field(np.dtype(np.int64), ())}
    attributes = {"class_names": ["cat", "dog", "owl"], "source": "made up", "mean": [0.5], "std": [0.25]}
    rows = {"images": numbered(N_ROWS, (1, 8, 8)), "labels": np.arange(N_ROWS) % 3}
    writer.write_rows(Path("x.h5"), N_ROWS, fields, [rows], attributes=attributes, compression=compression)


def make_csr() -> None:
    fields = {"items": Field(np.dtype(np.int32), (), 2.0, ITEMS)}
    writer.write_rows(Path("x.h5"), N_ROWS, fields, [{"items": ragged(range(N_ROWS))}], attributes={})


def make_arrays() -> None:
    np.save("x.npy", numbered(40))
    np.savez("y.npz", labels=np.arange(40))


def make_foreign() -> None:
    """As other programs write it: without checksums of rows or of what describes them, and with texts of any length."""
    write_rows(Path("x.h5"), N_ROWS, (1, 8, 8), 50, compression="gzip")
    with h5py.File("x.h5", "r+") as file:
        file.attrs.update({"class_names": ["cat", "dog", "owl", "fox"], "mean": [0.5]})


def make_config() -> None:
    shutil.copyfile(PROJECT / "config.yaml", "config.yaml")
    words = ["optim.lr=1e-3", "data.fields={images: x, labels: y}", "log.wandb=mine", "data.train=a.h5"]
    Path("words.txt").write_text("\n".join(words))


def make_images(*suffixes: str) -> None:
    lines = []
    for number, image in enumerate(numbered(6, (3, 16, 16))):
        path = Path(f"photos/{'ab'[number % 2]}/{number}.{suffixes[number % len(suffixes)]}")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(path)
        lines.append(f"{path},{'cat' if number % 2 else 'dog'},{number % 2},{number // 3}")
    Path("images.csv").write_text("\n".join(["path,label,smile,hat", *lines]) + "\n")


def make_parquet() -> None:
    """Photos as the library `datasets` writes them, and columns of numbers."""
    make_images("jpg")
    photos = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted(Path("photos").rglob("*.jpg"))]
    images = pl.Series(photos, dtype=pl.Struct({"bytes": pl.Binary, "path": pl.String}))
    table = pl.DataFrame({"image": images, "label": ["cat", "dog"] * (len(photos) // 2)})
    table.write_parquet("photos.parquet", row_group_size=4)
    ints = pl.DataFrame({"x": range(40), "items": [[*range(row % 3)] for row in range(40)], "labels": [0, 1] * 20})
    ints.write_parquet("x.parquet", row_group_size=16, compression="zstd")


def make_archives() -> None:
    """Photos as a shard of WebDataset, and as a folder in a zip file."""
    make_images("jpg")
    with tarfile.open("shard.tar", "w") as shard, zipfile.ZipFile("photos.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for number, path in enumerate(sorted(Path("photos").rglob("*.jpg"))):
            archive.write(path)
            Path("label").write_text(json.dumps({"label": "cat", "age": number}))
            shard.add(path, f"{number}.jpg")
            shard.add("label", f"{number}.json")


def make_encoded() -> None:
    make_images("jpg")
    command("images photos x.h5 --keep-encoded")()


def make_checkpoint() -> None:
    """One checkpoint of the workload `minimal`, in the folder `run`."""
    torch.manual_seed(0)
    state = new_state()
    state["model"](torch.ones(1, 6)).sum().backward()
    state["optimizer"].step()
    source = ArrayDataset("made up", {"x": np.zeros((2, 6), np.float32), "y": np.zeros(2, np.float32)})
    data = Splits(source, {"val": source})
    card = describe_model(SHORT_CONFIG.flat(), data, {}, {}) | {"epoch": 2, "metrics": {"val/mse": 0.5}}
    progress = checkpoint.Progress(epoch=2, epoch_step=64, step=7, best=98.5, metric="val/mse")
    SAVED.parent.mkdir(parents=True, exist_ok=True)
    snapshot = checkpoint.take_snapshot(state)
    checkpoint.save(Path("run"), "last", progress, snapshot, card=card | {"order": {"rows": 10}})


def new_state() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


# ---------------------------------------------------------------------------------------------- readers


def digest(source: Dataset) -> str:
    """SHA-256 of all rows, read in the order of the source as pools on a device."""
    digests = hashlib.sha256(str(source.fields).encode())
    with open_batches(source, 16, ALONE.device) as batches:
        for batch in batches:
            columns: Mapping[str, Any] = batch.numpy()
            for name, rows in columns.items():
                arrays = (rows.offsets, rows.values[: rows.offsets[-1]]) if isinstance(rows, RaggedArray) else (rows,)
                digests.update(str((name, [array.tolist() for array in arrays])).encode())
    return digests.hexdigest()


def read_hdf5(*fields: str, verify: bool = True) -> str:
    if verify and (damages := damaged("x.h5")):
        raise UserError(damages[0])
    return digest(open_store("data.train", "x.h5", {name: name for name in fields}))


def read_windows(*fields: str, length: int = 16) -> str:
    """Windows that overlap, in the order of the file, without a look at its checksums."""
    names = {name: name for name in fields}
    data = Data(train="x.h5", val="x.h5", fields=names, window=length, stride=max(1, length // 3))
    _, sets = open_splits(data, LoaderConfig(num_readers=2), 0)
    return digest(sets["val"])


def read_encoded() -> str:
    fields = {"images": "images", "labels": "labels"}
    return digest(open_store("data.train", "x.h5", fields, {"images": ImageCodec((16, 16))}))


def read_config(words: str = "") -> None:
    text = Path(words).read_text("utf-8", "surrogateescape") if words else ""
    config = load_config(["--config", "config.yaml", *text.replace("\0", "").splitlines()])
    read_options(config, workloads.load(config.workload).Options)


def read_checkpoint() -> str:
    state = new_state()
    path = checkpoint.find_intact(Path("run"))
    progress = checkpoint.load(path, state, {"rows": 10}) if path else None
    values = [value for part in state.values() for value in torch.utils._pytree.tree_leaves(part.state_dict())]
    return str((progress, [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]))


def read_model() -> str:
    trained = load_model(SAVED)
    trained.workload.predict(trained.model, make_rows(trained, 2))
    return str([value.tolist() for value in trained.model.state_dict().values()]) + json.dumps(trained.card)


def command(words: str) -> Callable[[], object]:
    """A command of convert.py."""
    return lambda: convert.run(convert.parse(words.split()))


read_images = partial(read_hdf5, "images", "labels")
STATES = f"{SAVED}/state.json {SAVED}/model.pt {SAVED}/optimizer.pt"
MODEL = f"{SAVED}/model.json {SAVED}/model.safetensors {SAVED}/state.json"
PHOTOS = "photos/a/0.png photos/b/1.jpg"
KINDS = {
    "hdf5": Kind(partial(make_hdf5, "none"), read_images, "x.h5", is_covered=True),
    "hdf5-gzip": Kind(partial(make_hdf5, "gzip"), read_images, "x.h5", is_covered=True),
    "hdf5-csr": Kind(make_csr, partial(read_hdf5, "items"), "x.h5", is_covered=True),
    "hdf5-foreign": Kind(make_foreign, partial(read_images, verify=False), "x.h5"),
    "hdf5-jpeg": Kind(make_encoded, read_encoded, "x.h5"),
    "windows": Kind(partial(make_hdf5, "none"), partial(read_windows, "images", "labels"), "x.h5"),
    "windows-gzip": Kind(partial(make_hdf5, "gzip"), partial(read_windows, "images", "labels"), "x.h5"),
    "windows-csr": Kind(make_csr, partial(read_windows, "items", length=2), "x.h5"),
    "windows-foreign": Kind(make_foreign, partial(read_windows, "images", "labels"), "x.h5"),
    "config": Kind(make_config, read_config, "config.yaml"),
    "command-line": Kind(make_config, partial(read_config, "words.txt"), "words.txt"),
    "csv": Kind(partial(make_images, "png"), command("images images.csv out.h5"), "images.csv"),
    "photos": Kind(partial(make_images, "png", "jpg"), command("images photos out.h5 --size 8"), PHOTOS),
    "parquet": Kind(make_parquet, command("images photos.parquet out.h5"), "photos.parquet"),
    "parquet-numbers": Kind(make_parquet, command("arrays x.parquet out.h5"), "x.parquet"),
    "tar": Kind(make_archives, command("images shard.tar out.h5 --columns jpg,label"), "shard.tar"),
    "zip": Kind(make_archives, command("images photos.zip out.h5"), "photos.zip"),
    "arrays": Kind(make_arrays, command("arrays images=x.npy y.npz out.h5"), "x.npy y.npz"),
    "checkpoint": Kind(make_checkpoint, read_checkpoint, STATES, is_covered=True),
    "flips": Kind(make_checkpoint, read_checkpoint, f"{STATES} {MODEL}"),
    "model": Kind(make_checkpoint, read_model, MODEL, is_covered=True),
}


# ---------------------------------------------------------------------------------------------- one file


def attempt(folder: Path, work: Callable[[], object]) -> str:
    """What becomes of a function that a process of its own calls in a folder: "accepted" with what it returned,
    "refused", or a fault. What it said is in the file `said`."""
    report = folder / ".report"
    report.write_text("ended without a report: no memory")
    pid = os.fork()
    if not pid:
        try:
            report.write_text(outcome_of(folder, work))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    words = (folder / "said").read_text(errors="replace")
    outcome = report.read_text()
    if os.WIFSIGNALED(status):
        outcome = f"ended by {signal.Signals(os.WTERMSIG(status)).name}"
    elif outcome == "refused" and not ("error: " in words or "damaged" in words):
        outcome = "no message"
    elif outcome == "refused" and len(words) > MAX_MESSAGE_BYTES:
        outcome = "an endless message"
    elif "panicked at" in words:
        outcome = "more than a message"
    elif left := [path.name for pattern in ("*partial*", ".*.h5") for path in folder.glob(pattern)]:
        outcome = f"left behind: {left}"
    is_right = outcome == "refused" or outcome.startswith("accepted")
    return outcome if is_right else f"{words[-3000:]}\n{outcome}"


def outcome_of(folder: Path, work: Callable[[], object]) -> str:
    """Call a function in a folder. The output goes to `said`, and too much time or memory ends this process."""
    os.chdir(folder)
    with Path("said").open("w") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)
    signal.alarm(WALL_S)
    try:
        with exit_with_message():
            value = work()
    except SystemExit as error:
        value = error.code
    except BaseException:
        return traceback.format_exc()[-3000:]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return "refused" if value in (1, 2) else f"accepted {value}"


def damage(kind: str, number: int, folder: Path) -> None:
    """Damage a whole file of this kind in the folder."""
    rng = random.Random(f"0:{kind}:{number}")
    path = folder / rng.choice(KINDS[kind].files.split())
    data = damaged = path.read_bytes()
    while damaged == data:
        damaged = flip(data, rng) if kind == "flips" else mutate(data, rng, is_text=path.suffix in TEXTS)
    path.write_bytes(damaged)


def try_file(base: Path, expected: Mapping[str, str], case: tuple[str, int]) -> str:
    """Damage a copy of a whole file, and let it be read. Returns the outcome: one word if it is right."""
    kind, number = case
    folder = shutil.copytree(base / kind, base / f"{kind}-{number}")
    damage(kind, number, folder)
    outcome = attempt(folder, KINDS[kind].use)
    shutil.rmtree(folder)
    if not outcome.startswith("accepted"):
        return outcome
    if kind == "flips":
        return "a flipped bit is not noticed"
    return "wrong rows" if KINDS[kind].is_covered and outcome != expected[kind] else "accepted"


def make_whole(folder: Path) -> str:
    """Write whole files of the kind that the folder names. Returns the outcome of reading them."""
    folder.mkdir()
    for work in (KINDS[folder.name].make, KINDS[folder.name].use):
        outcome = attempt(folder, work)
        if not outcome.startswith("accepted"):
            sys.exit(f"error: a whole file of the kind {folder.name} is not accepted: {outcome}")
    for path in folder.glob("out*"):
        path.unlink()
    return outcome


# ---------------------------------------------------------------------------------------------- all of them


def try_all(base: Path, names: list[str], n_files: int) -> int:
    """Print how many files of each kind were accepted and refused. Returns the number of faults, which are told."""
    expected = {name: make_whole(base / name) for name in names}
    cases = [(name, number) for number in range(-(-n_files // len(names))) for name in names]
    counts: Counter[tuple[str, str]] = Counter()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("fork")) as pool:
        outcomes = pool.map(partial(try_file, base, expected), cases, chunksize=4)
        for (name, number), outcome in zip(cases, outcomes, strict=True):
            is_good = outcome in ("refused", "accepted")
            counts[name, outcome if is_good else "fault"] += 1
            if not is_good:
                print(f"fault: --only {name}:{number}: {outcome.splitlines()[-1][:200]}", flush=True)
    for (name, outcome), n_of_them in sorted(counts.items()):
        print(f"{name:20}{outcome:16}{n_of_them:8,}")
    n_faults = sum(n_of_them for (_, outcome), n_of_them in counts.items() if outcome == "fault")
    print(f"{n_faults} faults in {len(cases):,} damaged files")
    return n_faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--only", metavar="KIND:NUMBER", help="one file, which is kept")
    args = parser.parse_args()
    for path in (PROJECT / "fastgpu/convert").rglob("[a-z]*.py"):  # all that is imported late, once for all processes
        import_module(".".join(path.relative_to(PROJECT).with_suffix("").parts))
    Image.init()
    new_state()
    gc.freeze()
    if args.only:
        kind, _, number = args.only.partition(":")
        folder = Path(tempfile.mkdtemp(prefix="fuzz-")) / kind
        make_whole(folder)
        damage(kind, int(number), folder)
        print(attempt(folder, KINDS[kind].use), f"the file is in {folder}", sep="\n")
        return 0
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        return int(try_all(Path(name), args.kinds or list(KINDS), args.files) > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
