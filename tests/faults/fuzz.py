"""Feed damaged files of every kind to the functions that read them: each is refused in one message, or read rightly.

    make fuzz                                            10,000 files
    python tests/faults/fuzz.py --files 300              a short form
    python tests/faults/fuzz.py --only hdf5-gzip:17      one file again, with all that it said; it stays for a look

A file follows from the seed, its kind and its number. Each is read by a process of its own, which is forked from one
that has imported torch, and may use so much time and memory. Faults are: another exception than UserError, a message
that does not end, wrong rows where checksums cover them, a crash, a hang, too much memory, and files left behind.
"""

import argparse
import faulthandler
import gc
import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(path) for path in (PROJECT, ROOT / "tests/engine")]

import convert
import h5py
import numpy as np
import torch
from harness import ALONE, ITEMS, numbered, ragged
from mutations import flip, mutate
from PIL import Image
from short_run import CONFIG
from torch import nn

import workloads
from fastgpu.convert.summary import damaged
from fastgpu.convert.writer import write_rows
from fastgpu.predict.inputs import open_pools
from fastgpu.predict.model import load_model, make_rows
from fastgpu.process.config_loader import load_config, read_options
from fastgpu.process.launch import UserError, exit_with_message
from fastgpu.rows.contract import Dataset
from fastgpu.rows.rows import Field, RaggedArray
from fastgpu.run import checkpoint
from fastgpu.run.record import describe_model
from fastgpu.storage.arrays import ArrayDataset
from fastgpu.storage.store import open_store

CPU_S = 8
WALL_S = 60
MEMORY_BYTES = 2 << 30
MAX_MESSAGE_BYTES = 20_000
FAULTS = ("wrong rows", "exception", "endless message", "crash", "hang", "memory", "leftovers")
N_ROWS = 600
SAVED = Path("run/checkpoints/last-000001")


class Kind(NamedTuple):
    """A kind of file, and who reads it. Both functions work in the current folder."""

    make: Callable[[], object]
    """Writes whole files."""
    use: Callable[[], object]
    """Reads them. Returns a digest of what was read, where `is_covered`."""
    files: str
    """Those of which one is damaged, with spaces between them."""
    weight: int = 1
    is_covered: bool = False
    """Whether checksums cover what is read."""
    is_text: bool = False
    is_flipped_only: bool = False


# ---------------------------------------------------------------------------------------------- whole files


def make_hdf5(compression: str) -> None:
    fields = {"images": Field(np.dtype(np.uint8), (1, 8, 8)), "labels": Field(np.dtype(np.int64), ())}
    attributes = {"class_names": ["cat", "dog", "owl"], "source": "made up", "mean": [0.5], "std": [0.25]}
    rows = {"images": numbered(N_ROWS, (1, 8, 8)), "labels": np.arange(N_ROWS) % 3}
    write_rows(Path("x.h5"), N_ROWS, fields, [rows], attributes=attributes, compression=compression)


def make_csr() -> None:
    fields = {"items": Field(np.dtype(np.int32), (), 2.0, ITEMS)}
    write_rows(Path("x.h5"), N_ROWS, fields, [{"items": ragged(range(N_ROWS))}], attributes={})


def make_foreign() -> None:
    """As other programs write it: without checksums of rows or of what describes them, and with texts of any length."""
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("images", data=numbered(N_ROWS, (1, 8, 8)), chunks=(50, 1, 8, 8), compression="gzip")
        file["labels"] = np.arange(N_ROWS) % 3
        file.attrs["class_names"] = ["cat", "dog", "owl"]
        file.attrs["mean"] = [0.5]


def make_config() -> None:
    shutil.copyfile(PROJECT / "config.yaml", "config.yaml")
    words = ["optim.lr=1e-3", "data.fields={images: x, labels: y}", "log.wandb=mine", "data.train=a.h5"]
    Path("words").write_text("\n".join(words))


