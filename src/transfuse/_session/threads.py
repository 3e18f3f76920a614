"""Threads: each conversation runs in a thread of its own, one for each peer, and the calling thread waits in slices.

A backend's wait holds back Ctrl-C until it returns, and waiting for one peer must not delay another. So no conversation
runs in the calling thread, and no conversation waits for another.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

from transfuse import _workers
from transfuse._errors import PeerTimeout, let_go
from transfuse._memory.streams import Streams, inherit
from transfuse._phases import Phase, trace_name
from transfuse._progress import Progress
from transfuse._report import Report
from transfuse._timeouts import Patience
from transfuse._wire.channel import Channel
from transfuse._wire.pool import Pool


class _End(NamedTuple):
    """A conversation is over, with this error or well. ``job`` is about to end; None: it stays in its wait."""

    error: BaseException | None
    job: _workers.Job | None


class _Mark(NamedTuple):
    """A conversation enters or leaves a phase."""

    name: str
    enters: bool


class Caller:
    """The calling thread, as conversations see it: whether it wants to stop, and how to wake it.

    Create it in the calling thread.
    """

    def __init__(self, *, watching: bool = True) -> None:
        self._watching = watching
        #: Whether a profiler records this thread, so that the conversations' phases are shown as its ranges. If the
        #: profiler records all threads, this is False: the trace then has the conversations' own ranges.
        self._traced = _profiler_enabled()
        #: Why the caller wants to stop, or None. Conversations check it between bursts.
        self.cause: BaseException | None = None
        self._lock = threading.Lock()
        self._lent: set[int] = set()
        #: Whether a thread has been started for each conversation: from then on each peer is told if the caller stops.
        self.talking = False
        #: Peers whose conversation a thread has begun, or will: nobody else tells them anything.
        self.begun: set[int] = set()
        #: How conversations have ended. The queue only wakes the caller: an interrupt may lose what is taken from it.
        self.ends: dict[int, _End] = {}
        self.events: queue.SimpleQueue[_Mark | None] = queue.SimpleQueue()

    def lend(self, rank: int) -> None:
        """Record that the backend gets this conversation's tensors: the caller may not return before they are back."""
        with self._lock:
            if self.cause is not None:
                raise self.cause
            self._lent.add(rank)

    def returned(self, rank: int) -> None:
        with self._lock:
            self._lent.discard(rank)

    def leave(self, rank: int, why: BaseException) -> None:
        """Go on without this conversation. Its thread stays in its wait until the peer answers or is gone."""
        self.end(rank, _End(why, None))

    def end(self, rank: int, end: _End) -> None:
        """Record how a conversation has ended, and wake the caller."""
        self.returned(rank)
        self.ends.setdefault(rank, end)
        self.events.put(None)

    def stop(self, cause: BaseException) -> None:
        with self._lock:
            self.cause = cause

    def may_leave(self) -> bool:
        with self._lock:
            return not self._lent

    def tick(self) -> None:
        """Wake the caller to show progress, if it shows any: waking costs the conversations time."""
        if self._watching:
            self.events.put(None)

    @contextmanager
    def phase(self, report: Report, phase: Phase) -> Iterator[None]:
        """Run a conversation's phase: a range in its own thread, and in the caller's thread if that is profiled."""
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
    """The phases of all conversations, as ranges of the calling thread.

    Conversations enter and leave phases in any order, but ranges of one thread must nest. So when a range ends, the
    ranges inside it are ended too, and begun again.
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
        """End all open ranges."""
        while self._open:
            self._end()


def interrupt_behind(error: BaseException) -> BaseException | None:
    """The interrupt that an error is, or that came out of a lock of ``threading`` as this error; None if neither."""
    if not isinstance(error, Exception):
        return error
    behind = error.__context__ if isinstance(error, RuntimeError) else None
    return None if behind is None or isinstance(behind, Exception) else behind


def run(
    talks: Mapping[int, Callable[[], None]],
    caller: Caller,
    show: Callable[[], object],
    watch: Callable[[], object] = lambda: None,
    park: Callable[[int], None] = lambda rank: None,
    streams: Streams | None = None,
) -> dict[int, BaseException]:
    """Run one conversation for each rank, on streams of its own, and return the errors of those that failed.

    Between waits this calls ``watch``, and ``show`` unless the caller wants to stop. If the caller stops while
    conversations are still running, this calls ``park`` for each of them.
    """
    streams = streams or Streams()
    to_start = _ToStart(dict(talks), caller, streams)
    ranges = _Ranges()
    caller.begun = set(talks)
    try:
        return _wait_for(set(talks), to_start.start, caller, ranges, show, watch, park)
    finally:
        # A second interrupt can come before each has a thread. A thread that comes late finds its conversation gone.
        caller.begun.difference_update([rank for rank in talks if to_start.talks.pop(rank, None) is not None])
        # Errors refer to the frames of the conversations, and these to the caller: a cycle that would keep their state.
        caller.ends = {}
        ranges.close()
        streams.join()


class _ToStart(NamedTuple):
    """The conversations that no thread runs yet."""

    talks: dict[int, Callable[[], None]]
    caller: Caller
    streams: Streams

    def start(self) -> None:
        """Start a thread for each conversation that has none. After an interrupt one may get a second, which ends."""
        for rank in list(self.talks):
            try:
                _workers.run(partial(self._run, rank), f"transfuse-peer-{rank}")
            except RuntimeError as error:
                if (interrupt := interrupt_behind(error)) is not None:
                    raise interrupt from None
                # No further thread can be started.
                if self.talks.pop(rank, None) is not None:
                    self.caller.end(rank, _End(error, None))
        self.caller.talking = True

    def _run(self, rank: int, job: _workers.Job) -> None:
        talk = self.talks.pop(rank, None)
        if talk is None:
            return  # Another thread runs this conversation.
        try:
            # The order matters: inference_mode(False) turns gradients on, no_grad() turns them off again.
            with self.streams.conversation(), torch.inference_mode(False), torch.no_grad():
                talk()
        except BaseException as error:
            # The error refers to this frame, so it is not stored in it: the cycle would keep tensors in memory that
            # the backend has returned.
            self.caller.end(rank, _End(error, job))
        else:
            self.caller.end(rank, _End(None, job))


def _wait_for(
    waiting: set[int],
    start: Callable[[], None],
    caller: Caller,
    ranges: _Ranges,
    show: Callable[[], object],
    watch: Callable[[], object],
    park: Callable[[int], None],
) -> dict[int, BaseException]:
    """Start the conversations, and wait for them. An interrupt at any moment only makes the caller stop, once."""
    failed: dict[int, BaseException] = {}
    give_up = float("inf")
    while True:
        try:
            while waiting:
                if not caller.talking:
                    start()
                if caller.cause is not None:
                    give_up = min(give_up, time.monotonic() + Patience.GOODBYE_SECONDS)
                event = _next(caller.events)
                ended = waiting & caller.ends.keys()  # First: the last marks of these are in the queue by now.
                if event is not None:
                    ranges.mark(event)
                while not caller.events.empty():
                    if (event := caller.events.get()) is not None:
                        ranges.mark(event)
                for rank in ended:
                    error, job = caller.ends[rank]
                    if job is not None:
                        # One that outlives the call might be the last to hold the group when the interpreter exits.
                        job.join()
                    if error is not None:
                        let_go(error)
                        failed[rank] = error
                    waiting.discard(rank)
                watch()
                if caller.cause is None:
                    show()
                if time.monotonic() > give_up and caller.may_leave():
                    for rank in list(waiting):
                        park(rank)
                        waiting.discard(rank)
            break
        except BaseException as interrupt:
            if caller.cause is None:
                caller.stop(interrupt)
            elif caller.may_leave():
                for rank in waiting:
                    park(rank)
                raise  # The second request to stop takes effect at once.
            # Otherwise the backend may still write to the caller's memory, at most until the timeout.
    if caller.cause is not None:
        raise caller.cause
    return failed


def _next(events: queue.SimpleQueue[_Mark | None]) -> _Mark | None:
    try:
        return events.get(timeout=Patience.SLICE_SECONDS)
    except queue.Empty:
        return None


class SideConversation:
    """A conversation with a neighbour in a chain, in a thread of its own. Its owner waits for it, or abandons it."""

    def __init__(
        self, channel: Channel, talk: Callable[[], object], leave: Callable[[], object], pool: Pool | None
    ) -> None:
        self._channel = channel
        self._pool = pool
        self._leave = leave
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._streams = inherit()
        self._job = _workers.run(partial(self._run, talk), f"transfuse-link-{channel.peer}")

    def _run(self, talk: Callable[[], object], _: _workers.Job) -> None:
        try:
            with self._streams(), torch.inference_mode(False), torch.no_grad(), self._channel:
                talk()
        except BaseException as error:
            let_go(error)
            self._channel.leave_stream(None)
            self._ended.put(error)
        else:
            self._channel.leave_stream(self._pool)
            self._ended.put(None)

    def wait(self, progress: Progress, patience: float) -> BaseException | None:
        """Wait for its end, or abandon it after ``patience`` seconds without progress. Return its error, or None."""
        seen, since = progress.bytes, time.monotonic()
        while True:
            try:
                error = self._ended.get(timeout=Patience.neighbour_slice(patience))
                self._job.join()
                return error
            except queue.Empty:
                if progress.bytes != seen:
                    seen, since = progress.bytes, time.monotonic()
                elif time.monotonic() - since >= patience:
                    self._leave()
                    return PeerTimeout(self._channel.peer, self._channel.phase, patience)
