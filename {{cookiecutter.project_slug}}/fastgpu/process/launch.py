"""What the launcher told this process, and the way out when a person must change something.

The only module that reads environment variables. It imports no torch, so a typo in the config is told at once.
"""

import faulthandler
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class UserError(ValueError):
    """What a person can fix. The message holds the key or path, the value, what is allowed, and the cure."""


class RankError(UserError):
    """The same, met by one rank alone while it trains: told by that rank, whichever it is."""


class Launch(NamedTuple):
    """One process among those that `torchrun` started; the defaults are a plain `python train.py`."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    attempt: int = 0
    """How often torchrun has restarted the processes of this job."""

    @property
    def speaks(self) -> bool:
        """Whether this process prints for its machine: a person sees one message, not one per rank."""
        return self.local_rank == 0


def read_launch() -> Launch:
    """What torchrun wrote into the environment (https://docs.pytorch.org/docs/stable/elastic/run.html)."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    return Launch(*(int(os.environ.get(name, default)) for name, default in zip(names, Launch(), strict=True)))


@contextmanager
def clear_exit(
    launch: Launch, interrupted: str = "interrupted; run.resume=auto goes on from the last checkpoint"
) -> Iterator[None]:
    """Turn a `UserError` into one line on stderr and exit code 2, the same on every rank. Bugs keep their traceback.

    A signal that kills (a bug in a driver, a file cut while its mapping is read) leaves a traceback, too.
    """
    faulthandler.enable(sys.__stderr__ or 2)
    try:
        yield
    except UserError as error:
        if launch.speaks or isinstance(error, RankError):
            print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        if launch.speaks:
            print(f"\n{interrupted}", file=sys.stderr, flush=True)
        raise SystemExit(130) from None
