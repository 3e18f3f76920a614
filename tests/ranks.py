"""Ranks for tests, in three weights.

- :class:`Ranks`: threads of this process, each with a gloo group of its own. Milliseconds; for the conversation.
- :class:`ProcessPool`: worker processes kept for the whole test run; for real process boundaries.
- :class:`Fleet`: fresh processes that a test may kill or freeze.

Whatever happens inside, the parent comes back by its deadline and names the ranks that have not.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import pathlib
import pickle
import queue
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypeVar, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, TCPStore

from foreground import come_to_foreground

__all__ = ["PRELOAD", "Died", "Fleet", "Outcome", "ProcessPool", "Ranks", "RemoteError", "announce"]

T = TypeVar("T")

Method = Literal["spawn", "forkserver"]

#: What the fork server imports. There is one for all of a run of pytest, so all who fork from it name the same.
PRELOAD = [
    "torch",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
    "transfuse",
]

_HOST = "127.0.0.1"
_START = timedelta(seconds=60)


class Died(Exception):
    """A worker process ended before its function did. `signal` is the number that ended it, or None."""

    def __init__(self, rank: int, exitcode: int | None) -> None:
        self.rank, self.exitcode = rank, exitcode
        self.signal = -exitcode if exitcode is not None and exitcode < 0 else None
        how = f"died with signal {self.signal}" if self.signal else f"exited with code {exitcode}"
        super().__init__(f"rank {rank} {how}")


class RemoteError(Exception):
    """Stands for an error or a value of a worker that cannot be pickled."""


@dataclasses.dataclass(frozen=True)
class Outcome(Generic[T]):
    """What became of one rank: a value or an error."""

    value: T | None = None
    error: BaseException | None = None

    def get(self) -> T:
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]


# Ranks as threads


class Ranks:
    """`n` gloo groups as threads of this process: ``with Ranks(2) as ranks: ranks.run(lambda rank, pg: ...)``."""

    _ids = itertools.count()

    def __init__(self, n: int, timeout: float = 20.0) -> None:
        self.n, self.timeout = n, timeout
        self.pgs: list[dist.ProcessGroup] = []

    def __enter__(self) -> Self:
        store, prefix = HashStore(), f"ranks{next(self._ids)}"

        def connect(rank: int) -> dist.ProcessGroup:
            options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._timeout = timedelta(seconds=self.timeout)
            # Never a name lookup, never an interface of the outside world.
            options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
            # A Backend by its type, which has all of a ProcessGroup that a transport uses.
            return cast(dist.ProcessGroup, ProcessGroupGloo(PrefixStore(prefix, store), rank, self.n, options))

        self.pgs = _values(_in_threads(self.n, connect, self.timeout))
        return self

    def __exit__(self, *_: object) -> None:
        self.pgs.clear()

    def run(self, fn: Callable[..., T], *per_rank: Sequence[Any], deadline: float = 60.0) -> list[T]:
        """``fn(rank, pg, *(each of per_rank)[rank])`` on all ranks at once: their values, or the earliest error."""
        __tracebackhide__ = True
        return _values(self._outcomes(fn, per_rank, deadline))

    def outcomes(self, fn: Callable[..., T], *per_rank: Sequence[Any], deadline: float = 60.0) -> list[Outcome[T]]:
        """As :meth:`run`, with each rank's value or error. AssertionError names ranks that run past the deadline."""
        __tracebackhide__ = True
        return [outcome for outcome, _ in self._outcomes(fn, per_rank, deadline)]

    def _outcomes(
        self, fn: Callable[..., T], per_rank: tuple[Sequence[Any], ...], deadline: float
    ) -> list[tuple[Outcome[T], float]]:
        __tracebackhide__ = True
        return _in_threads(self.n, lambda rank: fn(rank, self.pgs[rank], *(a[rank] for a in per_rank)), deadline)


