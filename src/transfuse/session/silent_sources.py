"""Silent sources: when one of several is abandoned, and who is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from transfuse.errors import PeerTimeout
from transfuse.session.negotiation import Negotiator
from transfuse.session.roster import Roster
from transfuse.timeouts import Patience

__all__ = ["Abandoned", "SilentSources"]


class Abandoned(NamedTuple):
    """A source that has just been given up, and how to leave its conversation."""

    rank: int
    error: PeerTimeout
    leave: Callable[[], object]


class SilentSources:
    """Finds the sources that have been silent for too long while others are not."""

    def __init__(self, roster: Roster, negotiator: Negotiator, patience: Patience) -> None:
        self._roster = roster
        self._negotiator = negotiator
        self._patience = patience

    def give_up(self, *, over: bool) -> list[Abandoned]:
        """Give up whoever is silent for too long; if the receive is ``over``, also those that have not come.

        Under the roster's lock. From here on nobody counts on these sources. Their conversations are still to be left,
        and only then is what they owe wanted from others: until then they may write to its memory.
        """
        roster, negotiation = self._roster, self._negotiator.negotiation
        now, abandoned = time.monotonic(), []
        for rank, leave in roster.ways_out.items():
            line = roster.channels[rank]
            silent = 0.0 if line.waiting_since is None else now - max(line.waiting_since, line.heard_at)
            if (over and rank in negotiation.awaited) or silent > self._most(rank):
                abandoned.append(Abandoned(rank, PeerTimeout(rank, line.phase, silent), leave))
        for rank, error, _ in abandoned:
            del roster.ways_out[rank]
            roster.abandoned[rank] = error
            roster.present.discard(rank)
            negotiation.lose(rank, error)
        if abandoned:
            roster.changed.notify_all()
        return abandoned

    def _most(self, rank: int) -> float:
        """How long this source may be silent."""
        ledger = self._negotiator.ledger
        needed = not (ledger is not None and ledger.complete) and not self._others_can(rank)
        if needed and len(self._roster.channels) == 1:
            return float("inf")  # There is nobody to go on with: its line's own timeout ends it.
        return self._patience.silent_source(needed=needed)

    def _others_can(self, rank: int) -> bool:
        """Whether the sources that are here can bring everything without this one."""
        accepted, negotiation = self._negotiator.accepted, self._negotiator.negotiation
        others = self._roster.present - {rank}
        if accepted is None:
            return not negotiation.uncovered and bool(negotiation.offers.keys() - {rank})
        return self._negotiator.covered_by(others)
