"""config.yaml + `section.key=value` -> one frozen `Config`; whatever it does not understand is an error.

Only the scripts see a `Config`; the modules below take plain values. Imports no torch.
`python -m fastgpu.process.config` prints the JSON schema that gives an editor completion (config.schema.json).
"""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

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


if __name__ == "__main__":
    print(json.dumps(Config.model_json_schema(), indent=2))
