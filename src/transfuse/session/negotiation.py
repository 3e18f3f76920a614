"""Negotiation: from the sources' offers to the moment at which the receive is decided.

Every source is awaited, has offered, or is gone. An offer is known once its description is here: from the source
itself, or from another source whose offer has the same likeness. A receive is right only because of one rule: **a
decision is about offers that are all known, and about all of them.** The rule holds by construction:
:meth:`Negotiation.next_turn` checks that every offer is known and copies the offers, in one step. An offer that comes
later is not part of that decision.

The class is a plain state machine: it has no lock, no clock and never waits. Its owner calls every method under one
lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from transfuse.errors import TransfuseError
from transfuse.session.accepting import Described
from transfuse.state.manifest import Manifest
from transfuse.wire.messages import Offer

__all__ = ["Decide", "Describe", "Done", "Negotiation", "Turn", "Wait"]


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
