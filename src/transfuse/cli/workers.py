"""Worker processes on this machine, one by one or joined in one gloo group. None of them outlives its parent."""

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
from typing import Any, Self

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

__all__ = ["HOST", "TIMEOUT", "Worker", "Workers", "WorkersFailed", "interrupts_held", "loopback_store"]

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


class Worker:
    """A fresh process that runs ``function(connection, *args)``, one of ``count``, and the pipe to it.

    What the function sends is plain data. That it has ended is an end of file on the pipe.
    """

    def __init__(self, name: str, count: int, function: Callable[..., None], *args: object) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=_live, args=(theirs, count, function, args), name=name, daemon=True)
        try:
            with interrupts_held():
                self._process.start()
                # The worker alone now holds this end, so that its death is an end of file here.
                theirs.close()
        except BaseException:
            self.end()
            raise

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def kill(self) -> None:
        """SIGKILL, without waiting for its effect."""
        self._process.kill()

    def exit_code(self) -> int | None:
        """Of a worker that has ended or is about to."""
        self._process.join(GRACE_SECONDS)
        return self._process.exitcode

    def last_words(self) -> str:
        """How it ended."""
        code = self.exit_code()
        if code is not None and code < 0:
            with suppress(ValueError):
                return f"signal {signal.Signals(-code).name}"
        return f"exit code {code}"

    def end(self) -> None:
        """Kill it if it is still there, and wait until it is gone."""
        if self._process.pid is not None:
            self._process.kill()
            self._process.join()
        self.connection.close()


class Workers:
    """Runs ``function(say, *args)`` in ``count`` fresh processes; iterating yields each rank and what it says.

    The function finds a default group of :mod:`torch.distributed`. What it says is plain data. Leaving the ``with``
    block ends every process that is still there.
    """

    def __init__(self, count: int, function: Callable[..., None], *args: object) -> None:
        self._count = count
        self._task = function, args
        self._store: TCPStore | None = None
        self._workers: list[Worker] = []

    def __enter__(self) -> Self:
        self._store = loopback_store(TIMEOUT)
        try:
            for rank in range(self._count):
                args = (rank, self._count, self._store.port, *self._task)
                self._workers.append(Worker(f"worker-{rank}", self._count, _join_in, *args))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        working = {worker.connection: rank for rank, worker in enumerate(self._workers)}
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
                    kind, body = "died", (f"died: {self._workers[rank].last_words()}", "")
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

    def _end(self) -> None:
        with interrupts_held():
            for worker in self._workers:
                worker.kill()
            for worker in self._workers:
                worker.end()
            self._workers.clear()
            self._store = None


def loopback_store(timeout: timedelta) -> TCPStore:
    """A store for workers to meet through, in this process, so that it outlives every one of them."""
    # On a socket of one's own: a store would listen on all interfaces, whatever host it is given.
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
        return TCPStore(HOST, port, None, True, timeout, wait_for_workers=False, master_listen_fd=listener.detach())


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C and its like take effect when this is over, and what is started meanwhile does not hear them.

    A terminal sends Ctrl-C, and that it is closed, to everyone; the parent alone answers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    came: list[int] = []
    # Blocked in this thread, which is what a new process inherits; another thread may still be given the signal.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in held}
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
    for late in came:
        os.kill(os.getpid(), late)


# ------------------------------------------------------------------------------------------------------- in the workers


def _live(
    connection: Connection[Any, Any], count: int, function: Callable[..., None], args: tuple[object, ...]
) -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    # Never a name lookup, never an interface of the outside world.
    if loopback := {name for _, name in socket.if_nameindex()} & {"lo", "lo0"}:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback.pop()
    try:
        function(connection, *args)
    except BaseException as error:
        with suppress(OSError):
            connection.send(("failed", (f"failed: {type(error).__name__}: {error}", traceback.format_exc())))
        # No teardown: that of a group waits for its peers.
        os._exit(1)


def _join_in(
    connection: Connection[Any, Any],
    rank: int,
    count: int,
    port: int,
    function: Callable[..., None],
    args: tuple[object, ...],
) -> None:
    store = TCPStore(HOST, port, None, False, TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=count, timeout=TIMEOUT)
    function(lambda body: connection.send(("said", body)), *args)
    dist.destroy_process_group()
    connection.send(("done", None))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
