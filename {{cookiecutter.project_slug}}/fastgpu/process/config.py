"""The settings of a run: one class for each section of config.yaml.

The docstring below a field is what docs/config.md says about it. Functions take the sections they need. The section
`model` belongs to the workload, which declares its settings itself (see workloads/__init__.py). This module does not
import torch, so a typing error in the config is reported immediately.
"""

import json
import os
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PrivateAttr

from fastgpu.process.launch import without_secrets

__all__ = ["Config", "Count", "CountOrZero", "Optim", "Section"]

Auto = Literal["auto"]
Tier = Literal["device", "host", "disk"]
Precision = Literal["bf16", "fp16", "fp32"]
MAX_THREADS = 1000
"""Maximum number of reader threads, or of worker processes, of a rank."""
# Numbers are limited where larger ones have no use and would overflow, fill the memory or start threads for minutes.
Count = Annotated[int, Field(ge=1, le=10**9)]
"""The type of a setting that is a whole number from 1 on."""
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
"""The type of a setting that is a whole number from 0 on, where 0 often means off."""
Seconds = Annotated[int, Field(ge=1, le=10**6)]  # a million: libraries count milliseconds in 32 bits
Threads = Annotated[int, Field(ge=1, le=MAX_THREADS)]
Weight = Annotated[float, Field(ge=1e-6, le=1e6)]
Names = Annotated[dict[str, str], Field(max_length=1000)]
SET_NAME = re.compile("[A-Za-z0-9][A-Za-z0-9_-]*")
SHARE = re.compile(r"(\d{1,9}(?:\.\d+)?) *%")


def expand_home(path: str) -> str:
    """The path with the home folder in place of a `~` at its beginning."""
    return os.path.expanduser(path)  # noqa: PTH111 (Path would change URLs, and refuse names of unknown users)


def _as_paths(paths: Any) -> Any:
    """Apply `expand_home` to a path, to the items of a list, or to the keys of a mapping."""
    if isinstance(paths, list):
        return [_as_paths(path) for path in paths]
    if isinstance(paths, dict):
        expanded = {_as_paths(path): value for path, value in paths.items()}
        if len(expanded) < len(paths):
            raise ValueError("it should name each file once")
        return expanded
    path = expand_home(paths)
    if "://" not in path and max(map(len, os.fsencode(path).split(b"/"))) > 255:
        raise ValueError("it should have at most 255 bytes between two slashes, as names of files have")
    return path


def _as_sets(named: Any) -> Any:
    """Apply `_as_paths` to the files to validate on, or to the files of each set in {name: files}."""
    if not isinstance(named, dict):
        return _as_paths(named)
    if not named or not all(map(SET_NAME.fullmatch, named)):
        raise ValueError("it should be {name: files} with names of letters, figures, - and _; it takes no weights")
    if sum(share_of(paths) is not None for paths in named.values()) > 1:
        raise ValueError("only one of the sets may be a share of data.train; name files for the others")
    return {name: _as_paths(paths) for name, paths in named.items()}


def share_of(paths: str | list[str]) -> float | None:
    """The share of the training rows that a text such as 10% asks for; None if it names files."""
    match = SHARE.fullmatch(paths) if isinstance(paths, str) else None
    return float(match[1]) / 100 if match else None


class Section(BaseModel):
    """A section of the config. Fields are strictly typed and frozen; an unknown key is an error."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class RunConfig(Section):
    """Name, place, seed and checkpoints of a run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "auto"
    """Name of the run's folder in `run.folder`. auto: date and time; with `resume: auto`, the newest run."""
    folder: Annotated[str, AfterValidator(_as_paths)] = "runs"
    """Folder that holds all runs."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of the weights, the order of the rows and the augmentation."""
    resume: Literal["never", "auto"] = "never"
    """auto: continue from the last checkpoint if there is one. On the command line, also a run folder, such as
    runs/first: that run continues with its recorded config, which other `key=value` arguments override. A resumed run
    chooses each `auto` value again for its machine, and prints a value that changed, such as train.precision."""
    checkpoint_every_steps: CountOrZero = 0
    """Save a checkpoint every this many steps, in addition to the one of each validation. 0: only at validations."""
    deterministic: bool = False
    """true: use torch's deterministic algorithms and no TF32, so that a run on a GPU can be repeated and resumed bit
    for bit. This is slower, and an operation without a deterministic algorithm is an error. false: use the fastest
    kernels (cudnn.benchmark, TF32)."""
    check: bool = False
    """Build data, model and optimizer, and stop before the first step."""


