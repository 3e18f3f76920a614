"""Ranks as threads of this process, each with a gloo group of its own over 127.0.0.1.

Whatever runs in them, the parent returns by its deadline and says which ranks have not ended.
"""

from __future__ import annotations

import gc
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import FrameType
from typing import Any, Generic, Self, TypeVar, cast

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store

from transfuse.testing.ranks.outcome import Late, Outcome
from transfuse.testing.ranks.worker import HOST

__all__ = ["Ranks", "ThreadedRanks", "gloo_group", "in_threads"]

T = TypeVar("T")
G = TypeVar("G")

_ids = itertools.count()
_looking = threading.Lock()

_MOST_LIMITS = 10
# Not the group's timeout, which may be shorter than a slow start.
_START = 60.0


def gloo_group(store: Store, rank: int, size: int, timeout: float, device: Any = None) -> Any:
    """A gloo group without torch's global state. Each gloo device has a thread; several groups may share a device."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=timeout)
    # This needs no name lookup and no interface but loopback.
    options._devices = [device or ProcessGroupGloo.create_device(hostname=HOST)]
    return ProcessGroupGloo(store, rank, size, options)


class ThreadedRanks(Generic[G]):
    """``n`` groups, each for one thread, made by ``make(store, rank, n, timeout)`` on entry."""

    def __init__(self, n: int, timeout: float, make: Callable[[Store, int, int, float], G]) -> None:
        self.n, self.timeout = n, timeout
        self.pgs: list[G] = []
        self._make = make

    def __enter__(self) -> Self:
        store = PrefixStore(f"ranks{next(_ids)}", HashStore())

        def connect(rank: int) -> Callable[[], G]:
            return lambda: self._make(store, rank, self.n, self.timeout)

        self.pgs = _values(in_threads({rank: connect(rank) for rank in range(self.n)}, max(_START, self.timeout)))
        return self

    def __exit__(self, *_: object) -> None:
        self.pgs.clear()


class Ranks(ThreadedRanks[dist.ProcessGroup]):
    """``n`` gloo groups as threads of this process: ``with Ranks(2) as ranks: ranks.run(lambda rank, pg: ...)``."""

    def __init__(self, n: int, timeout: float = 20.0) -> None:
        # By its type a Backend, which has all methods of a ProcessGroup that a transport calls.
        super().__init__(n, timeout, lambda *args: cast(dist.ProcessGroup, gloo_group(*args)))

    def run(self, fn: Callable[..., T], *per_rank: Sequence[Any], deadline: float = 60.0) -> list[T]:
        """Run ``fn(rank, pg, *(each of per_rank)[rank])`` on all ranks; return the values or raise the first error."""
        __tracebackhide__ = True
        return _values(self._outcomes(fn, per_rank, deadline))

    def outcomes(self, fn: Callable[..., T], *per_rank: Sequence[Any], deadline: float = 60.0) -> list[Outcome[T]]:
        """Like :meth:`run`, but return each rank's value or error. :class:`Late` names ranks that miss the deadline."""
        __tracebackhide__ = True
        ended = self._outcomes(fn, per_rank, deadline)
        return [ended[rank] for rank in range(self.n)]

    def _outcomes(
        self, fn: Callable[..., T], per_rank: tuple[Sequence[Any], ...], deadline: float
    ) -> dict[int, Outcome[T]]:
        __tracebackhide__ = True

        def one(rank: int) -> Callable[[], T]:
            return lambda: fn(rank, self.pgs[rank], *(each[rank] for each in per_rank))

        ended = in_threads({rank: one(rank) for rank in range(self.n)}, deadline)
        if stuck := {rank: outcome.error for rank, outcome in ended.items() if isinstance(outcome.error, _Stuck)}:
            others = {rank: outcome for rank, outcome in sorted(ended.items()) if rank not in stuck}
            late = Late(f"ranks {sorted(stuck)} still running after {deadline} s; the others: {others}")
            for _, error in sorted(stuck.items()):
                for note in getattr(error, "__notes__", ()):
                    late.add_note(note)
            raise late
        return ended