def make_images(suffix: str = "png") -> None:
    lines = []
    for number, image in enumerate(numbered(6, (3, 16, 16))):
        path = Path(f"photos/{'ab'[number % 2]}/{number}.{suffix}")
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.transpose(1, 2, 0)).save(path)
        lines.append(f"{path},{'cat' if number % 2 else 'dog'},{number % 2},{number // 3}")
    Path("images.csv").write_text("\n".join(["path,label,smile,hat", *lines]) + "\n")


def make_arrays() -> None:
    np.save("x.npy", numbered(40))
    np.savez("y.npz", x=np.zeros((40, 6), np.float32), labels=np.arange(40))


def make_checkpoint(*, has_state: bool = True) -> None:
    """One checkpoint of the workload `minimal`, in the folder `run`."""
    torch.manual_seed(0)
    state = new_state()
    state["model"](torch.ones(1, 6)).sum().backward()
    state["optimizer"].step()
    source = ArrayDataset("made up", {"x": np.zeros((2, 6), np.float32), "y": np.zeros(2, np.float32)})
    card = describe_model(CONFIG.flat(), source, source, {})
    progress = checkpoint.Progress(epoch=2, pool=64, step=7, best=98.5, metric="val/mse")
    SAVED.parent.mkdir(parents=True, exist_ok=True)
    checkpoint.save(Path("run"), "last", progress, state, card=card | {"order": {"rows": 10}})
    if not has_state:
        (SAVED / "state.json").unlink()


def new_state() -> dict[str, Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}


# ---------------------------------------------------------------------------------------------- readers


def digest(source: Dataset) -> str:
    """SHA-256 of all rows, read in the order of the source as pools on a device."""
    hashes = {name: hashlib.sha256(str((field.dtype, field.shape)).encode()) for name, field in source.fields.items()}
    with open_pools(source, 16, ALONE.device) as pools:
        for pool in pools:
            columns: Mapping[str, Any] = pool.rows.slice(0, pool.plan.n_real_rows).numpy()
            for name, column in columns.items():
                values = column
                if isinstance(column, RaggedArray):
                    hashes[name].update(np.diff(column.offsets).tobytes())
                    values = column.values[column.offsets[0] : column.offsets[-1]]
                hashes[name].update(np.ascontiguousarray(values).tobytes())
    return " ".join(found.hexdigest() for found in hashes.values())


def read_hdf5(*fields: str, verify: bool = True) -> str:
    if verify and (damages := damaged("x.h5")):
        raise UserError(damages[0])
    return digest(open_store("data.train", "x.h5", {name: name for name in fields}))


def read_config(words: str = "") -> None:
    text = Path(words).read_text("utf-8", "surrogateescape") if words else ""
    config = load_config(["--config", "config.yaml", *text.replace("\0", "").splitlines()])
    read_options(config, workloads.load(config.workload).Options)


def read_checkpoint() -> str:
    state = new_state()
    path = checkpoint.find_intact(Path("run"))
    progress = checkpoint.load(path, state, {"rows": 10}, torch.device("cpu")) if path else None
    values = [value for part in state.values() for value in torch.utils._pytree.tree_leaves(part.state_dict())]
    return str((progress, [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]))


def read_model() -> str:
    trained = load_model(SAVED)
    trained.workload.predict(trained.model, make_rows(trained, 2))
    return str([value.tolist() for value in trained.model.state_dict().values()]) + json.dumps(trained.card)


def command(words: str) -> Callable[[], object]:
    """A command of convert.py."""
    return partial(convert.main, convert.parse(words.split()))


def hdf5(use: Callable[[], object], weight: int, compression: str = "none", *, is_covered: bool = True) -> Kind:
    return Kind(partial(make_hdf5, compression), use, "x.h5", weight, is_covered=is_covered)


