"""Ranks as processes, for the conformance cases in which one of them is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from transfuse.testing._ranks import Ended, Factory, Group, Late

__all__ = ["Died", "die", "run_processes"]

_HOST = "127.0.0.1"

# To import torch takes seconds, and is no part of what is tested.
_START = timedelta(seconds=60)

Work = Callable[[Factory, Group, float], Any]


class Died(Exception):
    """A process that ended before its work did."""


def die(_: Group) -> None:
    """A trap that springs."""
    os.kill(os.getpid(), signal.SIGKILL)


def run_processes(factory: Factory, work: Work, size: int, patience: float) -> dict[int, Ended]:
    """``work(factory, group, patience)``, a function of a module, in a process for each rank.

    Each has three times ``patience`` from when all have started. Errors come back as text, in a RuntimeError.
    """
    try:
        task = pickle.dumps((work, factory))
    except Exception as error:
        raise TypeError(
            f"this case starts processes, so that the factory has to be a class or a function of a module: {error}"
        ) from error
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    # In this process, so that it outlives any rank.
    store = TCPStore(_HOST, 0, None, True, _START, wait_for_workers=False)
    processes, ranks, ended = [], {}, {}
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            args = (rank, size, store.port, patience, task, theirs)
            process = context.Process(target=_main, args=args, name=f"rank{rank}", daemon=True)
            process.start()
            # Only the process holds the other end now, so that its death is an end of file here.
            theirs.close()
            processes.append(process)
            ranks[ours] = rank
        until = time.monotonic() + _START.total_seconds() + 3 * patience
        open_ends = set(ranks)
        while open_ends and (ready := wait(open_ends, max(0.0, until - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                message = None
                with contextlib.suppress(EOFError, OSError):
                    message = connection.recv()
                rank = ranks[connection]
                if message == "started":
                    until = min(until, time.monotonic() + _START.total_seconds() + 3 * patience)
                    continue
                open_ends.discard(connection)
                ended[rank] = _ended(rank, message)
        for connection in open_ends:
            ended[ranks[connection]] = Ended(error=Late(f"rank {ranks[connection]} never ended"))
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join(10)
        for connection in ranks:
            connection.close()
    return ended
