"""One receive from all its sources: the tasks of their conversations, the handling of lost sources, and the result.

Each conversation hands in its source's offer and waits for the decision; then it asks for tasks until there are none.
If a source dies, hangs or answers wrongly, the parcels that it owed become tasks of the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from transfuse._errors import PeerError, ProtocolError, SourceMutated, TransfuseError
from transfuse._phases import WAITING, Phase
from transfuse._plan.shares import Share
from transfuse._session.context import Context, ReceiveRequest
from transfuse._session.ledger import Ledger
from transfuse._session.negotiation import Negotiator
from transfuse._session.partial import Partial
from transfuse._session.planning import Accepted
from transfuse._session.roster import Roster
from transfuse._session.silent_sources import SilentSources
from transfuse._sizes import Sizes
from transfuse._state.tensors import Bools
from transfuse._timeouts import Patience
from transfuse._wire import route_table
from transfuse._wire.channel import Channel
from transfuse._wire.messages import Offer

logger = logging.getLogger("transfuse")


@dataclass(frozen=True)
class Fetch:
    """Get these parcels from the source."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Compare:
    """Find out which of these parcels, which may be here already, equal the source's."""

    numbers: Sequence[int]


@dataclass(frozen=True)
class Confirm:
    """Ask the source whether its tensors are unchanged since it described them."""