STATES = f"{SAVED}/state.json {SAVED}/model.pt {SAVED}/optimizer.pt"
WEIGHTS = f"{SAVED}/model.json {SAVED}/model.safetensors"
MODEL = f"{WEIGHTS} {SAVED}/state.json"
read_images = partial(read_hdf5, "images", "labels")
KINDS = {
    "hdf5": hdf5(read_images, 4),
    "hdf5-gzip": hdf5(read_images, 4, "gzip"),
    "hdf5-csr": Kind(make_csr, partial(read_hdf5, "items"), "x.h5", 3, is_covered=True),
    "hdf5-foreign": Kind(make_foreign, partial(read_images, verify=False), "x.h5", 4),
    "config": Kind(make_config, read_config, "config.yaml", 4, is_text=True),
    "command-line": Kind(make_config, partial(read_config, "words"), "words", 2, is_text=True),
    "csv-images": Kind(make_images, command("images images.csv out.h5"), "images.csv", 3, is_text=True),
    "npy": Kind(make_arrays, command("arrays images=x.npy out.h5"), "x.npy"),
    "npz": Kind(make_arrays, command("arrays y.npz out.h5"), "y.npz"),
    "png": Kind(make_images, command("images photos out.h5 --size 8"), "photos/a/0.png"),
    "jpg": Kind(partial(make_images, "jpg"), command("images photos out.h5 --size 8"), "photos/a/0.jpg"),
    "checkpoint": Kind(make_checkpoint, read_checkpoint, STATES, 2, is_covered=True),
    "checkpoint-flips": Kind(make_checkpoint, read_checkpoint, STATES, 6, is_covered=True, is_flipped_only=True),
    "model": Kind(make_checkpoint, read_model, MODEL, 2, is_covered=True),
    "model-flips": Kind(make_checkpoint, read_model, MODEL, 6, is_covered=True, is_flipped_only=True),
    "model-copy": Kind(partial(make_checkpoint, has_state=False), read_model, WEIGHTS, 2),
}


# ---------------------------------------------------------------------------------------------- one file


def attempt(folder: Path, work: Callable[[], object]) -> tuple[str, str]:
    """(outcome, details) of a function that a process of its own calls in a folder. What it said is in `said`."""
    report = folder / ".report"
    report.unlink(missing_ok=True)
    pid = os.fork()
    if not pid:
        try:
            limit(folder)
            report.write_text(json.dumps(outcome_of(work)))
        finally:
            os._exit(0)
    _, status = os.waitpid(pid, 0)
    words = (folder / "said").read_text(errors="replace")
    if os.WIFSIGNALED(status):
        number = signal.Signals(os.WTERMSIG(status))
        outcome = "hang" if number in (signal.SIGALRM, signal.SIGXCPU) else "crash"
        places = re.findall(r"fastgpu/(\S+)\", line (\d+)", words)
        return outcome, f"{words[-3000:]}\n{number.name} at {':'.join(places[0]) if places else 'an unknown place'}"
    if not report.exists():  # there was no memory left to say so
        return "memory", f"{words[-2000:]}\nended without a report"
    outcome, details = json.loads(report.read_text())
    if outcome in ("refused", "accepted") and any(folder.glob("*partial*")):
        return "leftovers", str([path.name for path in folder.glob("*partial*")])
    if outcome == "refused":
        if "error: " not in words and "damaged" not in words:
            return "exception", f"ended with {details} without a message: {words[-500:]}"
        return ("endless message", words[:500]) if len(words) > MAX_MESSAGE_BYTES else (outcome, words[-500:])
    return outcome, details


def limit(folder: Path) -> None:
    """Go to the folder, write output to `said`, and end this process once it has used too much."""
    os.chdir(folder)
    with Path("said").open("w") as said, Path(os.devnull).open() as empty:
        os.dup2(empty.fileno(), 0)
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + MEMORY_BYTES,) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 2))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for number in (signal.SIGXCPU, signal.SIGALRM):
        faulthandler.register(number, chain=True)  # say where, and end
    signal.alarm(WALL_S)


def outcome_of(work: Callable[[], object]) -> tuple[str, str]:
    try:
        with exit_with_message():
            value = work()
    except SystemExit as error:
        return ("refused", str(error.code)) if error.code else ("accepted", "")
    except BaseException as error:
        is_memory = isinstance(error, MemoryError) or "allocate memory" in str(error)
        return "memory" if is_memory else "exception", traceback.format_exc()[-3000:]
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return ("refused", "1") if value == 1 else ("accepted", str(value))