class Data(Section):
    """The rows to train and validate on, and how they are batched."""

    train: Annotated[str | list[str] | dict[str, Weight], AfterValidator(_as_paths)]
    """HDF5 file, list of files or glob pattern (shards), also as URLs (s3://bucket/part-*.h5). `file.h5::/group` uses
    the datasets of a group. {file: weight} mixes several files: each epoch takes rows from each file in proportion to
    its weight."""
    val: Annotated[str | list[str] | dict[str, str | list[str]], AfterValidator(_as_sets)]
    """Files to validate on, written like data.train but without weights. A share such as 10% holds out rows of
    data.train: the same rows for every run.seed. {name: files} defines several sets, with metrics
    `val/<name>/<metric>`. The first set decides which checkpoint is the best, unless `best` of the workload names
    another set: `<name>/<metric>`."""
    fields: Names
    """Fields to read: name in the code -> name of the dataset in the file, or of the group of a CSR matrix."""
    val_fields: Names = {}
    """Fields to read from data.val. Empty: data.fields."""
    balance: Literal["none", "classes"] = "none"
    """classes: each epoch has the same number of rows for each value of the field `labels`, and as many rows in total
    as data.train."""
    dataset: Annotated[str, Field(pattern=r"^(none|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "none"
    """Your own map-style Dataset, as `package.module:Class`. It is called with the value of data.train or data.val.
    none: HDF5 files."""
    image_size: Annotated[int, Field(ge=0, le=65_535)] = 0
    """Height and width that encoded images (JPEG, PNG, WebP) are decoded to."""
    min_crop_scale: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Encoded images: train on a random crop of at least this share of the area (0.08 to 0.35 for photographs), and
    validate on the centre crop, 7/8 of the sides. 1: train and validate on the largest centre crop."""
    window: CountOrZero = 0
    """Number of steps in a sample, if samples are windows of long series. Each row of the file is then a step, such as
    a token, an hour or a frame. Each file, group or ragged row is a recording, and no window crosses from one recording
    to the next. 0: a row is a sample."""
    stride: CountOrZero = 0
    """Number of steps from the start of one window to the start of the next. In training, the windows of each epoch
    begin at other steps. 0: data.window."""
    batch_size: Count = 64
    """Global batch size: rows of one optimizer step over all ranks and accumulation steps."""
    tier: Literal[Tier, Auto] = "auto"
    """Where the rows are kept: on the device, in host memory, or on disk. auto: the fastest tier that has room."""
    pool_batches: Count | Auto = "auto"
    """Number of global batches in a pool. A pool is shuffled, copied to the device and echoed as a whole. auto: 256 MiB
    of rows, at most 8 million rows."""
    canonical_ranks: Count | Auto = "auto"
    """Number of equal parts of a global batch. Every number of ranks that divides this number sees the same global
    batches, and can resume a run inside an epoch. auto: the number of the resumed run, if the current number of ranks
    divides it; else the least common multiple of 8 and the number of ranks; or the number of ranks, if data.batch_size
    or the blocks of the file do not allow that. Set a number, such as 64, for a run that may grow to 64 ranks."""
    cache: Annotated[str, Field(min_length=1), AfterValidator(_as_paths)] = "data/cache"
    """Folder for the local copies of files that are given as URLs: s3://, gs://, az:// or https://."""
    echo: Annotated[float, Field(ge=1, le=1000)] = 1.0
    """Train on each pool this many times, reshuffled each time (2.5 means 2, 3, 2, 3, ...)."""

    @property
    def val_sets(self) -> dict[str, str | list[str]]:
        """{group of the metrics: files, or a share of data.train}. A single set has the group `val`, several sets have
        `val/<name>`."""
        return (
            {f"val/{name}": paths for name, paths in self.val.items()}
            if isinstance(self.val, dict)
            else {"val": self.val}
        )

    @property
    def val_share(self) -> float | None:
        """The share of the training rows that a validation set asks for; None if all sets are files."""
        return next((share for share in map(share_of, self.val_sets.values()) if share is not None), None)


class LoaderConfig(Section):
    """How rows are read ahead of the training loop."""

    num_readers: Threads | Auto = "auto"
    """Number of threads of each rank that read HDF5 files. auto: one for each CPU of the rank, at most 8 unless the
    threads decode images; 64 for URLs."""
    prefetch_pools: Annotated[int, Field(ge=1, le=100)] = 2
    """Number of pools prepared ahead of the pool in use; always 1 for validation. Each pool has its own staging memory.
    No effect on the device tier."""
    num_workers: Annotated[int, Field(ge=0, le=MAX_THREADS)] | Auto = "auto"
    """Number of worker processes of each rank for data.dataset. auto: one for each CPU of the rank. 0: read in the main
    thread, to debug."""
    timeout_s: Seconds = 300
    """Stop the run if a reader thread or the worker processes deliver nothing for this many seconds."""


class Optim(Section):
    """Optimizer and learning rate."""

    name: Literal["adamw", "sgd", "fused_adam", "fused_lamb"] = "adamw"
    """Optimizer. fused_adam and fused_lamb (for very large batches) come from NVIDIA Apex."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """Weight decay of matrices and convolution kernels; biases and norms have none."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Nesterov momentum of SGD; first beta of the others."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """Learning rate after the warmup: it falls to 0 along a cosine or a line, or stays constant."""
    warmup_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the run during which the learning rate rises linearly."""
    clip_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Maximum norm of the gradients. 0: no clipping."""
    accumulation_steps: Count = 1
    """Number of forward and backward passes in an optimizer step, each on an equal part of the batch (saves device
    memory)."""


class Train(Section):
    """Length and numerics of training."""

    epochs: Count = 20
    """Passes over the training rows."""
    steps: CountOrZero = 0
    """Number of optimizer steps after which the run and its schedule end, even inside an epoch; train.epochs then has
    no effect. Steps are counted over the whole run, so do not change data.batch_size or data.echo when you resume it.
    0: train.epochs decides."""
    validate_every_steps: CountOrZero = 0
    """Validate, log the metrics, and save the last and the best checkpoint every this many steps and at the end of the
    run. 0: after each epoch and at the end."""
    precision: Literal[Precision, Auto] = "auto"
    """auto: bf16 on a GPU that supports it, fp16 on an older GPU, fp32 on a CPU."""
    compile: bool = False
    """Compile the training steps with torch.compile: the first step is slow, the others are faster. Validation is not
    compiled. Needs gcc, or g++ on a CPU."""
    ema: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Decay of an exponential moving average of the weights, such as 0.999. The average is validated, and saved as the
    model to use. The decay after n steps is at most n / (n + 9). 0: no average, the weights themselves."""


class Dist(Section):
    """Processes and devices."""

    strategy: Literal["ddp", "apex", "dp"] = "ddp"
    """ddp: DistributedDataParallel, one process for each GPU. apex: the DistributedDataParallel of NVIDIA Apex, which
    had it until 25.05; each rank keeps its own running statistics, and resumes with the statistics of rank 0. dp:
    nn.DataParallel in one process (slower)."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda: stop with an error if there is no GPU. auto: a GPU if there is one."""
    find_unused_parameters: bool = False
    """Allow steps that do not use all parameters of the model, such as the two steps of a GAN. DDP becomes slower."""
    timeout_s: Seconds = 600
    """Seconds a rank waits for the others before it gives up."""


class Log(Section):
    """Logging."""

    every_steps: Count = 50
    """Number of steps between two points in metrics.jsonl and TensorBoard. A point is also written before each
    checkpoint and validation, and at the end of each epoch."""
    wandb: str = ""
    """Project of Weights & Biases that also receives the scalars (pip install -c constraints.txt wandb). The W&B run is
    named after the folder of the run, and continues when the run is resumed. Empty: off."""


class Config(Section):
    """All settings of a run, as config.yaml and the command line give them."""

    workload: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")]
    """The module in workloads/ that defines the model, the transform, the loss and the metrics."""
    run: RunConfig = RunConfig()
    data: Data
    loader: LoaderConfig = LoaderConfig()
    model: dict[str, Any] = {}
    """Settings of the workload, checked by its class `Options`."""
    optim: Optim = Optim()
    train: Train = Train()
    dist: Dist = Dist()
    log: Log = Log()

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)
    """{dotted key: where it was set last}: `config.yaml:12` or `command line`. For error messages."""
    _words: dict[str, str] = PrivateAttr(default_factory=dict)
    """{dotted key: text on the command line}. The types of the workload's settings are only known later."""

    def resolved(self, **sections: dict[str, Any]) -> "Config":
        """A copy with other values: resolved(data={"tier": "disk"})."""
        tree = self.model_dump()
        return Config.model_validate(tree | {name: tree[name] | values for name, values in sections.items()})

    def flat(self) -> dict[str, Any]:
        """{dotted key: value} of every key, without the secrets of URLs."""
        sections = self.model_dump(exclude={"workload"})
        values = {f"{name}.{key}": value for name, section in sections.items() for key, value in section.items()}
        text = json.dumps({"workload": self.workload, **values}, ensure_ascii=False)
        return json.loads(without_secrets(text))  # it goes into model.json and the logs
