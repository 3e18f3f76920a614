"""The roster of a receive: what is asked for, which sources are here, the plan, and the lock that all share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transfuse._phases import Phase
from transfuse._session.context import Context, ReceiveRequest
from transfuse._session.planning import Accepted
from transfuse._wire.channel import Channel


class _Condition(threading.Condition):
    """A condition that an interrupt cannot leave locked.

    ``threading.Condition`` is entered by Python code, which an interrupt can end between locking and returning. Here
    ``with`` finds the lock's own methods, and calls these without looking for signals in between.
    """

    _lock: Any

    @property
    def __enter__(self) -> Any:
        return self._lock.__enter__

    @property
    def __exit__(self) -> Any:
        return self._lock.__exit__


class Roster:
    """The sources of one receive, the plan for them, and the lock of everything that their conversations share.

    ``changed`` is the only lock. It guards the attributes below it here, and those of
    :class:`~transfuse._session.negotiation.Negotiation`, of :class:`~transfuse._session.ledger.Ledger` and of
    :class:`~transfuse._session.receive_from_all.Receive`. It is reentrant, and is notified whenever any of these
    attributes changes.

    A thread that decides something acts on it in the same critical section. If the act takes long (planning, building,
    abandoning a source), the thread records its decision there instead, so that no other thread decides otherwise
    meanwhile: ``Negotiation`` records the decision under way, ``Receive`` that the state is being built, ``abandoned``
    which sources were given up.
    """

    def __init__(self, request: ReceiveRequest, context: Context) -> None:
        #: What the caller asks for. It changes only before there is a plan, by the one thread that prepares or decides.
        self.request = request
        self.context = context
        self.ranks = context.ranks
        self.caller = context.caller
        self.report = context.report
        self.progress = context.progress
        self.changed = _Condition()
        #: The channels of the sources whose conversation has begun.
        self.channels: dict[int, Channel] = {}
        #: The plan, once the sources are chosen.
        self.plan: Accepted | None = None
        #: The sources that are here, were chosen, and are still needed.
        self.present: set[int] = set()
        #: Sources whose memory may still be read at full speed. What they hold is not asked for over the group.
        self.readers: set[int] = set()
        #: The sources that were abandoned because they were silent for too long, and the error that says so.
        self.abandoned: dict[int, BaseException] = {}
        #: For each source that may be abandoned now: the function that does it.
        self.ways_out: dict[int, Callable[[], object]] = {}
        #: Why the receive has failed.
        self.failure: BaseException | None = None

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    @property
    def accepted(self) -> Accepted:
        """The plan. There has to be one."""
        assert self.plan is not None
        return self.plan

    @contextmanager
    def phase(self, channel: Channel, phase: Phase) -> Iterator[None]:
        """Run a phase of a conversation: show it in errors, progress, report and trace."""
        channel.phase = self.progress[channel.peer].phase = phase.doing
        with self.caller.phase(self.report, phase):
            yield

    def join(self, channel: Channel) -> None:
        """Record that a conversation begins."""
        with self.changed:
            self.channels[channel.peer] = channel
            # The source may be abandoned: only the receive for its first message is in flight.
            self.may_abandon(channel, channel.abandon if self.several else None)

    def fail(self, error: BaseException) -> None:
        """End the receive, for a reason that no other source can repair."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def check(self, rank: int) -> None:
        """Raise if the receive has failed or this source was abandoned."""
        with self.changed:
            for cause in (self.failure, self.abandoned.get(rank)):
                if cause is not None:
                    raise cause

    def check_caller(self) -> None:
        """Raise the caller's cause if the caller wants to stop."""
        if self.caller.cause is not None:
            raise self.caller.cause

    # -- abandoning sources

    def may_abandon(self, channel: Channel, how: Callable[[], object] | None) -> None:
        """Set how to abandon this source. Allowed only while it can write to nothing but staging. None: not now."""
        with self.changed:
            # Without tags, the receive that is left in flight would take a message of the next transfer.
            if how is not None and channel.group.tagged and not channel.group.serial:
                self.ways_out[channel.peer] = how
            else:
                self.ways_out.pop(channel.peer, None)

    @contextmanager
    def abandonable(self, channel: Channel, how: Callable[[], object] | None) -> Iterator[None]:
        """Allow that this source is abandoned during this block, by ``how``. Raises afterwards if it was."""
        self.may_abandon(channel, how)
        try:
            yield
        finally:
            self.may_abandon(channel, None)
        abandoned = self.why_abandoned(channel.peer)
        if abandoned is not None:
            raise abandoned

    def why_abandoned(self, rank: int) -> BaseException | None:
        """Why this source was abandoned, or None. An abandoned source gets no more tasks."""
        with self.changed:
            return self.abandoned.get(rank)

    def drop(self, rank: int) -> None:
        """Record that this source is needed no more, or is gone."""
        with self.changed:
            self.present.discard(rank)
            self.readers.discard(rank)
            self.changed.notify_all()

    def count(self) -> None:
        """Set ``total_bytes`` in each source's progress. Parcels that no source owes yet count for the first source."""
        if self.plan is None:
            return
        progress, ledger = self.progress, self.plan.ledger
        total = self.plan.landing.cut.total_bytes - self.report.kept_bytes
        for rank in self.ranks[1:]:
            progress[rank].total_bytes = ledger.bytes_with(rank)
        rest = sum(progress[rank].total_bytes or 0 for rank in self.ranks[1:])
        progress[self.ranks[0]].total_bytes = total - rest

    def park(self, rank: int) -> None:
        """Park the channel of a conversation that is still running when the caller stops."""
        channel = self.channels.get(rank)
        if channel is not None:
            channel.park(self.caller.cause)