def damage(kind: str, number: int, seed: int, folder: Path) -> None:
    """Damage a whole file of this kind in the folder."""
    rng = random.Random(f"{seed}:{kind}:{number}")
    path = folder / rng.choice(KINDS[kind].files.split())
    data = path.read_bytes()
    damaged = data
    while damaged == data:
        is_text = KINDS[kind].is_text or path.suffix == ".json"
        damaged = flip(data, rng) if KINDS[kind].is_flipped_only else mutate(data, rng, is_text=is_text)
    path.write_bytes(damaged)


def try_file(base: Path, seed: int, expected: Mapping[str, str], case: tuple[str, int]) -> tuple[str, int, str, str]:
    """Damage a copy of a whole file, and let it be read. Returns kind, number, outcome, details."""
    kind, number = case
    folder = base / f"{kind}-{number}"
    shutil.copytree(base / kind, folder)
    damage(kind, number, seed, folder)
    outcome, details = attempt(folder, KINDS[kind].use)
    if outcome == "accepted" and KINDS[kind].is_covered and details != expected[kind]:
        outcome = "wrong rows"
    shutil.rmtree(folder)
    return kind, number, outcome, details


def make_whole(base: Path) -> dict[str, str]:
    """Write whole files of every kind. Returns {kind: digest of what is read}."""
    expected = {}
    for name, kind in KINDS.items():
        folder = base / name
        folder.mkdir()
        for work in (kind.make, kind.use):
            outcome, details = attempt(folder, work)
            if outcome != "accepted":
                sys.exit(f"error: a whole file of the kind {name} is not accepted: {outcome} {details}")
        expected[name] = details
        for path in folder.glob("out*"):
            path.unlink()
    return expected


# ---------------------------------------------------------------------------------------------- all files


def choose(n_files: int) -> list[tuple[str, int]]:
    """(kind, number) of each file: kinds by their weights, and at least one of each."""
    total = sum(kind.weight for kind in KINDS.values())
    return [(name, n) for name, kind in KINDS.items() for n in range(max(1, round(n_files * kind.weight / total)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--only", metavar="KIND[:NUMBER]", default="", help="this kind; or one file, which is kept")
    args = parser.parse_args()
    for path in (PROJECT / "fastgpu/convert").rglob("[a-z]*.py"):  # all that is imported late, once for all processes
        import_module(".".join(path.relative_to(PROJECT).with_suffix("").parts))
    Image.init()
    new_state()
    gc.freeze()
    base = Path(tempfile.mkdtemp(prefix="fuzz-"))
    expected = make_whole(base)
    kind, _, number = args.only.partition(":")
    if number:
        damage(kind, int(number), args.seed, base / kind)
        print(*attempt(base / kind, KINDS[kind].use), f"the file is in {base / kind}", sep="\n")
        return 0
    cases = [(kind, number) for number in range(args.files)] if kind else choose(args.files)
    counts: Counter[tuple[str, str]] = Counter()
    try:
        with ProcessPoolExecutor(args.jobs, get_context("fork")) as pool:
            for name, n, outcome, details in pool.map(partial(try_file, base, args.seed, expected), cases, chunksize=4):
                counts[name, outcome] += 1
                if outcome in FAULTS:
                    print(f"{outcome}: --only {name}:{n}: {details.splitlines()[-1][:200]}", flush=True)
    finally:
        shutil.rmtree(base)
    for (name, outcome), n_files in sorted(counts.items()):
        print(f"{name:20}{outcome:16}{n_files:8,}")
    n_faults = sum(n_files for (_, outcome), n_files in counts.items() if outcome in FAULTS)
    print(f"{n_faults} faults in {len(cases):,} damaged files")
    return int(n_faults > 0)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with suppress(KeyboardInterrupt):
        sys.exit(main())