class Receive:
    """What the conversations of one receive share. Any conversation's thread may call every method.

    ``roster.changed`` guards the attributes from ``_shares`` on.
    """

    def __init__(self, request: ReceiveRequest, context: Context) -> None:
        self.roster = Roster(context)
        #: The transport's lanes.
        self.lanes = context.lanes
        self.negotiator = Negotiator(self.roster, request, context)
        self._silent = SilentSources(self.roster, self.negotiator, Patience(context.timeout))
        #: Held while a conversation reads a source's memory: one reader uses all threads.
        self.reading = threading.Lock()
        #: The share of each source: what it can send.
        self._shares: dict[int, Share] = {}
        #: Sources whose memory may still be read at full speed. What they hold is not asked for over the group.
        self._readers: set[int] = set()
        #: Sources that have confirmed that their tensors are unchanged.
        self._confirmed: set[int] = set()
        #: Whether a thread has begun to build the state; and a list that holds the state once it is built.
        self._finishing = False
        self._result: list[Any] = []
        #: Held while the caller is asked for permission; and whether the caller has given it.
        self._asking = threading.Lock()
        self._permitted = request.permit is None

    @property
    def accepted(self) -> Accepted:
        assert self.negotiator.accepted is not None
        return self.negotiator.accepted

    @property
    def ledger(self) -> Ledger:
        assert self.negotiator.ledger is not None
        return self.negotiator.ledger

    @property
    def request(self) -> ReceiveRequest:
        return self.negotiator.request

    @property
    def failure(self) -> BaseException | None:
        return self.roster.failure

    @property
    def result(self) -> list[Any]:
        """A list that holds the state once it is built, and is empty before."""
        return self._result

    def agree(self, channel: Channel, offer: Offer, describe: Callable[[], Offer]) -> None:
        """Hand in an offer, and wait for the decision. Raises if this source is not used."""
        self.negotiator.agree(channel, offer, describe)
        with self.roster.changed:
            self.negotiator.check(channel.peer)
            self.roster.present.add(channel.peer)
            if offer.max_bytes_per_second is None and route_table.usable(offer.routes, self.request.options):
                self._readers.add(channel.peer)
            self._count()
            self.roster.changed.notify_all()

    def ask_permission(self, *, atomic: bool) -> None:
        """Ask the caller once whether targets may be written: at the end if the receive is atomic, else before it."""
        if self._permitted or atomic is not self.request.options.atomic:
            return
        with self._asking:
            if self._permitted:
                return
            if self.failure is not None:
                raise self.failure
            assert self.request.permit is not None
            try:
                self.request.permit(self.accepted.cohorts, self.accepted.target)
            except BaseException as error:
                self.roster.fail(error)
                raise
            self._permitted = True

    def share(self, rank: int) -> Share:
        """What a source can send. It is computed outside the lock, before the source gets its first task."""
        with self.roster.changed:
            known = self._shares.get(rank)
        if known is None:
            known = self.accepted.shares.of(rank)
            with self.roster.changed:
                self._shares[rank] = known
        return known

    # -- tasks

    def read_share(self, rank: int, nbytes: int, among: Any) -> Sequence[int]:
        """Assign about ``nbytes`` of parcels to be read from this source's memory."""
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
        """Wait for the next task of this source's conversation; None when the receive is over."""
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

    def lane_task(self, rank: int, lane: int, nbytes: float, stopped: Callable[[], bool]) -> Sequence[int]:
        """Wait for parcels that a lane of this source can bring; empty: there will be none."""
        roster = self.roster
        with roster.changed:
            while not (stopped() or self._result or self.ledger.complete or roster.caller.cause is not None):
                if roster.failure is not None or rank in roster.abandoned:
                    break
                numbers = self.ledger.take(lane, nbytes, self._to_fetch(rank))
                if len(numbers):
                    self._confirmed.discard(rank)
                    self._count()
                    return numbers
                roster.changed.wait(Patience.SLICE_SECONDS)
        return ()

    def _to_fetch(self, rank: int) -> Bools:
        """Which parcels this source can bring over a connection."""
        held = self._shares[rank].held
        if self._readers and not self.ledger.complete:
            # Parcels that can be read from memory are not asked for over the group.
            held = held & ~self.accepted.shares.covered_by(frozenset(self._readers))
        return held

    def _find_task(self, rank: int, nbytes: float) -> Fetch | Compare | Confirm | None:
        held = self._shares[rank].held
        numbers = self.ledger.take_uncompared(rank, Sizes.COMPARE_BYTES, held)
        if len(numbers):
            return Compare(numbers)
        numbers = self.ledger.take(rank, nbytes, self._to_fetch(rank))
        if len(numbers):
            self._confirmed.discard(rank)
            self._count()
            return Fetch(numbers)
        if self.ledger.complete and rank not in self._confirmed and self.ledger.bytes_from(rank):
            return Confirm()
        return None

    def more(self, rank: int, nbytes: float, lane: int | None = None) -> range:
        """Assign further parcels to a source that is sending, or to one of its lanes; return the source's numbers."""
        with self.roster.changed:
            if self.roster.failure is not None or rank in self.roster.abandoned:
                return range(0)
            holder = rank if lane is None else lane
            numbers = self.ledger.take_run(holder, nbytes, self._shares[rank].order)
            self._count()
            return numbers

    def compared(self, rank: int, numbers: Sequence[int], same: Bools) -> None:
        """Record a comparison: ``same[i]`` says whether our parcel ``numbers[i]`` equals the source's."""
        with self.roster.changed:
            brought_by = self.ledger.doubted(numbers)
            self.ledger.compared(rank, numbers, same)
            kept = self.ledger.bytes_of(np.asarray(numbers, dtype=np.int64)[same & (brought_by < 0)].tolist())
            self.roster.progress[rank].kept_bytes += kept
            self.roster.report.repaired += int((~same & (brought_by >= 0)).sum())
            for one in np.unique(brought_by[brought_by >= 0]).tolist():
                self.roster.progress[one].bytes = self.ledger.bytes_from(one)
            self.roster.report.kept_bytes = self.ledger.kept_bytes
            self._count()

    def release(self, rank: int) -> None:
        """Record that nothing is needed from this source."""
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
        """Release the parcels that an abandoned source owes."""
        if self.negotiator.ledger is not None:
            self.ledger.give_back(rank)

    def lost(self, rank: int, error: BaseException) -> None:
        """Record that a conversation has failed. The other sources send what this source owed.

        What the source brought stays, unless its tensors have changed.
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
            # If everything has arrived, a lost source does not matter. A caller that stopped wants no result.
            stopped = roster.failure is not None or roster.caller.cause is not None or not isinstance(error, PeerError)
            finishes = not stopped and self._begin_to_finish()
        if finishes:
            # Everything has arrived, and no other conversation may be left to build the state.
            self._finish(rank)
        elif roster.several and isinstance(error, PeerError):
            logger.warning("source %d is lost, the others bring what it owed: %s", rank, error)

    def watch(self) -> None:
        """Abandon sources that have been silent for too long. The calling thread calls this regularly."""
        with self.roster.changed:
            abandoned = self._silent.give_up(over=bool(self._result))
        for rank, error, leave in abandoned:
            self.roster.channels[rank].say_why(error)
            leave()
            self.lost(rank, error)
            self.roster.caller.leave(rank, error)

    # -- the result

    def _begin_to_finish(self) -> bool:
        """Whether this thread has to build the state. Call it under the lock. True only once."""
        finishes = self._is_over() and not self._finishing
        self._finishing |= finishes
        return finishes

    def _is_over(self) -> bool:
        """Whether everything has arrived, and every source that brought something and is still here has confirmed."""
        if self.negotiator.ledger is None or self._result or not self.ledger.complete:
            return False
        owing = {rank for rank in self.roster.present if self.ledger.bytes_from(rank)}
        return owing <= self._confirmed

    def _finish(self, rank: int) -> None:
        """Build the state. If the data cannot be built, the error names ``rank``."""
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
        """Build the state. The data may still be invalid, for example the indices of a sparse tensor."""
        try:
            self.ask_permission(atomic=True)
            return self.accepted.landing.finish(self.accepted.build_context, self.accepted.registry)
        except TransfuseError:
            raise
        except Exception as error:
            raise ProtocolError(rank, f"rank {rank} sent data from which the state cannot be built: {error}") from error

    def close(self) -> None:
        """End the landing: bump the version counters of the tensors that were written, so that autograd notices."""
        if self.negotiator.accepted is not None:
            self.accepted.landing.bump_versions()

    def remember(self) -> None:
        """Keep the plan for a later receive. Called at the very end, if no source was lost."""
        if self.accepted.remember is not None:
            self.accepted.remember()

    # -- progress, and what an error says

    def _count(self) -> None:
        """Set ``total_bytes`` in each source's progress. Parcels that no source owes yet count for the first source."""
        if self.negotiator.ledger is None:
            return
        ranks, progress = self.roster.ranks, self.roster.progress
        total = self.accepted.cut.total_bytes - self.roster.report.kept_bytes
        for rank in ranks[1:]:
            progress[rank].total_bytes = self.ledger.bytes_with(rank)
        rest = sum(progress[rank].total_bytes or 0 for rank in ranks[1:])
        progress[ranks[0]].total_bytes = total - rest

    def _may_be_written_late(self) -> bool:
        """Whether a silent source may still write to memory of ours that a later receive would resume from."""
        if self.roster.several or self.accepted.landing.writes_targets:
            return False  # What is in flight is staging; or the communicators were aborted.
        return any(channel.has_stuck for channel in self.roster.channels.values())

    def account_for(self, error: BaseException) -> None:
        """Fill in the error's ``received``, ``missing``, ``torn`` and ``partial``."""
        accepted, report = self.negotiator.accepted, self.roster.report
        if accepted is None:
            resume = self.request.resume
            if resume is not None and isinstance(error, TransfuseError):
                error.partial, error.torn = resume, resume.torn  # This receive has not touched it.
            return
        report.torn = accepted.landing.torn()
        if not isinstance(error, TransfuseError):
            if report.torn:
                error.add_note(f"torn target leaves: {', '.join(report.torn[:100])}")
            return
        error.torn = report.torn
        with self.roster.changed:
            # Parcels that an earlier receive left and that nobody has compared yet can still be resumed from.
            landed = self.ledger.landed | (self.ledger.uncompared & self.negotiator.resumed)
        error.received, error.missing = accepted.landing.account(landed)
        if landed.any() and not self._may_be_written_late():
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
