"""config.yaml + `section.key=value` -> one frozen `Config`; whatever it does not understand is an error.

Only the scripts see a `Config`; the modules below take plain values. Imports no torch.
`python -m fastgpu.config` prints the JSON schema that gives an editor completion (config.schema.json).
"""

import difflib
import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .launch import UserError

Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Run(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "auto"
    """Folder of this run below `run.folder`; auto: date and time, or with `resume: auto` the newest run."""
    folder: str = "runs"
    """Where runs are kept."""
    seed: CountOrZero = 0
    """Seeds the weights, the order of the rows and the augmentation."""
    resume: Literal["never", "auto"] = "never"
    """auto: go on from the run's last checkpoint if there is one, else start."""
    checkpoint_every_steps: CountOrZero = 0
    """Also save inside an epoch, at the first end of a pool after this many steps; 0: only when an epoch ends."""


class Data(Section):
    train: str | list[str] = "data/digits.h5::/train"
    """HDF5 file, list of files or glob (shards); `file.h5::/group` takes the datasets of a group."""
    val: str | list[str] = "data/digits.h5::/val"
    """The same for validation."""
    fields: dict[str, str] = {"images": "images", "labels": "labels"}
    """Name in the code: name of the dataset in the file, or of the group of a CSR matrix."""
    val_fields: dict[str, str] = {}
    """The same for data.val; empty: data.fields."""
    batch_rows: Count = 64
    """Rows of one optimizer step over all ranks and accumulation steps: the global batch."""
    tier: Literal["auto", "device", "host", "disk"] = "auto"
    """Where the rows live: on the device, in RAM, or streamed from disk; auto: the nearest that fits."""
    pool_batches: Count | Auto = "auto"
    """Global batches shuffled together, copied together and echoed together; auto: 256 MiB of rows."""
    lanes: Count | Auto = "auto"
    """Slices of the epoch's order; any number of ranks that divides it sees the same global batches."""
    readers: Count | Auto = "auto"
    """Reader threads a rank (disk and host tier); auto: its share of the CPUs, at most 8, half or twice, as tried."""
    prefetch_pools: Count = 2
    """Pools prepared ahead of the one in use, each with its own staging memory (disk and host tier)."""
    echo: Annotated[float, Field(ge=1)] | Auto = 1.0
    """Train on each pool so many times, reshuffled; 2.5 means 2, 3, 2, 3 ... Worth it where reading is the limit. auto:
    what costs no time as measured in the epoch before, at most 4 (2 if nothing is augmented); 1 in the first epoch."""
    pin_memory: bool = True
    """Page-locked staging memory, so that copies to a GPU overlap with its work."""
    verify: bool = False
    """Check the SHA-256 of each block whenever it is read (files that convert.py wrote)."""
    trust_links: bool = False
    """Follow external and virtual datasets, and links, into other files: only in files you trust."""
    dataset: Annotated[str, Field(pattern=r"^(none|[A-Za-z_][\w.]*:[A-Za-z_]\w*)$")] = "none"
    """Your own map-style Dataset, `package.module:Class`, called with data.train or data.val; none: HDF5 files."""


class Loader(Section):
    workers: CountOrZero | Auto = "auto"
    """Worker processes a rank for data.dataset; auto: its share of the CPUs or half of that, as tried; 0: none."""
    prefetch_factor: Count = 2
    """Batches that each worker prepares ahead."""
    persistent_workers: bool = True
    """Keep the workers from epoch to epoch; false: new ones each epoch, for a Dataset that must begin anew."""
    timeout_s: Count = 300
    """Stop when no worker has sent a batch for so long."""


class Hdf5(Section):
    rdcc_nbytes: CountOrZero = 8 << 20
    """Chunk cache of what the HDF5 library itself must read, in bytes (see h5py.File)."""
    rdcc_nslots: Count = 8191
    """Slots of that cache: a prime, about 100 times the chunks that fit."""
    rdcc_w0: Share = 0.75
    """How much fully read chunks are preferred for eviction."""


class Model(Section):
    width: Count = 32
    """Channels of the first stage; each later stage doubles them."""
    blocks: Count = 1
    """Residual blocks a stage."""


class Augment(Section):
    flip: bool = False
    """Mirror left-right at random (not for digits or text)."""
    crop_pad: CountOrZero = 1
    """Pad by this many pixels, then crop at random; 0: off."""
    crop_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Enlarge a random part of so much of the area, up to all of it (0.08 to 0.35 for photographs); 1: off."""
    jitter: Share = 0.0
    """Brightness, contrast and saturation times 1 - jitter to 1 + jitter; 0: off."""
    cutout: CountOrZero = 0
    """Side of a square, in pixels, that is filled with the mean; 0: off."""
    mixup: Annotated[float, Field(ge=0)] = 0.0
    """Blend each row with another one by a share from Beta(mixup, mixup); 0: off."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of the target that all classes divide."""


class Recsys(Section):
    hidden: CountOrZero = 600
    """Width of the layers beside the latent one; 0: none."""
    latent: Count = 200
    """Width of the layer that a user becomes."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of a user's items that the model does not see, drawn anew each time."""
    variational: bool = True
    """true: Mult-VAE; false: Mult-DAE."""
    kl_weight: Annotated[float, Field(ge=0)] = 0.2
    """Of the divergence from the prior, once it is reached (Mult-VAE)."""
    kl_anneal_steps: CountOrZero = 0
    """Steps (times optim.accumulation) in which that weight rises from 0; the paper: 200,000."""


class Optim(Section):
    name: Literal["adamw", "sgd", "lamb"] = "adamw"
    """Optimizer; lamb, for very large batches, is NVIDIA Apex's."""
    fused: Literal["auto", "torch", "apex", "off"] = "torch"
    """Whose fused kernels: torch's, NVIDIA Apex's, auto: Apex's where it is usable; off: none."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Peak learning rate."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    """For matrices and kernels; never for biases and norms."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """SGD's (Nesterov) momentum, AdamW's first beta."""
    warmup: Share = 0.1
    """Share of the run in which the learning rate rises; then it falls along a cosine."""
    clip_norm: Annotated[float, Field(ge=0)] = 1.0
    """Largest gradient norm; 0: off."""
    accumulation: Count = 1
    """Forward and backward passes a step, each on an equal part of the batch (saves device memory)."""


class Train(Section):
    epochs: Count = 20
    """Passes over the fresh rows."""
    precision: Literal["auto", "bf16", "fp16", "fp32"] = "auto"
    """auto: bf16 on a GPU that has it, fp16 on an older one, fp32 on a CPU."""
    channels_last: bool = True
    """NHWC memory: what tensor cores want for convolutions."""
    compile: bool = False
    """torch.compile: a slow first step, faster ones after it."""


class Dist(Section):
    strategy: Literal["ddp", "apex", "dp", "none"] = "ddp"
    """ddp: one process a GPU; apex: the same by an NVIDIA Apex that still has it; dp: nn.DataParallel in one process
    (slower); none: one device."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """cuda: stop where there is none; auto: cuda if there is one."""
    timeout_s: Count = 600
    """How long a rank waits for the others before it gives up."""


class Log(Section):
    every_steps: Count = 50
    """Steps between two points in TensorBoard and metrics.jsonl."""


class Config(Section):
    workload: Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]*$")] = "images"
    """The module of workloads/ that holds model, transform, loss and metrics."""
    run: Run = Run()
    data: Data = Data()
    loader: Loader = Loader()
    hdf5: Hdf5 = Hdf5()
    model: Model = Model()
    augment: Augment = Augment()
    recsys: Recsys = Recsys()
    optim: Optim = Optim()
    train: Train = Train()
    dist: Dist = Dist()
    log: Log = Log()

    @property
    def options(self) -> dict[str, Any]:
        """What a workload may take by name."""
        return self.model.model_dump() | self.augment.model_dump() | self.recsys.model_dump()


# ---------------------------------------------------------------------------------------------- from text to Config


def load_config(argv: list[str]) -> Config:
    """`[--config FILE]... [section.key=value]...` -> Config; later ones win. Without --config: config.yaml.

    Raises UserError with a line for each thing that is wrong: file and line, key, value, what is allowed, nearest key.
    """
    paths, overrides = _split(argv)
    tree: dict[str, Any] = {}
    source: dict[str, str] = {}  # dotted key -> who set it last
    for path in paths or ["config.yaml"]:
        _merge(tree, _read_yaml(path, source))
    for override in overrides:
        key, _, text = override.partition("=")
        branch: Any = _parse(text, f"command line: {key}", key, source)
        for name in reversed(key.split(".")):
            branch = {name: branch}
        _merge(tree, branch)
        source[key] = "command line"
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise UserError("\n       ".join(_explain(error, source))) from None


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    paths, overrides, rest = [], [], list(argv)
    while rest:
        word = rest.pop(0)
        if word in ("-h", "--help"):
            print(describe())
            raise SystemExit(0)
        if word == "--config" and rest:
            paths.append(rest.pop(0))
        elif word.startswith("--config="):
            paths.append(word.removeprefix("--config="))
        elif "=" in word and not word.startswith("-"):
            overrides.append(word)
        else:
            raise UserError(f'command line: "{word}" is not understood: use --config FILE, section.key=value or --help')
    return paths, overrides


class _Loader(yaml.SafeLoader):
    """YAML as people expect it: `1e-3` is a number, as in YAML 1.2."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)$"), list("-+.0123456789")
)


