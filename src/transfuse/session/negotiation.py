"""Negotiation: from the sources' offers to the moment at which the receive is decided.

Every source is awaited, has offered, or is gone. An offer is known once its description is here: from the source
itself, or from another source whose offer has the same likeness. A receive is right only because of one rule: **a
decision is about offers that are all known, and about all of them.** The rule holds by construction:
:meth:`Negotiation.next_turn` checks that every offer is known and copies the offers, in one step. An offer that comes
later is not part of that decision.

:class:`Negotiation` is a plain state machine: it has no lock, no clock and never waits. Its owner calls every method
under one lock. :class:`Negotiator` is that owner: it lets the sources' conversations wait, describe, decide and plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from transfuse.errors import NotCovered, ReceiveFailed, TransfuseError
from transfuse.phases import WAITING, Phase
from transfuse.plan.match import prepare
from transfuse.plan.parcels import Parcels
from transfuse.session import agreement
from transfuse.session.context import Context, Request
from transfuse.session.ledger import Ledger
from transfuse.session.partial import Partial
from transfuse.session.planning import Accepted, Described, accept, read_description
from transfuse.session.roster import Roster
from transfuse.sizes import Sizes
from transfuse.state.manifest import Manifest
from transfuse.state.tensors import Bools
from transfuse.timeouts import Patience
from transfuse.wire.channel import Channel
from transfuse.wire.messages import Offer

__all__ = ["Decide", "Describe", "Done", "Negotiation", "Negotiator", "Turn", "Wait"]

logger = logging.getLogger("transfuse")


@dataclass(frozen=True)
class Wait:
    """Nothing to do until something changes."""


@dataclass(frozen=True)
class Describe:
    """Ask this conversation's source to describe its state, and hand in what it says."""


@dataclass(frozen=True)
class Decide:
    """Choose among these offers and plan, then say what came of it. Every one of them is described."""

    offers: dict[int, Offer]
    described: dict[bytes, Described]


@dataclass(frozen=True)
class Done:
    """It has been decided, without this source's offer (``late``) or with it; or this source is not used."""

    late: bool = False


Turn = Wait | Describe | Decide | Done


