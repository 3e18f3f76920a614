"""Negotiation: from the sources' offers to the decision which sources are used, and for what.

Every source is awaited, has offered, or is gone. An offer is *described* once the receiver has its description: from
the source itself, or from another source whose offer has the same likeness. Correctness rests on one rule: **when the
receiver decides, every offer that it has is described, and the decision is about all of these offers.** The rule holds
by construction: :meth:`Negotiation.next_turn` checks that every offer is described and copies the offers, in one step.
An offer that comes later is not part of that decision.

:class:`Negotiation` is a plain state machine: it has no lock and no clock, and never waits. Its owner calls every
method under one lock. :class:`Negotiator` is that owner: it lets the sources' conversations wait, describe, decide and
plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from transfuse._errors import NotCovered, PeerTimeout, ReceiveFailed, TransfuseError
from transfuse._memory import streams
from transfuse._phases import WAITING, Phase
from transfuse._plan.match import prepare
from transfuse._plan.outline import outline
from transfuse._session import source_choice
from transfuse._session.context import Partial
from transfuse._session.offers import OfferWithManifest, describe, is_described, read_description
from transfuse._session.planning import Accepted, accept
from transfuse._session.roster import Roster
from transfuse._sizes import Sizes
from transfuse._state.manifest import Manifest
from transfuse._timeouts import Patience
from transfuse._wire import route_table
from transfuse._wire.channel import Channel
from transfuse._wire.messages import Offer

logger = logging.getLogger("transfuse")


@dataclass(frozen=True)
class WaitForChange:
    """This conversation has nothing to do until something changes."""


@dataclass(frozen=True)
class Describe:
    """Ask this conversation's source to describe its state, and hand the description in."""


@dataclass(frozen=True)
class Decide:
    """Choose among these offers and plan, then report the outcome. Every offer here is described."""

    offers: dict[int, Offer]
    described: dict[bytes, OfferWithManifest]


@dataclass(frozen=True)
class Decided:
    """The decision stands, with this source's offer or without it (``late``); or this source is not used."""

    late: bool = False


Turn = WaitForChange | Describe | Decide | Decided


