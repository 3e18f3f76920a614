"""One receive from all its sources: the tasks of their conversations, the handling of lost sources, and the result.

Each conversation hands in its source's offer and waits for the decision; then it asks for tasks until there are none.
If a source dies, hangs or answers wrongly, the parcels that it owed become tasks of the others.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from transfuse._errors import LimitExceeded, PeerError, PeerTimeout, ProtocolError, SourceMutated, TransfuseError
from transfuse._memory.compared import ComparedLanding
from transfuse._memory.held import HeldLanding
from transfuse._phases import WAITING, Phase
from transfuse._plan.shares import Share
from transfuse._session.comparing import ComparingLedger
from transfuse._session.context import Context, Partial, ReceiveRequest
from transfuse._session.held_state import HeldState
from transfuse._session.negotiation import Negotiator
from transfuse._session.roster import Roster
from transfuse._state.tensors import Bools
from transfuse._timeouts import Patience
from transfuse._wire.channel import Channel

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


class _Abandoned(NamedTuple):
    """A source that was just given up, and the function that leaves its conversation."""

    rank: int
    error: PeerTimeout
    leave: Callable[[], object]


class Receive:
    """The tasks of one receive, and its result. Any conversation's thread may call every method.

    ``roster.changed`` guards the attributes from ``_shares`` on.
    """

    def __init__(self, request: ReceiveRequest, context: Context) -> None:
        self.roster = Roster(request, context)
        self.negotiator = Negotiator(self.roster)
        self._patience = Patience(context.timeout)
        #: Held while a conversation reads a source's memory: one reader uses all threads.
        self.reading = threading.Lock()
        #: The share of each source: what it can send.
        self._shares: dict[int, Share] = {}
        #: Sources that have confirmed that their tensors are unchanged.
        self._confirmed: set[int] = set()
        #: The digest of each source's content; empty if the source does not know it and was not asked.
        self.contents: dict[int, bytes] = {}
        #: Whether a thread has begun to build the state.
        self._finishing = False
        #: A list that holds the state once it is built, and is empty before.
        self.result: list[Any] = []
        #: Held while the caller is asked for permission; and whether the caller has given it.
        self._asking = threading.Lock()
        self._permitted = request.permit is None

    def ask_permission(self, *, atomic: bool) -> None:
        """Ask the caller once whether targets may be written: at the end if the receive is atomic, else before it."""
        roster, request = self.roster, self.roster.request
        if self._permitted or atomic is not request.options.atomic:
            return
        with self._asking:
            if self._permitted:
                return
            if roster.failure is not None:
                raise roster.failure
            assert request.permit is not None
            try:
                request.permit(roster.accepted.cohorts, roster.accepted.target)
            except BaseException as error:
                roster.fail(error)
                raise
            self._permitted = True

    def share(self, rank: int) -> Share:
        """What a source can send. It is computed outside the lock, before the source gets its first task."""
        with self.roster.changed:
            known = self._shares.get(rank)
        if known is None:
            known = self.roster.accepted.landing.shares.of(rank)
            with self.roster.changed:
                self._shares[rank] = known
        return known

    # -- tasks

    def read_share(self, rank: int, nbytes: int, among: Any) -> Sequence[int]:
        """Assign about ``nbytes`` of parcels to be read from this source's memory."""
        roster = self.roster
        with roster.changed:
            roster.check(rank)
            numbers = roster.accepted.ledger.take(rank, nbytes, among)
            roster.count()
            return numbers

    def done_reading(self, rank: int) -> None:
        with self.roster.changed:
            self.roster.readers.discard(rank)
            self.roster.changed.notify_all()

    def next_task(self, channel: Channel, nbytes: float, compared: int) -> Fetch | Compare | Confirm | None:
        """Wait for the next task of this source's conversation; None when the receive is over.

        ``nbytes``: how many bytes to fetch at a time, and ``compared``: to compare.
        """
        rank, roster = channel.peer, self.roster
        while True:
            with roster.changed:
                roster.check(rank)
                if self.result:
                    return None
                roster.check_caller()
                task = self._find_task(rank, nbytes, compared)
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
        roster, ledger = self.roster, self.roster.accepted.ledger
        with roster.changed:
            while not (stopped() or self.result or ledger.complete or roster.caller.cause is not None):
                if roster.failure is not None or rank in roster.abandoned:
                    break
                numbers = ledger.take(lane, nbytes, self._to_fetch(rank))
                if len(numbers):
                    self._confirmed.discard(rank)
                    roster.count()
                    return numbers
                roster.changed.wait(Patience.SLICE_SECONDS)
        return ()

    def _to_fetch(self, rank: int) -> Bools:
        """Which parcels this source can bring over a connection."""
        held, accepted, readers = self._shares[rank].held, self.roster.accepted, self.roster.readers
        if readers and not accepted.ledger.complete:
            # Parcels that can be read from memory are not asked for over the group.
            held = held & ~accepted.landing.shares.covered_by(frozenset(readers))
        return held

    def patches_from(self, rank: int) -> bool:
        """Whether this source may send patches of what is here."""
        request = self.roster.request
        offer = self.negotiator.negotiation.offers.get(rank)
        return offer is not None and offer.history and request.options.delta and not request.only_compares

    def _to_compare(self, rank: int) -> Bools:
        """Which parcels are compared with this source's.

        Of several sources with a history each compares its part, the same part every time: there its history is.
        """
        roster, held = self.roster, self._shares[rank].held
        others = [other for other in sorted(roster.present) if self.patches_from(other)]
        if len(others) < 2 or rank not in others:
            return held
        covered = [roster.accepted.landing.shares.covered_by(frozenset([other])) for other in others]
        count = np.sum(covered, axis=0)
        # The parcels one after another, in equal parts: which of those that hold a parcel is to compare it.
        turn = np.arange(len(held)) * count // max(len(held), 1)
        before = np.sum(covered[: others.index(rank)], axis=0) if others.index(rank) else np.zeros(len(held), np.int64)
        mine: Bools = held & ((before == turn) | (count == 0))
        return mine

    def _find_task(self, rank: int, nbytes: float, compared: int) -> Fetch | Compare | Confirm | None:
        ledger = self.roster.accepted.ledger
        numbers = ledger.take_uncompared(rank, compared, self._to_compare(rank))
        if len(numbers):
            self._confirmed.discard(rank)
            return Compare(numbers)
        numbers = ledger.take(rank, nbytes, self._to_fetch(rank))
        if len(numbers):
            self._confirmed.discard(rank)
            self.roster.count()
            return Fetch(numbers)
        if ledger.complete and rank not in self._confirmed and ledger.bytes_from(rank):
            return Confirm()
        return None

    def more(self, rank: int, holder: int, nbytes: float) -> range:
        """Assign further parcels to a source that is sending, or to one of its lanes; return the source's numbers."""
        roster = self.roster
        with roster.changed:
            if roster.failure is not None or rank in roster.abandoned:
                return range(0)
            numbers = roster.accepted.ledger.take_run(holder, nbytes, self._shares[rank].order)
            roster.count()
            return numbers

    def compared(self, rank: int, numbers: Sequence[int], same: Bools, patched: Bools, patch_bytes: int) -> None:
        """Record a comparison: which of our parcels ``numbers`` equal the source's, and which do since a patch."""
        roster, ledger = self.roster, self.roster.accepted.ledger
        with roster.changed:
            brought_by = ledger.doubted(numbers)
            ledger.compared(rank, numbers, same, patched)
            chosen = np.asarray(numbers, dtype=np.int64)
            roster.progress[rank].kept_bytes += ledger.bytes_of(chosen[same & (brought_by < 0)].tolist())
            roster.report.repaired += int((~same & (brought_by >= 0)).sum())
            if patch_bytes:
                roster.report.patch(rank, patch_bytes, ledger.bytes_of(chosen[patched].tolist()), int(patched.sum()))
            for one in {rank, *np.unique(brought_by[brought_by >= 0]).tolist()}:
                roster.progress[one].bytes = ledger.bytes_from(one)
            roster.report.kept_bytes = ledger.kept_bytes
            roster.count()
            try:
                roster.accepted.check_room()
            except LimitExceeded as error:
                roster.fail(error)

    def confirmed(self, rank: int) -> None:
        with self.roster.changed:
            self._confirmed.add(rank)
            self.roster.changed.notify_all()

    # -- losses

    def lost(self, rank: int, error: BaseException) -> None:
        """Record that a conversation has failed. The other sources send what this source owed.

        What the source brought stays, unless its tensors have changed.
        """
        roster = self.roster
        with roster.changed:
            self.negotiator.negotiation.lose(rank, error)
            roster.ways_out.pop(rank, None)
            roster.drop(rank)
            if roster.plan is not None:
                ledger = roster.plan.ledger
                ledger.give_back(rank)
                if isinstance(error, SourceMutated):
                    ledger.disown(rank)
                roster.progress[rank].bytes = ledger.bytes_from(rank)
                roster.count()
                self.negotiator.look_for_orphans(rank, error)
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
        roster = self.roster
        with roster.changed:
            abandoned = self._give_up_silent()
        for rank, error, leave in abandoned:
            roster.channels[rank].say_why(error)
            leave()
            self.lost(rank, error)
            roster.caller.leave(rank, error)

    def _give_up_silent(self) -> list[_Abandoned]:
        """Give up sources that are silent for too long; if the receive is over, also those that never offered.

        Call it under the lock. From here on the receive does not count on these sources. The caller must still leave
        their conversations. Only then may others be asked for the parcels that these sources owe: until then, these
        sources may still write to the parcels' memory.
        """
        roster, negotiation = self.roster, self.negotiator.negotiation
        abandoned: list[_Abandoned] = []
        for rank, leave in roster.ways_out.items():
            channel = roster.channels[rank]
            silent = channel.silent_seconds()
            if (self.result and rank in negotiation.awaited) or silent > self._longest_silence(rank):
                abandoned.append(_Abandoned(rank, PeerTimeout(rank, channel.phase, silent), leave))
        for rank, error, _ in abandoned:
            del roster.ways_out[rank]
            roster.abandoned[rank] = error
            roster.present.discard(rank)
            negotiation.lose(rank, error)
        if abandoned:
            roster.changed.notify_all()
        return abandoned

    def _longest_silence(self, rank: int) -> float:
        """How many seconds this source may be silent."""
        roster, negotiation = self.roster, self.negotiator.negotiation
        if roster.plan is None:
            needed = negotiation.uncovered or not negotiation.offers.keys() - {rank}
        else:
            needed = not roster.plan.ledger.complete and not roster.plan.covered_by(roster.present - {rank})
        if needed and len(roster.channels) == 1:
            return float("inf")  # There is no other source to go on with: the channel's own timeout ends the wait.
        return self._patience.silent_source(needed=needed)

    # -- the result

    def _begin_to_finish(self) -> bool:
        """Whether this thread has to build the state. Call it under the lock. True only once."""
        finishes = self._is_over() and not self._finishing
        self._finishing |= finishes
        return finishes

    def _is_over(self) -> bool:
        """Whether everything has arrived, and every source that brought something and is still here has confirmed."""
        plan = self.roster.plan
        if plan is None or self.result or not plan.ledger.complete:
            return False
        owing = {rank for rank in self.roster.present if plan.ledger.bytes_from(rank)}
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
            self.result.append(state)
            self.roster.changed.notify_all()

    def _build(self, rank: int) -> Any:
        """Build the state. The data may still be invalid, for example the indices of a sparse tensor."""
        try:
            self.ask_permission(atomic=True)
            accepted = self.roster.accepted
            request = self.roster.request
            if isinstance(accepted.landing, ComparedLanding):
                assert isinstance(accepted.ledger, ComparingLedger)
                self.roster.report.verified = True
                return accepted.landing.outcome(accepted.ledger.differing)
            if not isinstance(accepted.landing, HeldLanding):
                return accepted.landing.finish(accepted.build_context, accepted.registry)
            held = HeldState(accepted, accepted.landing, self.roster.context, request.outline)
            if request.hold:
                return held
            held.install()
            return held.state
        except TransfuseError:
            raise
        except Exception as error:
            raise ProtocolError(rank, f"rank {rank} sent data from which the state cannot be built: {error}") from error

    def close(self) -> None:
        """End the landing: bump the version counters of the tensors that were written, so that autograd notices."""
        if self.roster.plan is not None:
            self.roster.plan.landing.bump_versions()

    # -- what an error says

    def _may_be_written_late(self) -> bool:
        """Whether a silent source may still write to memory of ours that a later receive would resume from."""
        if self.roster.several or self.roster.accepted.landing.writes_targets:
            return False  # What is in flight is staging; or the communicators were aborted.
        return any(channel.has_stuck for channel in self.roster.channels.values())

    def account_for(self, error: BaseException) -> None:
        """Fill in the error's ``received``, ``missing``, ``torn`` and ``partial``."""
        accepted, report = self.roster.plan, self.roster.report
        if self.roster.request.only_compares:
            return
        if accepted is None:
            resume = self.roster.request.resume
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
            landed = accepted.ledger.landed | (accepted.ledger.uncompared & accepted.resumed)
            kept = accepted.kept
        error.received, error.missing = accepted.landing.account(landed)
        if isinstance(accepted.landing, HeldLanding):
            landed = landed & ~kept  # They lie in the targets, and not in the memory that is resumed from.
        if landed.any() and not self._may_be_written_late():
            error.partial = Partial(
                step=accepted.offer.step,
                likeness=accepted.offer.likeness,
                parcel_bytes=accepted.parcel_bytes,
                fingerprint=accepted.landing.fingerprint,
                landed=landed,
                nbytes=accepted.landing.cut.payload,
                memory=accepted.landing.memory,
                torn=report.torn,
            )
