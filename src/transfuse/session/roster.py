"""The roster of a receive: which of its sources are here, which are gone and why, and the one lock of them all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transfuse.phases import Phase
from transfuse.session.context import Context
from transfuse.wire.channel import Channel

__all__ = ["Roster"]


class Roster:
    """What all conversations of one receive share.

    ``changed`` is their only lock. It guards everything that they share: the attributes below it here, those of
    :class:`~transfuse.session.negotiation.Negotiation` and of its ``Negotiator``, of
    :class:`~transfuse.session.ledger.Ledger` and of :class:`~transfuse.session.receive_from_all.Receive`. It is
    reentrant, and notified whenever any of them changes.

    A decision is acted on in the critical section in which it is taken. Where the act takes long (planning, building,
    leaving a source), that section writes the decision down instead, so that nobody decides otherwise meanwhile: the
    negotiation keeps who is deciding, ``Receive`` that somebody is building, ``abandoned`` who was given up.
    """

    def __init__(self, context: Context) -> None:
        self.ranks = context.ranks
        self.caller = context.caller
        self.report = context.report
        self.progress = context.progress
        self.changed = threading.Condition()
        #: The sources whose conversation has begun.
        self.channels: dict[int, Channel] = {}
        #: The sources that are here, have been agreed on and are needed.
        self.present: set[int] = set()
        #: The sources that were silent for too long, and how that is said.
        self.abandoned: dict[int, BaseException] = {}
        #: How to abandon each source of which that is possible now.
        self.ways_out: dict[int, Callable[[], object]] = {}
        #: Why the receive has failed.
        self.failure: BaseException | None = None

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    @contextmanager
    def phase(self, channel: Channel, phase: Phase) -> Iterator[None]:
        """A conversation is in a phase."""
        channel.phase = self.progress[channel.peer].phase = phase.doing
        with self.caller.phase(self.report, phase):
            yield

    def join(self, channel: Channel) -> None:
        """A conversation begins."""
        with self.changed:
            self.channels[channel.peer] = channel
            # In flight is only a receive for its first word.
            self.may_abandon(channel, channel.abandon if self.several else None)

    def fail(self, error: BaseException) -> None:
        """The receive ends for a reason that no other source would mend."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def check(self, rank: int) -> None:
        """Raise what ends the receive, or this source's part in it."""
        with self.changed:
            for cause in (self.failure, self.abandoned.get(rank)):
                if cause is not None:
                    raise cause

    def check_caller(self) -> None:
        """Raise what the caller wants to stop for."""
        if self.caller.cause is not None:
            raise self.caller.cause

    # -- how a source can be abandoned

    def may_abandon(self, channel: Channel, how: Callable[[], object] | None) -> None:
        """Set how to abandon this source. Allowed only while it can write to nothing but staging. None: not now."""
        with self.changed:
            # Without tags what is left behind would be in the way of the next transfer.
            if how is not None and channel.group.tagged and not channel.group.serial:
                self.ways_out[channel.peer] = how
            else:
                self.ways_out.pop(channel.peer, None)

    @contextmanager
    def abandonable(self, channel: Channel, how: Callable[[], object] | None) -> Iterator[None]:
        """While this source may be abandoned, and how. Raises afterwards if it was."""
        self.may_abandon(channel, how)
        try:
            yield
        finally:
            self.may_abandon(channel, None)
        abandoned = self.why_abandoned(channel.peer)
        if abandoned is not None:
            raise abandoned

    def why_abandoned(self, rank: int) -> BaseException | None:
        """Why this source was abandoned, if it was. It gets no task any more."""
        with self.changed:
            return self.abandoned.get(rank)

    def park(self, rank: int) -> None:
        """The caller stops while this conversation is still going on."""
        channel = self.channels.get(rank)
        if channel is not None:
            channel.park()