class Negotiation:
    """Tracks who has offered what and who is asked to describe it, and says when to decide."""

    def __init__(self, ranks: Iterable[int], patience: float) -> None:
        #: Sources that have neither offered nor been lost.
        self.awaited = set(ranks)
        #: The offer of each source that is here.
        self.offers: dict[int, Offer] = {}
        #: Sources that are not used, and why.
        self.dropped: dict[int, TransfuseError] = {}
        #: Whether a decision failed because the sources that had offered did not hold everything.
        self.uncovered = False
        #: Sources that are gone, and why.
        self.gone: dict[int, BaseException] = {}
        #: The likeness of each source's offer, also of sources that are gone.
        self._likenesses: dict[int, bytes] = {}
        #: How many seconds the decision waits for awaited sources after the first offer, and when that time ends.
        self._patience = patience
        self._decide_at = float("inf")
        #: When the first offer came.
        self.first_at = float("inf")
        #: For each likeness: the description; and, until it is here, the source that has been asked for it.
        self._described: dict[bytes, OfferWithManifest] = {}
        self._asked: dict[bytes, int] = {}
        #: The decision that a conversation is working on, if any.
        self._deciding: Decide | None = None
        #: The sources whose offers the last decision considered. If a decision stands, it is that one.
        self._considered: frozenset[int] = frozenset()
        self._decided = False

    # -- events that conversations report

    def hand_in(self, rank: int, offer: Offer, now: float) -> None:
        """Record a source's offer. The offer of a source that is already given up is ignored."""
        self.awaited.discard(rank)
        self._likenesses[rank] = offer.likeness
        if rank not in self.gone:
            self.offers[rank] = offer
            self.first_at = min(self.first_at, now)
            self._decide_at = min(self._decide_at, now + self._patience)

    def hand_in_description(self, rank: int, described: OfferWithManifest) -> None:
        """Record the description that a source was asked for. It stays valid even if the source is gone by now."""
        likeness = described.offer.likeness
        self._described.setdefault(likeness, described)
        if self._asked.get(likeness) == rank:
            del self._asked[likeness]

    def lose(self, rank: int, error: BaseException) -> None:
        """Record that a source is gone. If it was asked for a description, another source will be."""
        self.gone.setdefault(rank, error)
        self.awaited.discard(rank)
        self.offers.pop(rank, None)
        self._asked = {likeness: asked for likeness, asked in self._asked.items() if asked != rank}

    # -- what conversations do next

    def next_turn(self, rank: int, now: float) -> Turn:
        """What the conversation with this source does next."""
        if rank in self.dropped or rank in self.gone:
            return Decided()
        if self._decided:
            return Decided(late=rank not in self._considered)
        likeness = self.offers[rank].likeness
        if likeness not in self._described and likeness not in self._asked:
            self._asked[likeness] = rank
            return Describe()
        if self._may_decide(now):
            self._deciding = Decide(dict(self.offers), dict(self._described))
            self._considered = frozenset(self.offers)
            return self._deciding
        return WaitForChange()

    def _may_decide(self, now: float) -> bool:
        if self._deciding is not None or any(offer.likeness not in self._described for offer in self.offers.values()):
            return False
        if not self.awaited:
            return True
        # After a failed decision, decide again only if the offers have changed.
        return now >= self._decide_at and self.offers.keys() != self._considered

    # -- outcomes of a decision

    def may_still_change(self) -> bool:
        """Whether sources are still awaited, or have offered since the decision copied the offers."""
        return bool(self.awaited or self.offers.keys() - self._considered)

    def unused(self, dropped: Mapping[int, TransfuseError]) -> Iterator[tuple[int, BaseException, Manifest | None]]:
        """The sources that are not used if ``dropped`` are dropped: rank, cause, and manifest if known."""
        for rank, why in {**self.gone, **self.dropped, **dropped}.items():
            described = self._described.get(self._likenesses.get(rank, b""))
            yield rank, why, None if described is None else described.manifest

    def decide(self, *, dropped: Mapping[int, TransfuseError], stands: bool) -> None:
        """Record a decision. It ``stands`` if it chose any source; otherwise other sources may still come."""
        self.dropped.update(dropped)
        for rank in dropped:
            self.offers.pop(rank, None)
        self._deciding, self._decided = None, stands

    def postpone(self) -> None:
        """Record that the decision failed: these sources do not hold everything, but others may."""
        self._deciding, self.uncovered = None, True


class _TooEarly(NotCovered):
    """The sources so far lack something that sources still awaited may hold."""