def _in_threads(n: int, fn: Callable[[int], T], deadline: float) -> list[tuple[Outcome[T], float]]:
    """Outcome and time of its end for each rank."""
    __tracebackhide__ = True
    ended: dict[int, tuple[Outcome[T], float]] = {}

    def one(rank: int) -> None:
        try:
            outcome = Outcome(fn(rank))
        except BaseException as error:
            outcome = Outcome(error=error)
        ended[rank] = outcome, time.monotonic()

    threads = [threading.Thread(target=one, args=(rank,), name=f"rank{rank}", daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + deadline
    for thread in threads:
        thread.join(max(0.0, until - time.monotonic()))
    if stuck := [rank for rank, thread in enumerate(threads) if thread.is_alive()]:
        others = {rank: outcome for rank, (outcome, _) in sorted(ended.items())}
        raise AssertionError(f"ranks {stuck} still running after {deadline} s; the others: {others}")
    return [ended[rank] for rank in range(n)]


def _values(ended: list[tuple[Outcome[T], float]]) -> list[T]:
    """The values, or the error that came first: the others are mostly its consequences, and become notes."""
    __tracebackhide__ = True
    failed = sorted((at, rank, o.error) for rank, (o, at) in enumerate(ended) if o.error is not None)
    if failed:
        _, first, error = failed[0]
        for _, rank, other in failed[1:]:
            error.add_note(f"and on rank {rank}, later: {other!r}")
        error.add_note(f"raised on rank {first}")
        raise error
    return [outcome.get() for outcome, _ in ended]


# Ranks as processes: the worker's side


class _Channel:
    """The worker's way to its parent. Any of its threads may send."""

    def __init__(self, connection: Connection) -> None:
        self.connection, self.lock = connection, threading.Lock()

    def send(self, kind: str, payload: object = None) -> None:
        # Plain pickle by value: the pickler of multiprocessing would put tensors into shared memory, owned by nobody.
        data = pickle.dumps((kind, payload))
        with self.lock:
            self.connection.send_bytes(data)


_channel: _Channel | None = None


def announce(name: str) -> None:
    """In a worker: tell the parent, which may be waiting in :meth:`Fleet.wait_for`, that this point is reached."""
    assert _channel is not None, "announce() is for functions that run in a worker process"
    _channel.send("at", name)


def _work(
    rank: int, n: int, port: int, timeout: float, connection: Connection, stacks: str, environ: dict[str, str]
) -> None:
    global _channel
    come_to_foreground()
    # Ends with the thread that started it, even while frozen: PR_SET_PDEATHSIG. A fork server ends with its parent only
    # when no child holds on to it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    alive = getattr(multiprocessing.forkserver, "_forkserver")._forkserver_alive_fd  # noqa: B009 - hidden from mypy
    if alive is not None:
        os.close(alive)
    # A fork server has the environment of the day it was started.
    os.environ.clear()
    os.environ.update(environ, GLOO_SOCKET_IFNAME="lo")
    faulthandler.register(signal.SIGUSR1, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115
    _channel = _Channel(connection)
    store = None

    def join(rank: int, generation: int) -> None:
        nonlocal store
        if dist.is_initialized():
            dist.destroy_process_group()
        store = store or TCPStore(_HOST, port, None, False, _START)
        prefix = PrefixStore(f"generation{generation}", store)
        # All are here before the group is made, because its timeout may be shorter than a slow start.
        prefix.set(f"rank{rank}", "here")
        prefix.wait([f"rank{other}" for other in range(n)], _START)
        dist.init_process_group("gloo", store=prefix, rank=rank, world_size=n, timeout=timedelta(seconds=timeout))

    torch.set_num_threads(1)
    try:
        join(rank, 0)
        _channel.send("done")
        while True:
            task = connection.recv_bytes()
            try:
                fn, args = pickle.loads(task)
                _channel.send("done", (fn or join)(rank, *args))
            except BaseException as error:
                _channel.send("failed", _portable(error))
    except EOFError:
        # The parent has closed its end. No teardown: that of a group waits for peers.
        os._exit(0)
    except BaseException as error:
        _channel.send("failed", _portable(error))
        raise


def _portable(error: BaseException) -> BaseException:
    """The error as it will arrive in the parent, with its traceback as a note, or a stand-in for it."""
    text = "".join(traceback.format_exception(error))
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error):
            error.add_note(f"in the worker:\n{text}")
            return error
    except Exception:
        pass
    return RemoteError(f"{type(error).__name__}: {error}\n{text}")


# Ranks as processes: the parent's side


@dataclasses.dataclass
class _Worker:
    rank: int
    process: Any
    connection: Connection
    stacks: pathlib.Path
    reader: threading.Thread | None = None
    busy: bool = True
    dead: bool = False
    outcome: Outcome[Any] = dataclasses.field(default_factory=Outcome)
    reached: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)


class _Processes:
    """`n` processes, each with a default gloo group over 127.0.0.1, that run functions sent by reference."""

    def __init__(self, n: int, *, timeout: float, method: Method) -> None:
        self.n, self.timeout, self.method = n, timeout, method
        self.generation = 0
        self.workers: list[_Worker] = []
        self._store: TCPStore | None = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None
        self._events: queue.SimpleQueue[tuple[_Worker, str, Any]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self.launch()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        return [worker.process.pid for worker in self.workers]

    def launch(self, deadline: float = 60.0) -> None:
        context = multiprocessing.get_context(self.method)
        if self.method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        # In this process, so that it outlives any rank.
        self._store = TCPStore(_HOST, 0, None, True, _START, wait_for_workers=False)
        self._directory = tempfile.TemporaryDirectory(prefix="ranks")
        self._events, self.generation = queue.SimpleQueue(), 0
        try:
            for rank in range(self.n):
                ours, theirs = context.Pipe()
                stacks = pathlib.Path(self._directory.name, f"rank{rank}.stacks")
                args = (rank, self.n, self._store.port, self.timeout, theirs, str(stacks), dict(os.environ))
                process = context.Process(target=_work, args=args, name=f"rank{rank}", daemon=True)  # type: ignore[attr-defined]
                process.start()
                # Ours alone now holds the other end, so that a death is an end of file here, at once.
                theirs.close()
                worker = _Worker(rank, process, ours, stacks)
                worker.reader = threading.Thread(target=self._read, args=(worker, self._events), daemon=True)
                worker.reader.start()
                self.workers.append(worker)
            for outcome in self.outcomes(deadline):
                outcome.get()
        except BaseException:
            self.close()
            raise

    @staticmethod
    def _read(worker: _Worker, events: queue.SimpleQueue[tuple[_Worker, str, Any]]) -> None:
        """A thread for each worker, because one that is frozen in the middle of a message blocks its reader."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                data = worker.connection.recv_bytes()
                try:
                    kind, payload = pickle.loads(data)
                except Exception as error:
                    kind, payload = "failed", RemoteError(f"cannot be unpickled: {error!r}")
                events.put((worker, kind, payload))
        worker.process.join()
        events.put((worker, "dead", worker.process.exitcode))

    def start(self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None) -> None:
        """Start ``fn(rank, *args)``, a function of a module, in the main thread of all or some ranks; do not wait."""
        self._start(fn, args, ranks)

    def _start(self, fn: Callable[..., Any] | None, args: tuple[Any, ...], ranks: Iterable[int] | None) -> None:
        task = pickle.dumps((fn, args))
        for worker in self._chosen(ranks):
            assert not worker.busy, f"rank {worker.rank} is still busy"
            if not worker.dead:
                worker.busy, worker.outcome = True, Outcome()
                worker.reached.clear()
                # A worker that has just died is noticed by its reader.
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    worker.connection.send_bytes(task)

    def outcomes(self, deadline: float = 60.0, ranks: Iterable[int] | None = None) -> list[Outcome[Any]]:
        """Wait until all or some ranks have ended: their values and errors, :class:`Died` among them."""
        __tracebackhide__ = True
        chosen = self._chosen(ranks)
        self._until(lambda: not any(worker.busy for worker in chosen), deadline)
        if stuck := [worker for worker in chosen if worker.busy]:
            others = {worker.rank: worker.outcome for worker in chosen if not worker.busy}
            stacks = "\n".join(f"rank {worker.rank}:\n{self._stacks(worker)}" for worker in stuck)
            ranks = [worker.rank for worker in stuck]
            raise AssertionError(f"ranks {ranks} still running after {deadline} s; the others: {others}\n{stacks}")
        return [worker.outcome for worker in chosen]

    def kill(self, rank: int) -> None:
        self.signal(rank, signal.SIGKILL)

    def freeze(self, rank: int) -> None:
        """Stop the process and return when all of it stands still."""
        self.signal(rank, signal.SIGSTOP)
        pid, until = self.pids[rank], time.monotonic() + 5
        while _state(pid) not in "tTZX":
            assert time.monotonic() < until, f"rank {rank} does not stop"
            time.sleep(0.001)

    def thaw(self, rank: int) -> None:
        self.signal(rank, signal.SIGCONT)

    def signal(self, rank: int, number: int) -> None:
        worker = self.workers[rank]
        self._until(lambda: True, 0)
        # A pid that has been waited for may be somebody else's by now.
        if not worker.dead and worker.process.exitcode is None:
            os.kill(worker.process.pid, number)

    def wait_for(self, rank: int, name: str, deadline: float = 30.0) -> None:
        """Wait until this rank announces this point. Each announcement serves one wait."""
        __tracebackhide__ = True
        worker = self.workers[rank]
        self._until(lambda: bool(worker.reached[name]) or not worker.busy, deadline)
        if not worker.reached[name]:
            state = f"{deadline} s passed" if worker.busy else f"it ended: {worker.outcome}"
            raise AssertionError(f"rank {rank} did not announce {name!r}; {state}; announced: {dict(worker.reached)}")
        worker.reached[name] -= 1

    def close(self) -> None:
        """End every process, frozen ones too, and wait for that."""
        for worker in self.workers:
            if worker.process.exitcode is None:
                worker.process.kill()
        for worker in self.workers:
            if worker.reader is not None:
                worker.reader.join(10)
            worker.connection.close()
        self.workers.clear()
        self._store = None
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

    def _chosen(self, ranks: Iterable[int] | None) -> list[_Worker]:
        return self.workers if ranks is None else [self.workers[rank] for rank in ranks]

    def _until(self, done: Callable[[], bool], deadline: float) -> None:
        """Take in what the workers say until `done` or the deadline."""
        until = time.monotonic() + deadline
        while True:
            # All that is there is taken in first, so that a state that was announced is known.
            with contextlib.suppress(queue.Empty):
                while True:
                    self._take(*self._events.get_nowait())
            left = until - time.monotonic()
            if done() or left <= 0:
                return
            with contextlib.suppress(queue.Empty):
                self._take(*self._events.get(timeout=left))

    @staticmethod
    def _take(worker: _Worker, kind: str, payload: Any) -> None:
        if kind == "at":
            worker.reached[payload] += 1
            return
        if kind == "done":
            worker.outcome = Outcome(payload)
        elif kind == "failed":
            worker.outcome = Outcome(error=payload)
        else:
            worker.dead = True
            # A value that arrived before the death was an end of its own.
            if worker.busy:
                worker.outcome = Outcome(error=Died(worker.rank, payload))
        worker.busy = False

    def _stacks(self, worker: _Worker) -> str:
        """Where its threads are. A frozen process cannot say."""
        self.signal(worker.rank, signal.SIGUSR1)
        until = time.monotonic() + 1
        while time.monotonic() < until and not worker.stacks.read_text().endswith("\n"):
            time.sleep(0.01)
        return worker.stacks.read_text() or f"no answer; its process is in state {_state(worker.process.pid)}"


def _state(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return "X"


class ProcessPool(_Processes):
    """Worker processes for the whole test run, since to import torch takes 1.5 s. Made on first use.

    What a function leaves behind in its worker stays there for the next one: groups made by `new_group`, meshes,
    threads, globals. The default group alone is renewed, and only after a run in which a rank failed, because a peer's
    error or an expired wait closes connections for good. After a death or a missed deadline all workers are replaced.
    """

    def __init__(self, n: int, *, timeout: float = 30.0, method: Method = "spawn") -> None:
        super().__init__(n, timeout=timeout, method=method)
        self._suspect = False

    def __enter__(self) -> Self:
        return self

    def run(
        self, fn: Callable[..., Any], *args: Any, ranks: Iterable[int] | None = None, deadline: float = 60.0
    ) -> list[Outcome[Any]]:
        """``fn(rank, *args)``, a function of a module, on all or some ranks: the outcome of each."""
        __tracebackhide__ = True
        self._refresh()
        # Until it is known that all went well; an exception here (a deadline, Ctrl-C) leaves it so.
        self._suspect = True
        self.start(fn, *args, ranks=ranks)
        outcomes = self.outcomes(deadline, ranks)
        self._suspect = any(outcome.error is not None for outcome in outcomes)
        return outcomes

    def _refresh(self) -> None:
        if self._suspect and self.workers:
            self._until(lambda: True, 0)
            renewed = False
            if not any(worker.dead or worker.busy for worker in self.workers):
                self.generation += 1
                self._start(None, (self.generation,), None)
                with contextlib.suppress(AssertionError):
                    renewed = all(outcome.error is None for outcome in self.outcomes(self.timeout))
            if not renewed:
                self.close()
        self._suspect = False
        if not self.workers:
            self.launch()


class Fleet(_Processes):
    """Fresh processes for tests that kill or freeze: ``with Fleet(3) as fleet: fleet.start(fn, *args)``.

    Forked from a server that has done nothing but import, which takes a tenth of a second instead of two or
    more; `method="spawn"` where it matters that the processes have nothing in common.
    """

    def __init__(self, n: int, *, timeout: float = 30.0, method: Method = "forkserver") -> None:
        super().__init__(n, timeout=timeout, method=method)