def _read_yaml(path: str, source: dict[str, str]) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror}; start in the project's folder or name the file with --config"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{path}: is not UTF-8 text; name a YAML file") from None
    tree = _parse(text, path, "", source)
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds {tree!r}; allowed are sections such as `data:` with keys below them")
    return tree


def _parse(text: str, where: str, prefix: str, source: dict[str, str]) -> Any:
    """The value of a YAML text. Refuses a key that stands twice; notes the line of each key in `source`."""

    def walk(node: yaml.Node, path: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        seen: dict[str, int] = {}
        for key, value in node.value:
            dotted, line = f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1
            if key.value in seen:
                raise UserError(f"{where}:{line}: {dotted} stands twice, first in line {seen[key.value]}: keep one")
            seen[key.value] = line
            source[dotted] = f"{where}:{line}"
            walk(value, dotted)

    try:
        node = yaml.compose(text, _Loader)
        if node is not None:
            walk(node, prefix)
        return yaml.load(text, _Loader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise UserError(f"{where}{line}: is not YAML: {getattr(error, 'problem', None) or error}") from None


def _merge(tree: dict[str, Any], layer: dict[str, Any]) -> None:
    """Key by key; the value of a key is replaced as a whole, `data.fields` too, or one could not leave a field out."""
    for key, value in layer.items():
        if key in _sections() and isinstance(value, dict) and isinstance(tree.get(key), dict):
            tree[key] |= value
        else:
            tree[key] = value


def _explain(error: ValidationError, source: dict[str, str]) -> list[str]:
    """One line a key; the branches of a union (`int or "auto"`) become one line."""
    wrong: dict[str, tuple[str, Any, list[str]]] = {}
    for item in error.errors(include_url=False):
        key = _field_of(item["loc"])
        if item["type"] == "extra_forbidden":
            key = ".".join(str(part) for part in item["loc"])
        _, _, allowed = wrong.setdefault(key, (item["type"], item["input"], []))
        allowed.append(re.sub(r"^\w+ should ", "", item["msg"]))
    lines = []
    for key, (kind, value, allowed) in wrong.items():
        where = source.get(key) or next((s for k, s in source.items() if k.startswith(f"{key}.")), "config")
        if kind == "extra_forbidden":
            close = difflib.get_close_matches(key, keys(), 1, 0.75) or _same_ending(key)
            hint = f"did you mean {close[0]}?" if close else f"allowed are: {', '.join(_siblings(key))}"
            lines.append(f"{where}: unknown key {key} ({hint})")
        else:
            choices = re.findall(r"'([^']+)'", " ".join(allowed))
            close = difflib.get_close_matches(value, choices, 1) if isinstance(value, str) else []
            hint = f' (did you mean "{close[0]}"?)' if close else ""
            should = "hold keys of its own" if key in _sections() else " or ".join(dict.fromkeys(allowed))
            lines.append(f"{where}: {key} is {json.dumps(value, default=str)}; it should {should}{hint}")
    return lines


def _field_of(loc: tuple[int | str, ...]) -> str:
    """The dotted key inside a pydantic location, which also names list positions and union branches."""
    model, names = Config, []
    for part in loc:
        if not (isinstance(model, type) and issubclass(model, BaseModel) and part in model.model_fields):
            break
        names.append(str(part))
        model = model.model_fields[str(part)].annotation  # type: ignore[assignment]
    return ".".join(names)


def _sections() -> dict[str, type[Section]]:
    found = {name: field.annotation for name, field in Config.model_fields.items()}
    return {name: kind for name, kind in found.items() if isinstance(kind, type) and issubclass(kind, Section)}


def keys() -> list[str]:
    """Every dotted key there is."""
    sections = _sections()
    return [
        dotted
        for name in Config.model_fields
        for dotted in ([f"{name}.{key}" for key in sections[name].model_fields] if name in sections else [name])
    ]


def _siblings(key: str) -> list[str]:
    section = key.rpartition(".")[0]
    return [k for k in keys() if section and k.rpartition(".")[0] == section] or list(Config.model_fields)


def _same_ending(key: str) -> list[str]:
    return [k for k in keys() if k.rpartition(".")[2] == key.rpartition(".")[2]]


def flat(config: Config) -> dict[str, Any]:
    """Config -> {dotted key: value}."""
    return {
        key: getattr(getattr(config, section), name) if section else getattr(config, name)
        for key in keys()
        for section, _, name in [key.rpartition(".")]
    }


def describe() -> str:
    """The text of --help: every key, its default and its meaning."""
    lines = ["usage: train.py [--config FILE]... [section.key=value]...", "", "Keys and their defaults:"]
    sections, defaults = _sections(), flat(Config())
    for key in keys():
        section, _, name = key.rpartition(".")
        doc = (sections[section] if section else Config).model_fields[name].description
        lines.append(f"  {key}={json.dumps(defaults[key])}\n      {doc}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(Config.model_json_schema(), indent=2))
