"""Ranks as processes, for the conformance cases in which one of them is killed."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from transfuse.testing._ranks import Ended, Factory, Group, Late

__all__ = ["Died", "RemoteError", "die", "run_processes"]

_HOST = "127.0.0.1"

# To import torch takes seconds, and is no part of what is tested.
_START = 60.0

# Whoever starts a process looks after all, and of two threads that ask how one ended, one is told nonsense.
_one_at_a_time = threading.Lock()

Work = Callable[[Factory, Group, float], Any]


class Died(Exception):
    """The process ended before its work did, by this signal if it was killed."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        self.signal = -exitcode if exitcode is not None and exitcode < 0 else None
        super().__init__(f"rank {rank} ended with exit code {exitcode}")


class RemoteError(Exception):
    """An error of another process, as text: not every error can be pickled."""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run_processes(factory: Factory, work: Work, size: int, patience: float) -> dict[int, Ended]:
    """``work(factory, group, patience)``, a function of a module, in a process for each rank: what became of each.

    A rank that runs for three times ``patience`` once all have started is ended, and :class:`Late`.
    """
    try:
        task = pickle.dumps((work, factory))
    except Exception as error:
        raise TypeError(
            f"this case starts processes, for which the factory must be a class or a function of a module: {error}"
        ) from error
    with _one_at_a_time:
        return _run(task, size, patience)


def _run(task: bytes, size: int, patience: float) -> dict[int, Ended]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["transfuse.testing"])
    # In this process, so that it outlives any rank.
    store = TCPStore(_HOST, 0, None, True, timedelta(seconds=_START), wait_for_workers=False)
    started: list[tuple[Any, Connection]] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            args = (rank, size, store.port, patience, task, theirs)
            process = context.Process(target=_main, args=args, name=f"rank{rank}", daemon=True)
            started.append((process, ours))
            process.start()
            # The process alone holds the other end now, so that its death is an end of file here.
            theirs.close()
        until = time.monotonic() + _START + 4 * patience
        return {rank: _end(rank, *one, until) for rank, one in enumerate(started)}
    finally:
        for process, connection in started:
            process.kill()
            process.join(10)
            connection.close()


def _end(rank: int, process: Any, connection: Connection, until: float) -> Ended:
    with contextlib.suppress(EOFError, OSError):
        if not connection.poll(max(0.0, until - time.monotonic())):
            return Ended(error=Late(f"rank {rank} never ended"))
        value, error, seconds = pickle.loads(connection.recv_bytes())
        return Ended(value, None if error is None else RemoteError(error), seconds)
    process.join(10)
    died = Died(rank, process.exitcode)
    if died.signal == signal.SIGALRM:
        return Ended(error=Late(f"rank {rank} had not ended after three times its patience"))
    return Ended(error=died)


def _main(rank: int, size: int, port: int, patience: float, task: bytes, connection: Connection) -> None:
    # Ends the process from outside of Python, whatever the transport does and whether or not the parent lives.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, _START)
    torch.set_num_threads(1)
    work, factory = pickle.loads(task)
    client = TCPStore(_HOST, port, None, False, timedelta(seconds=_START))
    # All are here before the group is made, because its timeout may be shorter than a slow start.
    client.set(f"rank{rank}", "here")
    client.wait([f"rank{other}" for other in range(size)], timedelta(seconds=_START))
    group = Group(PrefixStore("conformance", client), rank, size, patience)
    signal.setitimer(signal.ITIMER_REAL, 3 * patience)
    started = time.monotonic()
    value, error = None, None
    try:
        value = work(factory, group, patience)
    except BaseException as caught:
        error = f"{type(caught).__name__}: {caught}"
    connection.send_bytes(pickle.dumps((value, error, time.monotonic() - started)))
    # Until the parent kills it: connections that close are no news that the others should get early.
    while True:
        signal.pause()
