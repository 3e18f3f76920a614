"""Silent sources: when one of several sources is abandoned."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from transfuse._errors import PeerTimeout
from transfuse._session.negotiation import Negotiator
from transfuse._session.roster import Roster
from transfuse._timeouts import Patience


class Abandoned(NamedTuple):
    """A source that was just given up, and the function that leaves its conversation."""

    rank: int
    error: PeerTimeout
    leave: Callable[[], object]


class SilentSources:
    """Finds the sources that have been silent for too long, and marks them as abandoned."""

    def __init__(self, roster: Roster, negotiator: Negotiator, patience: Patience) -> None:
        self._roster = roster
        self._negotiator = negotiator
        self._patience = patience

    def give_up(self, *, over: bool) -> list[Abandoned]:
        """Give up sources that are silent for too long; if the receive is ``over``, also those that never offered.

        Call it under the roster's lock. From here on the receive does not count on these sources. The caller must still
        leave their conversations. Only then may others be asked for the parcels that these sources owe: until then,
        these sources may still write to the parcels' memory.
        """
        roster, negotiation = self._roster, self._negotiator.negotiation
        abandoned: list[Abandoned] = []
        for rank, leave in roster.ways_out.items():
            channel = roster.channels[rank]
            silent = channel.silent_seconds()
            if (over and rank in negotiation.awaited) or silent > self._most(rank):
                abandoned.append(Abandoned(rank, PeerTimeout(rank, channel.phase, silent), leave))
        for rank, error, _ in abandoned:
            del roster.ways_out[rank]
            roster.abandoned[rank] = error
            roster.present.discard(rank)
            negotiation.lose(rank, error)
        if abandoned:
            roster.changed.notify_all()
        return abandoned

    def _most(self, rank: int) -> float:
        """How many seconds this source may be silent."""
        ledger = self._negotiator.ledger
        needed = not (ledger is not None and ledger.complete) and not self._others_can(rank)
        if needed and len(self._roster.channels) == 1:
            return float("inf")  # There is no other source to go on with: the channel's own timeout ends the wait.
        return self._patience.silent_source(needed=needed)

    def _others_can(self, rank: int) -> bool:
        """Whether the other sources that are here can send everything that is missing."""
        accepted, negotiation = self._negotiator.accepted, self._negotiator.negotiation
        others = self._roster.present - {rank}
        if accepted is None:
            return not negotiation.uncovered and bool(negotiation.offers.keys() - {rank})
        return self._negotiator.covered_by(others)