class Negotiation:
    """Who has offered what, who describes it, and when it is decided."""

    def __init__(self, ranks: Iterable[int], patience: float) -> None:
        #: Sources of which nothing has been heard yet.
        self.awaited = set(ranks)
        #: What each source that is here has offered.
        self.offers: dict[int, Offer] = {}
        #: Sources that are not used, and why.
        self.dropped: dict[int, TransfuseError] = {}
        #: Whether a decision failed because the sources that had offered do not hold everything.
        self.uncovered = False
        #: Sources that are gone, and why.
        self.gone: dict[int, BaseException] = {}
        #: The likeness that each source has ever offered.
        self._likenesses: dict[int, bytes] = {}
        #: How long awaited sources hold up the decision, and until when that is.
        self._patience = patience
        self._decide_at = float("inf")
        #: For each likeness: the description, or the source that is being asked for one.
        self._described: dict[bytes, Described] = {}
        self._asked: dict[bytes, int] = {}
        #: The decision that somebody is working on.
        self._deciding: Decide | None = None
        #: The sources that the last decision was about; of the decision that stands, if there is one.
        self._considered: frozenset[int] = frozenset()
        self._decided = False

    # -- what conversations say

    def hand_in(self, rank: int, offer: Offer, now: float) -> None:
        """A source has offered. One that was given up before does not count any more."""
        self.awaited.discard(rank)
        self._likenesses[rank] = offer.likeness
        if rank not in self.gone:
            self.offers[rank] = offer
            self._decide_at = min(self._decide_at, now + self._patience)

    def hand_in_description(self, rank: int, described: Described) -> None:
        """The source that was asked to describe its state has done so. What it says is right even if it is gone now."""
        likeness = described.offer.likeness
        self._described.setdefault(likeness, described)
        if self._asked.get(likeness) == rank:
            del self._asked[likeness]

    def lose(self, rank: int, error: BaseException) -> None:
        """A source is gone. If it was asked for a description, another is."""
        self.gone.setdefault(rank, error)
        self.awaited.discard(rank)
        self.offers.pop(rank, None)
        self._asked = {likeness: asked for likeness, asked in self._asked.items() if asked != rank}

    # -- what they are to do

    def next_turn(self, rank: int, now: float) -> Turn:
        """What the conversation with this source has to do next."""
        if rank in self.dropped or rank in self.gone:
            return Done()
        if self._decided:
            return Done(late=rank not in self._considered)
        likeness = self.offers[rank].likeness
        if likeness not in self._described and likeness not in self._asked:
            self._asked[likeness] = rank
            return Describe()
        if self._may_decide(now):
            self._deciding = Decide(dict(self.offers), dict(self._described))
            self._considered = frozenset(self.offers)
            return self._deciding
        return Wait()

    def _may_decide(self, now: float) -> bool:
        if self._deciding is not None or any(offer.likeness not in self._described for offer in self.offers.values()):
            return False
        if not self.awaited:
            return True
        # A decision that failed is worth another try only with other offers.
        return now >= self._decide_at and self.offers.keys() != self._considered

    # -- what has been decided

    def may_still_change(self) -> bool:
        """Whether sources are awaited, or have offered since the offers for the decision were copied."""
        return bool(self.awaited or self.offers.keys() - self._considered)

    def unused(self, dropped: Mapping[int, TransfuseError]) -> Iterator[tuple[int, BaseException, Manifest | None]]:
        """The sources that a decision which drops these does without: why, and what they hold, if that is known."""
        for rank, why in {**self.gone, **self.dropped, **dropped}.items():
            described = self._described.get(self._likenesses.get(rank, b""))
            yield rank, why, None if described is None else described.manifest

    def decide(self, *, dropped: Mapping[int, TransfuseError], stands: bool) -> None:
        """The decision is taken. It ``stands`` if any of the sources were chosen; otherwise others may still come."""
        self.dropped.update(dropped)
        for rank in dropped:
            self.offers.pop(rank, None)
        self._deciding, self._decided = None, stands

    def postpone(self) -> None:
        """The sources that have offered do not hold everything, but others may."""
        self._deciding, self.uncovered = None, True


class _TooEarly(NotCovered):
    """Sources that are still awaited may hold what is lacking."""


