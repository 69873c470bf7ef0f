"""The project's own config and rows, for all tests. Where its files are missing, rows in the shape of the config are
made. Runs are small: batches of eight rows, on a CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pytest
from contract import ON_A_CPU

import train
from fastgpu.feed import open_rows
from fastgpu.process.config import Config
from fastgpu.process.config_loader import load_config
from fastgpu.process.launch import Launch, UserError
from fastgpu.process.world import init_distributed

PROJECT = Path(train.__file__).resolve().parent
N_ROWS = 64


def write_field(group: h5py.Group, name: str, dataset: str, config: Config) -> None:
    """Write made-up rows of a field. If your workload has fields of another kind, add them here."""
    rng = np.random.default_rng([*group.name.encode()])
    if name == "labels" and config.workload == "attributes":
        group[dataset] = rng.integers(0, 2, (N_ROWS, 5), np.uint8)
    elif name == "labels":
        group[dataset] = np.arange(N_ROWS) % 10
    elif name in ("items", "held_out"):  # of each user five of a hundred items, and five others
        items = rng.permuted(np.tile(np.arange(100), (N_ROWS, 1)), axis=1)
        group[f"{dataset}/indices"] = items[:, 5:10].ravel() if name == "held_out" else items[:, :5].ravel()
        group[f"{dataset}/indptr"] = 5 * np.arange(N_ROWS + 1)
        group[dataset].attrs["shape"] = (N_ROWS, 100)
    elif name == "images" and config.data.image_size:
        from PIL import Image

        files = [BytesIO() for _ in range(N_ROWS)]
        for file in files:
            Image.fromarray(rng.integers(0, 256, (40, 50, 3), np.uint8)).save(file, "PNG")
        group[f"{dataset}/indptr"] = np.cumsum([0, *(len(file.getvalue()) for file in files)])
        group[f"{dataset}/values"] = np.frombuffer(b"".join(file.getvalue() for file in files), np.uint8)
        group[dataset].attrs["codec"] = "png"
    elif name == "images":
        group[dataset] = rng.integers(0, 256, (N_ROWS, 3, 32, 32), np.uint8)
    else:
        group[dataset] = rng.standard_normal((N_ROWS, 4), np.float32)


def is_there(path: str) -> bool:
    """Whether a path of data.train or data.val names a share or files."""
    name = path.split("::")[0]
    return name.endswith("%") or (PROJECT / name).exists() or any(PROJECT.glob(name.lstrip("/")))


def open_parts(words: tuple[str, ...], stack: ExitStack) -> train.Training:
    """Everything that train.py with these words is made of, without a run."""
    config = load_config([*words])
    world = stack.enter_context(init_distributed(config.dist, Launch()))
    parts = train.build(config, open_rows(config), world)
    stack.callback(parts.close)
    return parts


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Words for train.py: a CPU, small batches, and made-up rows if files of config.yaml are missing."""
    config = load_config(["--config", str(PROJECT / "config.yaml")])
    data = config.data
    small = (*ON_A_CPU, f"data.batch_size={8 * config.optim.accumulation_steps}", "data.pool_batches=2")
    small += ("data.image_size=64",) * (data.image_size > 64)
    sources = (data.train, *data.val_sets.values())
    named = [path for paths in sources for path in ([paths] if isinstance(paths, str) else paths)]
    if data.dataset != "none" or all(map(is_there, named)):
        return small
    path = tmp_path_factory.mktemp("rows") / "rows.h5"
    with h5py.File(path, "w") as file:
        for split, fields in (("train", data.fields), ("val", data.val_fields or data.fields)):
            for name, dataset in fields.items():
                write_field(file.require_group(split), name, dataset, config)
    made = (*small, f"data.train={path}::/train", f"data.val={path}::/val")
    try:
        with ExitStack() as stack:
            open_parts(("--config", str(PROJECT / "config.yaml"), *made), stack).workload.model()
    except UserError as error:
        pytest.skip(f"no data, and made-up rows do not fit (see write_field in tests/conftest.py): {error}")
    return made


@pytest.fixture(autouse=True)
def project(monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the project, which is the current folder of every test."""
    monkeypatch.chdir(PROJECT)
    return PROJECT


@pytest.fixture
def config(words: tuple[str, ...], project: Path) -> Config:
    """config.yaml with these words."""
    return load_config([*words])


@pytest.fixture
def build(words: tuple[str, ...], project: Path) -> Iterator[Callable[..., train.Training]]:
    """build("model.width=8", ...) is everything that `train.py` with these words is made of, without a run."""
    with ExitStack() as stack:
        yield lambda *more: open_parts((*words, *more), stack)


@pytest.fixture
def parts(build: Callable[..., train.Training]) -> train.Training:
    """Everything that `train.py` is made of."""
    return build()
