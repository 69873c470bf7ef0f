"""Why a job has ended: what the other ranks are told when one of them ends.

A rank whose peer is gone sees a connection that closes, with no word of who closed it. So every rank leaves a note in
the store of the job: where it runs, and what ended it. Above MAX_ASKED ranks, the number of requests that a rank makes
to the store does not grow any more: 1,024 ranks that each ask for every other one are a million requests.
"""

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist

from fastgpu.process.launch import Launch, UserError

NOTE_S = 3.0
"""How long to wait for the last words of a rank: they and the end of its connection come by different ways."""
POLL_S = 0.1
MAX_ASKED = 64
"""Up to so many ranks, each is looked at, so that a lost one is named before the store is lost, too."""
MAX_TOLD = 4
"""How many ranks that left a reason are named."""


class Peers:
    """The notes of all ranks of a job."""

    def __init__(self, store: dist.Store, launch: Launch):
        self._store = store
        self._rank = launch.rank
        self._world_size = launch.world_size
        first = launch.rank - launch.local_rank
        self._local_ranks = range(first, first + launch.local_world_size)
        self._host = socket.gethostname()
        self._write(f"at{self._rank}", [self._host, os.getpid()])

    def check_device(self, device: str) -> None:
        """Raise UserError on every rank if a rank has another type of device than rank 0: the two could never meet."""
        if self._rank == 0:
            self._store.set("device", device)
        first_device = self._store.get("device").decode()  # waits for rank 0
        if device != first_device:
            host, first_host = (self._read(f"at{rank}")[0] for rank in (self._rank, 0))
            message = (
                f"the device is {device} on rank {self._rank} ({host}) and {first_device} on rank 0 ({first_host}); "
                "check nvidia-smi on both machines, or set dist.device"
            )
            self._store.set("another device", json.dumps(message))
        if self._store.add("compared", 1) >= self._world_size:
            self._store.set("all compared", "")
        self._store.wait(["all compared"])
        if message := self._read("another device"):
            raise UserError(message)

    def tell(self, reason: str) -> None:
        """Leave the reason why this rank ends."""
        self._write(f"end{self._rank}", f"{reason} (at {time.strftime('%H:%M:%S')})")
        with suppress(RuntimeError):
            self._write(f"told{self._store.add('told', 1)}", self._rank)

    def explain(self) -> str:
        """What has happened to the ranks that have ended or stand still, in one line."""
        until = time.monotonic() + NOTE_S
        fates: list[str] = []
        while not fates and time.monotonic() < until:
            time.sleep(POLL_S)
            fates = self._fates(self._suspects()) or self._fates(self._first_missing())
        return "; ".join(fates) or "no rank has said why: look at the output of the others, and at their machines"

    def _suspects(self) -> list[int]:
        """All other ranks of a small job; of a large one, the first that left a reason, and those of this machine."""
        if self._world_size <= MAX_ASKED:
            return [rank for rank in range(self._world_size) if rank != self._rank]
        told = [self._read(f"told{number}") for number in range(1, MAX_TOLD + 1)]
        return sorted({*told, *self._local_ranks} - {None, self._rank})

    def _first_missing(self) -> list[int]:
        """The first rank that has not been heard of, by bisection; empty if all have been."""
        come, end = 0, self._world_size  # all ranks below `come` have been heard of, and rank `end` has not
        with suppress(RuntimeError):
            while come < end:
                middle = (come + end) // 2
                if self._store.check([f"at{rank}" for rank in range(come, middle + 1)]):
                    come = middle + 1
                else:
                    end = middle
        return [end] if end < self._world_size else []

    def _fates(self, ranks: list[int]) -> list[str]:
        return [fate for rank in ranks if (fate := self._fate(rank))]

    def _fate(self, rank: int) -> str | None:
        """What is known of a rank. None: it seems to be well."""
        place = self._read(f"at{rank}")
        if place is None:
            return f"rank {rank} has not been heard of"
        host, pid = place
        who = f"rank {rank} (process {pid} on {host})"
        reason = self._read(f"end{rank}")
        if reason is not None:
            return f"{who} ended: {reason}"
        if host != self._host:
            return None
        try:
            status = psutil.Process(pid).status()
        except psutil.NoSuchProcess:
            status = psutil.STATUS_ZOMBIE
        if status == psutil.STATUS_ZOMBIE:
            return f"{who} ended without a word: it was killed or crashed; perhaps memory ran out (see dmesg)"
        if status == psutil.STATUS_STOPPED:
            return f"{who} was stopped by a signal and stands still"
        return None

    def _write(self, key: str, value: object) -> None:
        with suppress(RuntimeError):  # the store has ended with the process that held it
            self._store.set(key, json.dumps(value))

    def _read(self, key: str) -> Any:
        with suppress(RuntimeError):
            if self._store.check([key]):
                return json.loads(self._store.get(key))
        return None


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone, hangs or has gone another way."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and ("gloo" in str(error) or "NCCL" in str(error))
