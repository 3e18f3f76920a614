"""Conversations run in threads of their own, one for each peer; the calling thread waits in short slices.

A backend's wait holds Ctrl-C until it returns, and one peer's wait must not delay another's: so no conversation
runs in the calling thread, and none waits for another.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from transfuse.errors import PeerTimeout
from transfuse.phases import Phase, trace_name
from transfuse.progress import Progress
from transfuse.report import Report
from transfuse.timeouts import Patience
from transfuse.wire.channel import Channel

__all__ = ["Caller", "SideConversation", "current_stream", "run"]


class _Event(NamedTuple):
    """A conversation is over; whether its thread is too."""

    rank: int
    error: BaseException | None
    ended: bool


class _Mark(NamedTuple):
    """A conversation enters a phase, or leaves it."""

    name: str
    enters: bool


class Caller:
    """What conversations know of the calling thread: whether it wants to stop, and how to wake it.

    It is made in the calling thread.
    """

    def __init__(self, *, watching: bool = True) -> None:
        self._watching = watching
        #: A profiler records the thread that started it, unless it records all: then this is False, and the
        #: conversations' own ranges are in its trace.
        self._traced = _profiler_enabled()
        #: Why the caller wants to stop. Conversations look at it between bursts.
        self.cause: BaseException | None = None
        self._lock = threading.Lock()
        self._lent: set[int] = set()
        self.events: queue.SimpleQueue[_Event | _Mark | None] = queue.SimpleQueue()

    def lend(self, rank: int) -> None:
        """Called before tensors are lent to the backend: from now on the caller waits until it has them back."""
        with self._lock:
            if self.cause is not None:
                raise self.cause
            self._lent.add(rank)

    def returned(self, rank: int) -> None:
        with self._lock:
            self._lent.discard(rank)

    def leave(self, rank: int, why: BaseException) -> None:
        """Go on without this conversation. Its thread stays in its wait until the peer goes on or is gone."""
        self.returned(rank)
        self.events.put(_Event(rank, why, ended=False))

    def stop(self, cause: BaseException) -> None:
        with self._lock:
            self.cause = cause

    def may_leave(self) -> bool:
        with self._lock:
            return not self._lent

    def tick(self) -> None:
        """There is progress to show, if anybody watches: to wake the caller costs the conversations time."""
        if self._watching:
            self.events.put(None)

    @contextmanager
    def phase(self, report: Report, phase: Phase) -> Iterator[None]:
        """A conversation's phase: a range in its own thread, and in the caller's if that is being profiled."""
        name = trace_name(report.direction, phase)
        self._mark(name, enters=True)
        try:
            with report.phase(phase):
                yield
        finally:
            self._mark(name, enters=False)

    def _mark(self, name: str, *, enters: bool) -> None:
        if self._traced:
            self.events.put(_Mark(name, enters))


class _Ranges:
    """The phases in which any conversation is, as ranges of the calling thread.

    Conversations enter and leave as they like, ranges of one thread lie within each other: those inside of one that
    ends are ended too, and begun again.
    """

    def __init__(self) -> None:
        self._inside: dict[str, int] = {}
        self._open: list[tuple[str, ExitStack]] = []

    def mark(self, mark: _Mark) -> None:
        count = self._inside[mark.name] = self._inside.get(mark.name, 0) + (1 if mark.enters else -1)
        if mark.enters and count == 1:
            self._begin(mark.name)
        elif not mark.enters and count == 0:
            inner = []
            while (name := self._end()) != mark.name:
                inner.append(name)
            for name in reversed(inner):
                self._begin(name)

    def _begin(self, name: str) -> None:
        opened = ExitStack()
        opened.enter_context(record_function(name))
        self._open.append((name, opened))

    def _end(self) -> str:
        name, opened = self._open.pop()
        opened.close()
        return name

    def close(self) -> None:
        """Nobody is listened to any more."""
        while self._open:
            self._end()


def run(
    talks: Mapping[int, Callable[[], None]],
    caller: Caller,
    show: Callable[[], object],
    watch: Callable[[], None] = lambda: None,
    park: Callable[[int], None] = lambda rank: None,
) -> dict[int, BaseException]:
    """Run one conversation for each rank; the errors of those that failed.

    Between waits ``watch`` is called, and ``show`` unless the caller wants to stop. ``park`` is called for each
    conversation that is still going on when the caller stops without it.
    """
    stream = current_stream()

    def work(rank: int, talk: Callable[[], None]) -> None:
        try:
            # In this order: inference_mode(False) turns gradients on.
            with stream(), torch.inference_mode(False), torch.no_grad():
                talk()
        except BaseException as error:
            # Not kept in this frame, which the error refers to: with it would stay what a backend has lent.
            caller.returned(rank)
            caller.events.put(_Event(rank, error, ended=True))
        else:
            caller.returned(rank)
            caller.events.put(_Event(rank, None, ended=True))

    threads = {
        rank: threading.Thread(target=work, args=(rank, talk), name=f"transfuse-peer-{rank}", daemon=True)
        for rank, talk in talks.items()
    }
    for thread in threads.values():
        thread.start()
    ranges = _Ranges()
    try:
        return _wait_for(threads, caller, ranges, show, watch, park)
    finally:
        ranges.close()


def _wait_for(
    threads: Mapping[int, threading.Thread],
    caller: Caller,
    ranges: _Ranges,
    show: Callable[[], object],
    watch: Callable[[], None],
    park: Callable[[int], None],
) -> dict[int, BaseException]:
    waiting, failed = set(threads), {}
    give_up = float("inf") if caller.cause is None else time.monotonic() + Patience.GOODBYE_SECONDS
    while waiting:
        try:
            event = _next(caller.events)
            if isinstance(event, _Mark):
                ranges.mark(event)
            elif event is not None and event.rank in waiting:
                if event.ended:
                    # A thread that outlived the call could be the last to hold the group while the interpreter ends.
                    threads[event.rank].join()
                waiting.discard(event.rank)
                if event.error is not None:
                    failed[event.rank] = event.error
            watch()
            if caller.cause is None:
                show()
        except BaseException as interrupt:
            if caller.cause is not None:
                if caller.may_leave():
                    raise  # Asked twice to stop: at once, then.
                continue  # The backend may still write to the caller's memory, until the timeout at the latest.
            caller.stop(interrupt)
            give_up = time.monotonic() + Patience.GOODBYE_SECONDS
        if time.monotonic() > give_up and caller.may_leave():
            for rank in waiting:
                park(rank)
            break
    if caller.cause is not None:
        raise caller.cause
    return failed


def _next(events: queue.SimpleQueue[_Event | _Mark | None]) -> _Event | _Mark | None:
    try:
        return events.get(timeout=Patience.SLICE_SECONDS)
    except queue.Empty:
        return None


class SideConversation:
    """A conversation in a thread of its own, beside the one that waits for it, or goes on without it."""

    def __init__(self, channel: Channel, talk: Callable[[], object], leave: Callable[[], object]) -> None:
        self._channel = channel
        self._leave = leave
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        name = f"transfuse-link-{channel.peer}"
        self._thread = threading.Thread(target=self._run, args=(talk,), name=name, daemon=True)
        self._thread.start()

    def _run(self, talk: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            with torch.inference_mode(False), torch.no_grad(), self._channel:
                talk()
        except BaseException as caught:
            error = caught
        self._ended.put(error)

    def wait(self, progress: Progress, patience: float) -> BaseException | None:
        """Wait for its end; abandon it after ``patience`` seconds without progress. How it failed, if it did."""
        seen, since = progress.bytes, time.monotonic()
        while True:
            try:
                error = self._ended.get(timeout=Patience.neighbour_slice(patience))
                self._thread.join()
                return error
            except queue.Empty:
                if progress.bytes != seen:
                    seen, since = progress.bytes, time.monotonic()
                elif time.monotonic() - since >= patience:
                    self._leave()
                    return PeerTimeout(self._channel.peer, self._channel.phase, patience)


def current_stream() -> Callable[[], AbstractContextManager[object]]:
    """Make a thread's work run on the caller's current stream, so that it is ordered after what the caller did."""
    if not torch.accelerator.is_available():
        return nullcontext
    stream = torch.accelerator.current_stream()
    return lambda: stream
