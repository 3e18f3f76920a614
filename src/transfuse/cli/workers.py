"""Worker processes on this machine, joined in one gloo group. None of them outlives its parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

__all__ = ["TIMEOUT", "Workers", "WorkersFailed"]

HOST = "127.0.0.1"
#: Long, since a worker may wait for another that fills gigabytes with random numbers.
TIMEOUT = timedelta(minutes=5)
#: The first failure is often the consequence of another: so long the parent listens for more before it reports.
GRACE_SECONDS = 1.0


class WorkersFailed(Exception):
    """Some workers raised or died. ``causes`` maps rank to what is known; tracebacks are in the notes."""

    def __init__(self, causes: dict[int, str]) -> None:
        self.causes = causes
        super().__init__("; ".join(f"worker {rank} {cause}" for rank, cause in sorted(causes.items())))


class Workers:
    """Runs ``function(say, *args)`` in ``count`` fresh processes; iterating yields each rank and what it says.

    The function finds a default group of :mod:`torch.distributed`. What it says is plain data. Leaving the ``with``
    block ends every process that is still there.
    """

    def __init__(self, count: int, function: Callable[..., None], *args: object) -> None:
        self._count = count
        self._task = function, args
        self._store: TCPStore | None = None
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection[Any, Any]] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        # In this process, so that it outlives every rank.
        self._store = TCPStore(HOST, 0, None, True, TIMEOUT, wait_for_workers=False)
        try:
            with _deaf_to_interrupts():
                for rank in range(self._count):
                    ours, theirs = context.Pipe()
                    args = (rank, self._count, self._store.port, theirs, *self._task)
                    process = context.Process(target=_work, args=args, name=f"worker-{rank}", daemon=True)
                    process.start()
                    # The worker alone now holds this end, so that its death is an end of file here.
                    theirs.close()
                    self._processes.append(process)
                    self._connections.append(ours)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        working = {connection: rank for rank, connection in enumerate(self._connections)}
        causes: dict[int, str] = {}
        notes: list[str] = []
        until = float("inf")
        while working and (left := until - time.monotonic()) > 0:
            for ready in wait(list(working), None if left == float("inf") else left):
                assert isinstance(ready, Connection)
                rank = working[ready]
                try:
                    kind, body = ready.recv()
                except (EOFError, ConnectionResetError):
                    kind, body = "died", (f"died: {self._end_of(rank)}", "")
                if kind == "said":
                    if not causes:
                        yield rank, body
                    continue
                del working[ready]
                if kind != "done":
                    causes[rank], note = body
                    notes += [f"in worker {rank}:\n{note}"] if note else []
                    until = min(until, time.monotonic() + GRACE_SECONDS)
        if causes:
            error = WorkersFailed(causes)
            for note in notes:
                error.add_note(note)
            raise error

    def _end_of(self, rank: int) -> str:
        process = self._processes[rank]
        process.join(GRACE_SECONDS)
        code = process.exitcode
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def _end(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for connection in self._connections:
            connection.close()
        self._processes.clear()
        self._connections.clear()
        self._store = None


@contextmanager
def _deaf_to_interrupts() -> Iterator[None]:
    """What starts meanwhile ignores Ctrl-C, which a terminal sends to everyone: the parent alone answers it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _work(
    rank: int,
    count: int,
    port: int,
    connection: Connection[Any, Any],
    function: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
        # Never a name lookup, never an interface of the outside world.
        if loopback := {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
        store = TCPStore(HOST, port, None, False, TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
        function(lambda body: connection.send(("said", body)), *args)
        dist.destroy_process_group()
        connection.send(("done", None))
    except BaseException as error:
        with suppress(OSError):
            connection.send(("failed", (f"failed: {type(error).__name__}: {error}", traceback.format_exc())))
        # No teardown: that of a group waits for its peers.
        os._exit(1)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
