"""Why a job has ended: what the other ranks are told when one of them ends.

A rank whose peer is gone sees a connection that closes, with no word of who closed it. So every rank leaves a note in
the store of the job: where it runs, and what ended it.
"""

import json
import os
import socket
import time
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist

from fastgpu.process.launch import UserError

NOTE_S = 3.0
"""How long to wait for the last words of a rank: they and the end of its connection come by different ways."""
POLL_S = 0.1


class Peers:
    """The notes of all ranks of a job."""

    def __init__(self, store: dist.Store, rank: int, world_size: int):
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._host = socket.gethostname()
        self._write(f"at{rank}", [self._host, os.getpid()])

    def check_device(self, device: str) -> None:
        """Raise UserError on every rank if a rank has another type of device than rank 0: the two could never meet."""
        self._store.set(f"device{self._rank}", device)
        devices = [
            each.decode() for each in self._store.multi_get([f"device{rank}" for rank in range(self._world_size)])
        ]
        for rank, each in enumerate(devices):
            if each != devices[0]:
                host, first_host = (self._read(f"at{number}")[0] for number in (rank, 0))
                raise UserError(
                    f"the device is {each} on rank {rank} ({host}) and {devices[0]} on rank 0 ({first_host}); check "
                    "nvidia-smi on both machines, or set dist.device"
                )

    def tell(self, reason: str) -> None:
        """Leave the reason why this rank ends."""
        self._write(f"end{self._rank}", f"{reason} (at {time.strftime('%H:%M:%S')})")

    def explain(self) -> str:
        """What has happened to the ranks that have ended or stand still, in one line."""
        until = time.monotonic() + NOTE_S
        fates: list[str] = []
        while not fates and time.monotonic() < until:
            time.sleep(POLL_S)
            fates = [fate for rank in range(self._world_size) if rank != self._rank and (fate := self._fate(rank))]
        return "; ".join(fates) or "no rank has said why: look at the output of the others, and at their machines"

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