class _Stuck(Late):
    """The thread itself is late. A :class:`Late` that a function raised is an error like any other."""


def _values(ended: dict[int, Outcome[T]]) -> list[T]:
    """Return the values, or raise the first error. Later errors are mostly its consequences and become notes."""
    __tracebackhide__ = True
    failed = [(rank, outcome.error) for rank, outcome in ended.items() if outcome.error is not None]
    if failed:
        first, error = failed[0]
        for rank, other in failed[1:]:
            error.add_note(f"and on rank {rank}, later: {other!r}")
        error.add_note(f"raised on rank {first}")
        raise error
    return [ended[rank].get() for rank in sorted(ended)]


def in_threads(
    jobs: Mapping[int, Callable[[], T]],
    limit: float,
    *,
    hang_up: Callable[[], None] | None = None,
    stop: Callable[[int, Outcome[T]], bool] = lambda rank, end: False,
    moved: Callable[[], int] = lambda: 0,
) -> dict[int, Outcome[T]]:
    """Run the jobs until all have ended, one end says stop, or nothing has ``moved`` for as long as the limit.

    The outcomes are in the order in which the jobs ended. Jobs that have not ended are :class:`Late`; ``hang_up`` must
    make them end, and they get a moment for it.
    """
    ends: queue.SimpleQueue[tuple[int, Outcome[T]]] = queue.SimpleQueue()

    def one(rank: int) -> None:
        started = time.monotonic()
        try:
            end = Outcome(jobs[rank](), None, time.monotonic() - started)
        except BaseException as error:
            # Not in a name of this frame, which the error's traceback holds: what the ranks held would wait for gc.
            ends.put((rank, Outcome(None, error, time.monotonic() - started)))
        else:
            ends.put((rank, end))

    # Daemons: a thread that never ends must not keep the interpreter from exiting.
    threads = {rank: threading.Thread(target=one, args=(rank,), name=f"rank{rank}", daemon=True) for rank in jobs}
    last, until = moved(), time.monotonic() + limit
    # Any change counts as progress: a job that keeps sending the same thing moves, too.
    at_last = until + _MOST_LIMITS * limit
    for thread in threads.values():
        thread.start()
    ended: dict[int, Outcome[T]] = {}
    while len(ended) < len(jobs):
        try:
            rank, end = ends.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            if (now := moved()) == last or until > at_last:
                break
            last, until = now, until + limit
            continue
        ended[rank] = end
        if stop(rank, end):
            break
    left = {rank: thread for rank, thread in threads.items() if rank not in ended}
    late = {rank: Outcome[T](error=_stuck(rank, thread, limit), seconds=limit) for rank, thread in left.items()}
    if late and hang_up is not None:
        hang_up()
        # A job that still runs writes to memory that the caller is about to look at.
        gone = time.monotonic() + min(1.0, limit)
        for thread in threads.values():
            thread.join(max(0.0, gone - time.monotonic()))
    return ended | late


def _stuck(rank: int, thread: threading.Thread, limit: float) -> Late:
    """An error that says where the rank is, as far as its own thread knows."""
    late = _Stuck(f"rank {rank} had not ended after {limit:.2f} s")
    if (frame := _frames().get(thread.ident or 0)) is not None:
        late.add_note(f"rank {rank} was at:\n{''.join(traceback.format_stack(frame)[-5:])}")
    return late


def _frames() -> dict[int, FrameType]:
    """The stacks of all threads.

    CPython 3.11 holds an internal lock meanwhile. Garbage collection at that moment may run code and hand the
    interpreter to a thread that is ending. That thread waits for the same lock, and the process deadlocks.
    """
    with _looking:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collecting:
                gc.enable()
