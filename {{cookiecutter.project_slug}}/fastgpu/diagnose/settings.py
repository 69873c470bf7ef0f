"""The keys of the config that a diagnosis can advise or try, and how to change a config by them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastgpu.process.config import Config

BATCH_SIZE = "data.batch_size"
TIER = "data.tier"
POOL_BATCHES = "data.pool_batches"
ECHO = "data.echo"
NUM_READERS = "loader.num_readers"
NUM_WORKERS = "loader.num_workers"
PREFETCH_POOLS = "loader.prefetch_pools"
PREFETCH_FACTOR = "loader.prefetch_factor"
PIN_MEMORY = "loader.pin_memory"
CHUNK_CACHE_BYTES = "hdf5.rdcc_nbytes"
PRECISION = "train.precision"
CHANNELS_LAST = "train.channels_last"
COMPILE = "train.compile"
MODEL_SECTION = "model"
"""The section of the workload's own settings."""

Overrides = Mapping[str, Any]
"""{dotted key: value} of settings that replace those of a config."""


class Setting(NamedTuple):
    """One key of the config and a value for it. As text it is a word of the command line: `data.echo=2`."""

    key: str
    value: bool | int | float | str

    def __str__(self) -> str:
        if isinstance(self.value, bool):
            return f"{self.key}={str(self.value).lower()}"
        if isinstance(self.value, float):
            return f"{self.key}={self.value:g}"
        return f"{self.key}={self.value}"


def format_overrides(overrides: Overrides) -> str:
    """The overrides as words of the command line."""
    return " ".join(str(Setting(key, value)) for key, value in overrides.items())


def as_sections(overrides: Overrides) -> dict[str, dict[str, Any]]:
    """{section: {key: value}}, as in config.yaml."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in overrides.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def override(config: Config, overrides: Overrides) -> Config:
    """A copy of the config with other values. The values are not checked again."""
    return config.resolved(**as_sections(overrides))