class Negotiator:
    """Makes a plan from the sources' offers, and enters it in the roster. Any conversation's thread may call it.

    ``roster.changed`` guards the negotiation.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self._context = context = roster.context
        self._sizes = Sizes(context.limits, context.timeout)
        self._preparing = threading.Lock()
        self._prepared = False
        # With ``late`` the caller chooses from a catalogue of all leaves: wait longer for all sources.
        all_of_them = roster.request.late is not None
        seconds = Patience(context.timeout).decision(asks_for_all=all_of_them, one_by_one=context.one_by_one)
        self.negotiation = Negotiation(roster.ranks, seconds)

    def prepare(self, channel: Channel) -> None:
        """Describe the target, once, while the sources describe their states."""
        roster, context = self._roster, self._context
        with self._preparing:
            if self._prepared or roster.request.failure is not None:
                return
            self._prepared = True
            with roster.phase(channel, Phase.PREPARE):
                try:
                    target = prepare(roster.request.target, context.limits)
                    is_asked = context.remembered.has_plans or roster.request.hold
                    mine = outline(target, context.limits) if is_asked else None
                    roster.request = replace(roster.request, target=target, outline=mine)
                except Exception as error:
                    roster.request = replace(roster.request, failure=error)

    def agree(self, channel: Channel, offer: Offer) -> None:
        """Hand in an offer, and wait for the decision. Raises if this source is not used."""
        rank, roster = channel.peer, self._roster
        described = None
        if offer.manifest is None and is_described(offer, self._context.remembered):
            described = self._read(offer, rank)
        with roster.changed:
            self.negotiation.hand_in(rank, offer, time.monotonic())
            if described is not None:
                self.negotiation.hand_in_description(rank, described)
            roster.changed.notify_all()
        while not isinstance(turn := self._next_turn(channel), Decided):
            if isinstance(turn, Describe):
                self._describe(channel, offer)
            else:
                self._decide(turn)
        streams.catch_up()
        if turn.late:
            self._compare_late(rank, offer)
        with roster.changed:
            self._check(rank)
            roster.present.add(rank)
            if offer.max_bytes_per_second is None and route_table.usable(offer.routes, roster.request.options):
                roster.readers.add(rank)
            roster.count()
            roster.changed.notify_all()

    def _check(self, rank: int) -> None:
        """Raise if this source is not used, was abandoned, or the receive has failed. Call it under the lock."""
        dropped = self.negotiation.dropped.get(rank)
        if dropped is not None:
            raise dropped
        self._roster.check(rank)

    def look_for_orphans(self, rank: int, error: BaseException) -> None:
        """End the receive if no other source holds a parcel that the lost source held. Call it under the lock."""
        roster = self._roster
        if roster.plan is None or roster.failure is not None or not roster.several:
            return
        if roster.plan.landing.shares.joinable:
            return  # A source that comes late may hold it. If none comes, the receive fails with all causes.
        if not roster.plan.covered_by(roster.present) and isinstance(error, TransfuseError):
            roster.failure = ReceiveFailed({rank: error}, alone=True)

    # -- turns

    def _next_turn(self, channel: Channel) -> Describe | Decide | Decided:
        """Wait until this conversation has to describe or decide, or until the decision stands."""
        rank, roster = channel.peer, self._roster
        with channel.resting(), roster.changed:
            roster.progress[rank].phase = Phase.PLAN.doing
            while True:
                self._check(rank)
                roster.check_caller()
                turn = self.negotiation.next_turn(rank, time.monotonic())
                if not isinstance(turn, WaitForChange):
                    return turn
                roster.progress[rank].phase = WAITING
                roster.changed.wait(Patience.SLICE_SECONDS)
                if not channel.group.tagged:
                    self._give_up_waiting()

    def _give_up_waiting(self) -> None:
        """End the receive if sources have not offered in time. Call it under the lock.

        Only without tags: there a source may wait for its turn, without end if ranks wait for each other in a circle.
        """
        timeout, missing = self._context.timeout, self.negotiation.awaited
        if missing and time.monotonic() - self.negotiation.first_at > timeout and not self._context.one_by_one:
            late = {rank: PeerTimeout(rank, "waiting for its offer", timeout) for rank in sorted(missing)}
            self._roster.fail(ReceiveFailed(late))

    def _describe(self, channel: Channel, offer: Offer) -> None:
        """Ask this source for its description, and hand it in."""
        roster = self._roster
        with roster.abandonable(channel, channel.abandon if roster.several else None):
            whole = describe(channel, offer)
        described = self._read(whole, channel.peer)
        with roster.changed:
            self.negotiation.hand_in_description(channel.peer, described)
            roster.changed.notify_all()

    def _read(self, offer: Offer, rank: int) -> OfferWithManifest:
        context = self._context
        if context.remembered.structure(offer.structure) is not None:
            context.report.reuse("description")
        return read_description(offer, context.limits, rank, context.remembered)

    def _compare_late(self, rank: int, offer: Offer) -> None:
        """Decide whether to use a source whose offer came after the decision."""
        error = source_choice.why_not(rank, offer, self._roster.accepted, self._roster.request)
        if error is not None:
            logger.warning("source %d is not used: %s", rank, error)
            with self._roster.changed:
                self.negotiation.dropped[rank] = error

    # -- the decision

    def _decide(self, turn: Decide) -> None:
        """Choose the sources that agree, and plan. Runs in the thread of the first conversation that finds it due."""
        roster, plan = self._roster, None
        dropped: Mapping[int, TransfuseError] = {}
        try:
            choice = source_choice.choose(roster.ranks, turn.offers, turn.described, roster.request)
            dropped = choice.dropped
            if choice.cohorts:
                plan = self._accept(choice, turn.described)
        except NotCovered as error:
            self._postpone_or_fail(error, dropped)
            return
        except BaseException as error:
            roster.fail(error)
            return
        for rank, why in dropped.items():
            if roster.several:
                logger.warning("source %d is not used: %s", rank, why)
        with roster.changed:
            self.negotiation.decide(dropped=dropped, stands=plan is not None)
            if plan is not None:
                roster.plan = plan
                roster.report.leaves = len(plan.landing.manifest)
                roster.report.step = plan.offer.step if roster.request.step is None else roster.request.step
                roster.present = choice.offers.keys() & self.negotiation.offers.keys()
                for rank in choice.offers.keys() & self.negotiation.gone.keys():
                    # This source was lost while the plan was made.
                    self.look_for_orphans(rank, self.negotiation.gone[rank])
            roster.changed.notify_all()

    def _postpone_or_fail(self, error: NotCovered, dropped: Mapping[int, TransfuseError]) -> None:
        """The chosen sources do not hold everything: wait for other sources if any may come, or fail."""
        with self._roster.changed:
            hope = isinstance(error, _TooEarly) or self.negotiation.may_still_change()
            if hope and not self._context.one_by_one:
                self.negotiation.postpone()
                self._roster.changed.notify_all()
                return
            error = NotCovered(error.blocks) if isinstance(error, _TooEarly) else error  # A name that users know.
            for rank, why in dropped.items():
                error.add_note(f"source {rank} is not used: {why}")
            self._roster.fail(error)

    def _accept(self, choice: source_choice.Choice, described: dict[bytes, OfferWithManifest]) -> Accepted:
        """Make the plan, and resume from an earlier receive if that is possible."""
        roster = self._roster
        first = described[choice.offers[next(iter(choice.cohorts[0].members))].likeness].offer
        parcel_bytes = min(offer.parcel_bytes for offer in choice.offers.values())
        resume = roster.request.resume
        if resume is not None and not _continues(resume, first, parcel_bytes):
            logger.warning("the sources offer another state than the one to resume: everything is fetched")
            roster.request = replace(roster.request, resume=None)
            resume = None
        nbytes = float(choice.cohorts[0].manifest.storages.nbytes.astype(float).sum())
        fine = self._fine(first, nbytes, parcel_bytes) if resume is None else resume.parcel_bytes
        self._check_lacking(choice)
        return accept(choice.cohorts, choice.offers, first, roster.request, self._context, fine, roster.changed)

    def _check_lacking(self, choice: source_choice.Choice) -> None:
        """Raise if the chosen sources lack a leaf of the target that a source which is not used has, or may have.

        A leaf that no source has is refused by the plan, unless ``strict=False`` lets it keep its value.
        """
        cohorts, request = choice.cohorts, self._roster.request
        with self._roster.changed:
            may_change = self.negotiation.may_still_change()
            unused = list(self.negotiation.unused(choice.dropped))
        if not (may_change or unused or request.absent):
            return  # Every source is here and used. To compare all names would cost more than to plan.
        lacking = source_choice.lacking(cohorts, request)
        if not lacking:
            return
        if may_change:
            why = "this group talks with one source after another: name a source that holds everything"
            why = why if self._context.one_by_one else "no source that has offered so far holds it"
            raise _TooEarly([f"{path}: {why}" for path in lacking])
        blocks = [
            f"{path}: {name} may hold it, but cannot be reached: {why}"
            for name, why in request.absent.items()
            for path in lacking
        ]
        for rank, cause, manifest in unused:
            held = lacking if manifest is None else source_choice.would_bring(manifest, cohorts, request)
            may = "may hold it, but is lost" if manifest is None else "holds it, but is not used"
            blocks += [f"{path}: source {rank} {may}: {cause}" for path in held]
        if blocks:
            raise NotCovered(blocks)

    def _fine(self, offer: Offer, total: float, parcel_bytes: int) -> int:
        """A parcel size that lets several sources end together and keeps their staging within its limit."""
        blocks = self._sizes.PATCHED_BLOCKS if offer.history else self._sizes.BLOCKS
        return self._sizes.parcel(
            parcel_bytes,
            int(min(total, 1e15)),
            sources=len(self._roster.ranks),
            ahead=offer.bursts_ahead,
            blocks=blocks if self._roster.request.options.delta else 0,
        )


def _continues(resume: Partial, offer: Offer, parcel_bytes: int) -> bool:
    same = resume.step == offer.step and resume.likeness == offer.likeness
    return same and resume.parcel_bytes <= parcel_bytes
