"""Ranks as threads, for the conformance cases: each with a gloo group of its own over 127.0.0.1.

Whatever a transport does, :meth:`Ranks.run` comes back by its limit and says which ranks have not ended.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store

__all__ = ["CPU", "Ended", "Factory", "Group", "Late", "Ranks", "Transport"]

CPU = torch.device("cpu")

_ids = itertools.count()
_looking = threading.Lock()

# No transport uses it, so that nothing ever arrives there.
_SILENT_TAG = 2**31 - 2

_MOST_LIMITS = 10


class Transport(Protocol):
    """What the conformance suite tests: anything with these two calls."""

    def send_checkpoint(self, dst_ranks: list[int], state: Any, /) -> None: ...

    def recv_checkpoint(self, src_rank: int, /) -> Any: ...


class Factory(Protocol):
    """Makes a transport for one rank: the class itself, where its constructor takes these, or a function.

    ``pg`` is a real :class:`torch.distributed.ProcessGroup` on gloo, made for the case. ``state_dict``, if given, is to
    be called at the start of a receive, and the bytes are to land in the tensors of the tree that it returns. The cases
    ``death/…`` start processes, for which the factory is pickled: it has to be a class or a function of a module.
    """

    def __call__(
        self, pg: Any, timeout: timedelta, device: torch.device, state_dict: Callable[[], Any] | None = None, /
    ) -> Transport: ...


class Group(dist.ProcessGroup):
    """A gloo group that counts the bytes posted, and in which a case may set a trap."""

    def __init__(self, store: Store, rank: int, size: int, timeout: float) -> None:
        # The constructor for subclasses, which the type stubs do not have.
        super().__init__(rank, size)  # type: ignore[call-arg]
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [_loopback()]
        self._gloo: Any = ProcessGroupGloo(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._set_default_backend(kind)
        self._register_backend(CPU, kind, self._gloo)
        self.sent = 0
        self.received = 0
        self.closed = threading.Event()
        #: Called before a send or receive is posted, which counts already.
        self.trap: Callable[[Group], None] | None = None

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int = 0) -> dist.Work:  # noqa: N803 - torch's name
        self.sent += sum(tensor.nbytes for tensor in tensors)
        if self.trap is not None:
            self.trap(self)
        work: dist.Work = self._gloo.send(tensors, dstRank, tag)
        return work

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int = 0) -> dist.Work:  # noqa: N803
        self.received += sum(tensor.nbytes for tensor in tensors)
        if self.trap is not None:
            self.trap(self)
        work: dist.Work = self._gloo.recv(tensors, srcRank, tag)
        return work

    def hang_up(self) -> None:
        """Close all connections, so that waits on them end: gloo does so when one of them expires."""
        self.closed.set()
        for peer in range(self.size()):
            if peer != self.rank():
                with contextlib.suppress(Exception):
                    # Below 1 ms gloo takes its own default.
                    self._gloo.recv([torch.empty(1)], peer, _SILENT_TAG).wait(timedelta(milliseconds=2))


@functools.cache
def _loopback() -> Any:
    # Never a name lookup, never an interface of the outside world. One for all, because each is a thread.
    return ProcessGroupGloo.create_device(hostname="127.0.0.1")


class Late(AssertionError):
    """A rank that should have ended by now."""


@dataclass(frozen=True)
class Ended:
    """What became of one rank: a value or an error, and how long that took."""

    value: Any = None
    error: BaseException | None = None
    seconds: float = 0.0


Job = Callable[[Group], Any]


class Ranks:
    """``size`` groups, each for one thread: ``with Ranks(2, 5.0) as ranks: ranks.run({0: …, 1: …}, limit=5.0)``."""

    def __init__(self, size: int, patience: float) -> None:
        self.groups: list[Group] = []
        self._size, self._patience = size, patience

    def __enter__(self) -> Ranks:
        store = PrefixStore(f"conformance{next(_ids)}", HashStore())

        def connect(rank: int) -> Callable[[], Group]:
            return lambda: Group(store, rank, self._size, self._patience)

        # Not bounded by patience, of which the group's own timeout is a part.
        ended = _in_threads({rank: connect(rank) for rank in range(self._size)}, 60.0)
        for rank in range(self._size):
            if (error := ended[rank].error) is not None:
                raise error
            self.groups.append(ended[rank].value)
        return self

    def __exit__(self, *_: object) -> None:
        self.groups.clear()

    def run(
        self, jobs: Mapping[int, Job], limit: float, *, only: int | None = None, all_well: bool = False
    ) -> dict[int, Ended]:
        """Run each job with its rank's group. Those that have not ended by the limit are :class:`Late`.

        With ``only`` the end of that rank ends all. With ``all_well`` the first error does, because the others may wait
        for that rank in vain, and the limit is one on standing still: a slow machine is no fault.
        """
        bound = {rank: functools.partial(job, self.groups[rank]) for rank, job in jobs.items()}
        stop = (lambda rank, end: end.error is not None) if all_well else (lambda rank, end: rank == only)
        return _in_threads(bound, limit, self._hang_up, stop, self._moved if all_well else lambda: 0)

    def _moved(self) -> int:
        return sum(group.sent + group.received for group in self.groups)

    def _hang_up(self) -> None:
        for group in self.groups:
            group.hang_up()


def _in_threads(
    jobs: Mapping[int, Callable[[], Any]],
    limit: float,
    hang_up: Callable[[], None] = lambda: None,
    stop: Callable[[int, Ended], bool] = lambda rank, end: False,
    moved: Callable[[], int] = lambda: 0,
) -> dict[int, Ended]:
    """Run the jobs until all have ended, one end says stop, or nothing has ``moved`` for as long as the limit."""
    ends: queue.SimpleQueue[tuple[int, Ended]] = queue.SimpleQueue()

    def one(rank: int) -> None:
        started = time.monotonic()
        value, error = None, None
        try:
            value = jobs[rank]()
        except BaseException as caught:
            error = caught
        ends.put((rank, Ended(value, error, time.monotonic() - started)))

    # Daemons: one that never ends is the transport's fault, and must not keep the interpreter from exiting.
    threads = {rank: threading.Thread(target=one, args=(rank,), name=f"rank{rank}", daemon=True) for rank in jobs}
    last, until = moved(), time.monotonic() + limit
    # Whatever moves: a transport that keeps sending the same thing moves, too.
    at_last = until + _MOST_LIMITS * limit
    for thread in threads.values():
        thread.start()
    ended: dict[int, Ended] = {}
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
    if len(ended) < len(jobs):
        late = {rank: Ended(error=_late(rank, thread, limit), seconds=limit) for rank, thread in threads.items()}
        hang_up()
        # What still runs writes into memory that the case is about to look at.
        gone = time.monotonic() + min(1.0, limit)
        for thread in threads.values():
            thread.join(max(0.0, gone - time.monotonic()))
        ended = late | ended
    return ended


def _late(rank: int, thread: threading.Thread, limit: float) -> Late:
    """Says where the rank is, as far as its own thread knows."""
    late = Late(f"rank {rank} had not ended after {limit:.2f} s")
    if (frame := _frames().get(thread.ident or 0)) is not None:
        late.add_note(f"rank {rank} was at:\n{''.join(traceback.format_stack(frame)[-5:])}")
    return late


def _frames() -> dict[int, FrameType]:
    """Where all threads are.

    CPython 3.11 holds a lock of its own meanwhile. Garbage collected then may run code and give the interpreter to a
    thread that ends, which waits for that lock, and everything stands still.
    """
    with _looking:
        collecting = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if collecting:
                gc.enable()
