"""One receive from all its sources: the tasks of their conversations, what becomes of a lost source, and the result.

Each conversation hands in its offer and hears what was agreed on; then it asks for tasks until there are none. If a
source dies, hangs or answers wrongly, what it owed becomes the others' tasks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfuse.errors import PeerError, ProtocolError, SourceMutated, TransfuseError
from transfuse.phases import WAITING, Phase
from transfuse.plan.shares import Share
from transfuse.session.context import Context, Request
from transfuse.session.ledger import Ledger
from transfuse.session.negotiation import Negotiator
from transfuse.session.partial import Partial
from transfuse.session.planning import Accepted
from transfuse.session.roster import Roster
from transfuse.session.silent_sources import SilentSources
from transfuse.sizes import Sizes
from transfuse.state.tensors import Bools
from transfuse.timeouts import Patience
from transfuse.wire import route_table
from transfuse.wire.channel import Channel
from transfuse.wire.messages import Offer

__all__ = ["Compare", "Confirm", "Fetch", "Receive"]

logger = logging.getLogger("transfuse")


@dataclass(frozen=True)
class Fetch:
    """Bring these parcels."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Compare:
    """Find out which of these parcels, of which something is here already, the source has too."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Confirm:
    """Ask the source whether what it brought is still what it has."""


class Receive:
    """What the conversations of one receive do together. Every method may be called from any of their threads.

    ``roster.changed`` guards the attributes from ``_shares`` on.
    """

    def __init__(self, request: Request, context: Context) -> None:
        self.roster = Roster(context)
        self.negotiator = Negotiator(self.roster, request, context)
        self._silent = SilentSources(self.roster, self.negotiator, Patience(context.timeout))
        #: Held while parcels are read from a source's memory: one reader uses all threads.
        self.reading = threading.Lock()
        #: What each source can send.
        self._shares: dict[int, Share] = {}
        #: Sources whose memory may yet be read at full speed. Nothing is asked for over the group before that.
        self._readers: set[int] = set()
        #: Sources that have said that what they brought holds.
        self._confirmed: set[int] = set()
        #: Whether somebody builds the state, and the state in a list once it is built.
        self._finishing = False
        self._result: list[Any] = []

    @property
    def accepted(self) -> Accepted:
        assert self.negotiator.accepted is not None
        return self.negotiator.accepted

    @property
    def ledger(self) -> Ledger:
        assert self.negotiator.ledger is not None
        return self.negotiator.ledger

    @property
    def request(self) -> Request:
        return self.negotiator.request

    @property
    def failure(self) -> BaseException | None:
        return self.roster.failure

    @property
    def result(self) -> list[Any]:
        """The state, once it is there."""
        return self._result

    def agree(self, channel: Channel, offer: Offer, describe: Callable[[], Offer]) -> None:
        """Hand in an offer, and wait until it is known what the sources agree on. Raises unless this one does."""
        self.negotiator.agree(channel, offer, describe)
        with self.roster.changed:
            self.negotiator.check(channel.peer)
            self.roster.present.add(channel.peer)
            same_host = self.request.options.same_host
            if offer.max_bytes_per_second is None and route_table.usable(offer.routes, same_host=same_host):
                self._readers.add(channel.peer)
            self._count()
            self.roster.changed.notify_all()

    def share(self, rank: int) -> Share:
        """What a source can send. It is worked out outside of the lock, before the source gets its first task."""
        with self.roster.changed:
            known = self._shares.get(rank)
        if known is None:
            known = self.accepted.shares.of(rank)
            with self.roster.changed:
                self._shares[rank] = known
        return known

    # -- tasks

    def read_share(self, rank: int, nbytes: int, among: Any) -> Sequence[int]:
        """Parcels to be read from this source's memory."""
        with self.roster.changed:
            self.roster.check(rank)
            numbers = self.ledger.take(rank, nbytes, among)
            self._count()
            return numbers

    def done_reading(self, rank: int) -> None:
        with self.roster.changed:
            self._readers.discard(rank)
            self.roster.changed.notify_all()

    def next_task(self, channel: Channel, nbytes: float) -> Fetch | Compare | Confirm | None:
        """Wait until there is something for this source to do; None when the receive is over."""
        rank, roster = channel.peer, self.roster
        while True:
            with roster.changed:
                roster.check(rank)
                if self._result:
                    return None
                roster.check_caller()
                task = self._find_task(rank, nbytes)
                if task is not None:
                    return task
                finishes = self._begin_to_finish()
                if not finishes:
                    roster.progress[rank].phase = WAITING
                    roster.changed.wait(Patience.SLICE_SECONDS)
            if finishes:
                self._finish(rank)

    def _find_task(self, rank: int, nbytes: float) -> Fetch | Compare | Confirm | None:
        held = self._shares[rank].held
        numbers = self.ledger.take_uncompared(rank, Sizes.COMPARE_BYTES, held)
        if len(numbers):
            return Compare(numbers)
        if self._readers and not self.ledger.complete:
            # What can be read is read.
            held = held & ~self.accepted.shares.covered_by(frozenset(self._readers))
        numbers = self.ledger.take(rank, nbytes, held)
        if len(numbers):
            self._confirmed.discard(rank)
            self._count()
            return Fetch(numbers)
        if self.ledger.complete and rank not in self._confirmed and self.ledger.bytes_from(rank):
            return Confirm()
        return None

    def more(self, rank: int, nbytes: float) -> range:
        """What a source that is bringing parcels may bring next."""
        with self.roster.changed:
            if self.roster.failure is not None or rank in self.roster.abandoned:
                return range(0)
            numbers = self.ledger.take_run(rank, nbytes, self._shares[rank].order)
            self._count()
            return numbers

    def compared(self, rank: int, numbers: Sequence[int], same: Bools) -> None:
        """Record a comparison: ``same[i]`` says whether our parcel ``numbers[i]`` equals the source's."""
        with self.roster.changed:
            self.ledger.compared(rank, numbers, same)
            kept = self.ledger.bytes_of(np.asarray(numbers, dtype=np.int64)[same].tolist())
            self.roster.progress[rank].kept_bytes += kept
            self.roster.report.kept_bytes = self.ledger.kept_bytes
            self._count()

    def release(self, rank: int) -> None:
        """Nothing is needed from this source."""
        with self.roster.changed:
            self.roster.present.discard(rank)
            self._readers.discard(rank)
            self.roster.changed.notify_all()

    def confirmed(self, rank: int) -> None:
        with self.roster.changed:
            self._confirmed.add(rank)
            self.roster.changed.notify_all()

    # -- losses

    def give_back(self, rank: int) -> None:
        """A source that was abandoned brings nothing any more."""
        if self.negotiator.ledger is not None:
            self.ledger.give_back(rank)

    def lost(self, rank: int, error: BaseException) -> None:
        """A conversation has failed. What its source owes is wanted from others; what it brought stays, unless it has
        been changed meanwhile.
        """
        roster = self.roster
        with roster.changed:
            self.negotiator.negotiation.lose(rank, error)
            roster.present.discard(rank)
            roster.ways_out.pop(rank, None)
            self._readers.discard(rank)
            if self.negotiator.ledger is not None:
                self.ledger.give_back(rank)
                if isinstance(error, SourceMutated):
                    self.ledger.disown(rank)
                roster.progress[rank].bytes = self.ledger.bytes_from(rank)
                self._count()
                self.negotiator.look_for_orphans(rank, error)
            roster.changed.notify_all()
            # Only a source that is gone leaves a receive that is over: not a caller that wants none.
            stopped = roster.failure is not None or roster.caller.cause is not None or not isinstance(error, PeerError)
            finishes = not stopped and self._begin_to_finish()
        if finishes:
            # Everything is here, and nobody else is left to notice.
            self._finish(rank)
        elif roster.several and isinstance(error, PeerError):
            logger.warning("source %d is lost, the others bring what it owed: %s", rank, error)

    def watch(self) -> None:
        """Called by the calling thread from time to time: abandon sources that are silent while others are not."""
        with self.roster.changed:
            abandoned = self._silent.give_up(over=bool(self._result))
        for rank, error, leave in abandoned:
            leave()
            self.lost(rank, error)
            self.roster.caller.leave(rank, error)

    # -- the result

    def _begin_to_finish(self) -> bool:
        """Whether this thread is to build the state. Under the lock; True only once."""
        finishes = self._is_over() and not self._finishing
        self._finishing |= finishes
        return finishes

    def _is_over(self) -> bool:
        """Everything is here, and whoever brought it and is still here has said that it holds."""
        if self.negotiator.ledger is None or self._result or not self.ledger.complete:
            return False
        owing = {rank for rank in self.roster.present if self.ledger.bytes_from(rank)}
        return owing <= self._confirmed

    def _finish(self, rank: int) -> None:
        """Build the state. A source is named for what may be wrong with it."""
        try:
            with self.roster.phase(self.roster.channels[rank], Phase.FINISH):
                state = self._build(rank)
        except BaseException as error:
            self.roster.fail(error)
            return
        with self.roster.changed:
            self._result.append(state)
            self.roster.changed.notify_all()

    def _build(self, rank: int) -> Any:
        """Build the state from what has landed, which may still be nonsense: indices of a sparse tensor are data."""
        try:
            return self.accepted.landing.finish(self.accepted.build_context, self.accepted.kinds)
        except TransfuseError:
            raise
        except Exception as error:
            raise ProtocolError(rank, f"rank {rank} sent data that cannot be built: {error}") from error

    def close(self) -> None:
        """Nothing lands any more: tell autograd what has."""
        if self.negotiator.accepted is not None:
            self.accepted.landing.bump_versions()

    # -- accounts

    def _count(self) -> None:
        """Say in each source's progress what it is to bring; what nobody owes yet stands with the first."""
        if self.negotiator.ledger is None:
            return
        ranks, progress = self.roster.ranks, self.roster.progress
        total = self.accepted.cut.total_bytes - self.roster.report.kept_bytes
        for rank in ranks[1:]:
            progress[rank].total_bytes = self.ledger.bytes_with(rank)
        rest = sum(progress[rank].total_bytes or 0 for rank in ranks[1:])
        progress[ranks[0]].total_bytes = total - rest

    def account_for(self, error: BaseException) -> None:
        """Say in an error what has become of the receive."""
        accepted, report = self.negotiator.accepted, self.roster.report
        if accepted is None:
            resume = self.request.resume
            if resume is not None and isinstance(error, TransfuseError):
                error.partial, error.torn = resume, resume.torn  # It was not even looked at.
            return
        report.torn = accepted.landing.torn()
        if not isinstance(error, TransfuseError):
            if report.torn:
                error.add_note(f"torn target leaves: {', '.join(report.torn[:100])}")
            return
        error.torn = report.torn
        with self.roster.changed:
            # What an earlier receive had left, and nobody has looked at, is still left.
            landed = self.ledger.landed | (self.ledger.uncompared & self.negotiator.resumed)
        error.received, error.missing = accepted.landing.account(landed)
        if landed.any():
            error.partial = Partial(
                step=accepted.offer.step,
                likeness=accepted.offer.likeness,
                parcel_bytes=accepted.parcel_bytes,
                fingerprint=accepted.landing.fingerprint,
                landed=landed,
                nbytes=accepted.cut.payload,
                memory=accepted.landing.fresh,
                torn=report.torn,
            )