class Negotiator:
    """Takes the sources' offers to a plan. Every method may be called from any conversation's thread.

    ``roster.changed`` guards the negotiation and what came of it: ``accepted`` and ``ledger``, which are set once.
    ``request`` changes before there is a plan: under ``_preparing``, and by whoever decides, of which there is one.
    """

    def __init__(self, roster: Roster, request: Request, context: Context) -> None:
        self.request = request
        self._roster = roster
        self._context = context
        self._limits = context.limits
        self._sizes = Sizes(context.limits, context.timeout)
        self._one_by_one = context.one_by_one
        self._preparing = threading.Lock()
        self._prepared = False
        # Who asks for what there is wants to hear of all of it.
        patience = Patience(context.timeout)
        seconds = patience.decision(asks_for_all=request.late is not None, one_by_one=context.one_by_one)
        self.negotiation = Negotiation(roster.ranks, seconds)
        #: The plan, once there is one, and which parcels of it are here.
        self.accepted: Accepted | None = None
        self.ledger: Ledger | None = None
        #: Parcels that an earlier receive has left.
        self.resumed: Bools | bool = False

    def prepare(self, channel: Channel) -> None:
        """Take the target apart, once, while the sources describe their states."""
        with self._preparing:
            if self._prepared or self.request.failure is not None:
                return
            self._prepared = True
            with self._roster.phase(channel, Phase.PREPARE):
                try:
                    self.request = replace(self.request, target=prepare(self.request.target, self._limits))
                except Exception as error:
                    self.request = replace(self.request, failure=error)

    def agree(self, channel: Channel, offer: Offer, describe: Callable[[], Offer]) -> None:
        """Hand in an offer, and wait until it is known what the sources agree on. :meth:`check` says whether this does.

        If nobody has described this state yet, the source is asked to.
        """
        rank, changed = channel.peer, self._roster.changed
        with changed:
            self.negotiation.hand_in(rank, offer, time.monotonic())
            changed.notify_all()
        while not isinstance(turn := self._next_turn(channel), Done):
            if isinstance(turn, Describe):
                self._describe(channel, describe)
            else:
                self._decide(turn)
        if turn.late:
            self._compare_late(rank, offer)

    def check(self, rank: int) -> None:
        """Raise if this source is not used, was abandoned, or the receive has failed."""
        with self._roster.changed:
            dropped = self.negotiation.dropped.get(rank)
            if dropped is not None:
                raise dropped
            self._roster.check(rank)

    def covered_by(self, ranks: set[int]) -> bool:
        """Whether these sources hold everything that is not here yet. Under the lock, once there is a plan."""
        assert self.accepted is not None
        assert self.ledger is not None
        return bool((self.ledger.landed | self.accepted.shares.covered_by(frozenset(ranks))).all())

    def look_for_orphans(self, rank: int, error: BaseException) -> None:
        """End the receive if nobody else has what a lost source was to bring. Under the lock."""
        roster = self._roster
        if self.accepted is None or roster.failure is not None or not roster.several:
            return
        if self.accepted.shares.joinable:
            return  # One that comes late may have it. If nobody does, the receive ends with all causes.
        if not self.covered_by(roster.present) and isinstance(error, TransfuseError):
            roster.failure = ReceiveFailed({rank: error}, alone=True)

    # -- turns

    def _next_turn(self, channel: Channel) -> Describe | Decide | Done:
        """Wait until this conversation has to do something for all of them, or it has been decided."""
        rank, roster = channel.peer, self._roster
        with channel.resting(), roster.changed:
            roster.progress[rank].phase = Phase.PLAN.doing
            while True:
                self.check(rank)
                roster.check_caller()
                turn = self.negotiation.next_turn(rank, time.monotonic())
                if not isinstance(turn, Wait):
                    return turn
                roster.progress[rank].phase = WAITING
                roster.changed.wait(Patience.SLICE_SECONDS)

    def _describe(self, channel: Channel, describe: Callable[[], Offer]) -> None:
        """Ask this source what its state is like."""
        roster = self._roster
        with roster.abandonable(channel, channel.abandon if roster.several else None):
            whole = describe()
        described = read_description(whole, self._limits, channel.peer)
        with roster.changed:
            self.negotiation.hand_in_description(channel.peer, described)
            roster.changed.notify_all()

    def _compare_late(self, rank: int, offer: Offer) -> None:
        """An offer that comes after the others have been agreed on."""
        assert self.accepted is not None
        error = agreement.why_not(rank, offer, self.accepted, self.request)
        if error is not None:
            logger.warning("source %d is not used: %s", rank, error)
            with self._roster.changed:
                self.negotiation.dropped[rank] = error

    # -- the decision

    def _decide(self, turn: Decide) -> None:
        """Choose the sources that agree, and plan. In the thread of the first conversation that finds it due."""
        roster, plan = self._roster, None
        dropped: Mapping[int, TransfuseError] = {}
        try:
            choice = agreement.choose(roster.ranks, turn.offers, turn.described, self.request)
            dropped = choice.dropped
            if choice.cohorts:
                accepted = self._accept(choice, turn.described)
                plan = accepted, self._keep(accepted)
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
                self.accepted, self.ledger = plan
                roster.report.leaves = len(self.accepted.manifest)
                roster.report.step = self.accepted.offer.step if self.request.step is None else self.request.step
                roster.present = choice.offers.keys() & self.negotiation.offers.keys()
                for rank in choice.offers.keys() & self.negotiation.gone.keys():
                    # It was lost while it was planned what it brings.
                    self.look_for_orphans(rank, self.negotiation.gone[rank])
            roster.changed.notify_all()

    def _postpone_or_fail(self, error: NotCovered, dropped: Mapping[int, TransfuseError]) -> None:
        """The sources that were chosen do not hold everything. Others that come, or came meanwhile, may."""
        with self._roster.changed:
            hope = isinstance(error, _TooEarly) or self.negotiation.may_still_change()
            if hope and not self._one_by_one:
                self.negotiation.postpone()
                self._roster.changed.notify_all()
                return
            for rank, why in dropped.items():
                error.add_note(f"source {rank} is not used: {why}")
            self._roster.fail(error)

    def _accept(self, choice: agreement.Choice, described: dict[bytes, Described]) -> Accepted:
        """Plan, going on from what an earlier receive has left if that is possible."""
        first = described[choice.offers[next(iter(choice.cohorts[0].members))].likeness].offer
        parcel_bytes = min(offer.parcel_bytes for offer in choice.offers.values())
        resume = self.request.resume
        if resume is not None and not self._continues(resume, first, parcel_bytes):
            logger.warning("the sources offer another state than the one to be resumed: everything is fetched")
            self.request = replace(self.request, resume=None)
            resume = None
        fine = self._fine(first, parcel_bytes) if resume is None else resume.parcel_bytes
        self._check_lacking(choice)
        return accept(choice.cohorts, choice.offers, first, self.request, self._context, fine)

    def _check_lacking(self, choice: agreement.Choice) -> None:
        """Raise if a leaf of the target gets nothing from the chosen sources, but may from one that is not used.

        A leaf that no source has at all keeps its value: ``strict`` is for those.
        """
        cohorts, request = choice.cohorts, self.request
        lacking = agreement.lacking(cohorts, request)
        if not lacking:
            return
        with self._roster.changed:
            if self.negotiation.may_still_change():
                why = "over this group sources are heard one after another: name one that holds everything"
                why = why if self._one_by_one else "no source that has come so far has it"
                raise _TooEarly([f"{path}: {why}" for path in lacking])
            unused = list(self.negotiation.unused(choice.dropped))
        blocks = [
            f"{path}: {name} may hold it, but is not there: {why}"
            for name, why in request.absent.items()
            for path in lacking
        ]
        for rank, cause, manifest in unused:
            held = lacking if manifest is None else agreement.would_bring(manifest, cohorts, request)
            may = "may hold it, but is lost" if manifest is None else "holds it, but is not used"
            blocks += [f"{path}: source {rank} {may}: {cause}" for path in held]
        if blocks:
            raise NotCovered(blocks)

    def _fine(self, offer: Offer, parcel_bytes: int) -> int:
        """A size of parcels that lets several sources end together, and their staging be within its bounds."""
        sizes = offer.described.storage_nbytes
        total = float(np.frombuffer(sizes[: len(sizes) // 8 * 8], dtype="<i8").astype(float).sum())
        return self._sizes.parcel(
            parcel_bytes,
            int(min(total, 1e15)),
            sources=len(self._roster.ranks),
            ahead=offer.bursts_ahead,
            delta=self.request.options.delta,
        )

    @staticmethod
    def _continues(resume: Partial, offer: Offer, parcel_bytes: int) -> bool:
        same = resume.step == offer.step and resume.likeness == offer.likeness
        return same and resume.parcel_bytes <= parcel_bytes

    def _keep(self, accepted: Accepted) -> Ledger:
        """Find what may be here already: what an earlier receive has left, or all that the targets hold.

        Whether it is what the sources have, they will say.
        """
        cut, landing, resume = accepted.cut, accepted.landing, self.request.resume
        ledger = Ledger(cut.payload, self._roster.changed)
        claimed: Bools = np.zeros(len(cut), dtype=bool)
        if resume is not None:
            resume.spent = True
            if resume.fingerprint == landing.fingerprint and len(resume.landed) == len(cut):
                claimed |= resume.landed & _for_all_regions(cut, landing.lie_once)
                self.resumed = claimed.copy()
                for number in np.flatnonzero(claimed).tolist():
                    landing.touch(range(int(cut.first[number]), int(cut.first[number] + cut.count[number])))
            else:
                logger.warning("target or sources are others than those of the receive to be resumed: all is fetched")
        if self.request.options.delta:
            if self.resumed is False:  # Otherwise what has landed in copies of the targets would be lost.
                landing.fill_copies()
            claimed |= _for_all_regions(cut, landing.held)
        if claimed.any():
            ledger.keep(np.flatnonzero(claimed))
        return ledger


def _for_all_regions(cut: Parcels, good: Bools) -> Bools:
    """For each parcel, whether all its boxes are good."""
    bad = np.concatenate([[0], np.cumsum(~good)]).astype(np.int64)
    result: Bools = bad[cut.first + cut.count] == bad[cut.first]
    return result
