"""What the leader of the ring decides. No socket, thread or clock is used here.

- *agreed*: the newest step that is complete on all hosts. One at a time: all keepers replicate it now.
- *confirmed*: all have replicated the agreed step (without replicas: it is complete on all hosts). Older ones may go. A
  keeper that says a step is confirmed is believed: so a new leader, or a new generation, first hears from everybody,
  and takes the newest.
- *floor*: the hosts' slots are full of different steps, of which none will ever be complete everywhere. All begin again
  with a step that nobody has reached yet. If somebody was faster, the next floor is twice as far ahead.
- *refill*: a host was replaced, and what the ranks have restored is on fewer hosts than it should be. Hosts
  that lack it pull it, as long as no newer step is agreed on.
- *over*: all ranks of all hosts have closed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from transfuse._keeper.questions import HostState, Refill, Round
from transfuse._keeper.slot_file import Label

#: The most steps that a floor is ahead of what the hosts have reached.
LONGEST_MARGIN = 1 << 20


class Decisions:
    """The leader's decisions in one generation."""

    def __init__(
        self, generation: int, hosts: int, *, replicates: bool, ranks: Sequence[Sequence[int]] = (), copies: int = 2
    ) -> None:
        """``ranks``: of each host. ``copies``: on how many hosts a rank's slots are to be."""
        self._hosts, self._replicates = hosts, replicates
        self._home = {rank: host for host, some in enumerate(ranks) for rank in some}
        self._copies = copies
        #: What everybody is told.
        self.decided = Round(generation, None, False, None, None, False, False, [], [])
        self._closed: dict[int, bool] = {}
        self._margin = 1

    def hear(self, states: Mapping[int, HostState], others: Sequence[HostState]) -> bool:
        """Decide, after a round. Returns whether something new was decided, about steps of this generation.

        ``states``: by host, of all that have answered and are at this generation. ``others``: of those that are not.
        """
        before, everybody = self.decided, [*states.values(), *others]
        confirmed = max((state.confirmed for state in everybody if state.confirmed is not None), default=None)
        if before.confirmed is not None and (confirmed is None or before.confirmed > confirmed):
            confirmed = before.confirmed  # Nobody could be told yet.
        lost = [host for host in range(self._hosts) if host not in states]
        decided = replace(before, confirmed=confirmed, has_held=any(state.has_held for state in everybody), lost=lost)
        self._closed.update((host, state.closed) for host, state in states.items())
        if len(states) == self._hosts:
            bare = sorted(host for host, state in states.items() if state.bare)
            decided = self._decide(replace(decided, settled=True, bare=bare), list(states.values()))
        is_over = all(self._closed.get(host, False) for host in range(self._hosts))
        restored, refill = self._refill(decided, states)
        behind = self._behind(confirmed, states)
        self.decided = replace(decided, over=is_over, behind=behind, restored=restored, refill=refill)
        return decided != before

    def _behind(self, confirmed: Label | None, states: Mapping[int, HostState]) -> list[int]:
        """The hosts that do not have the oldest step that is complete on another one."""
        labels = {label for state in states.values() for label in state.complete}
        oldest = min((label for label in labels if confirmed is None or label > confirmed), default=None)
        return [] if oldest is None else [host for host, state in states.items() if oldest not in state.complete]

    def _refill(self, decided: Round, states: Mapping[int, HostState]) -> tuple[Label | None, list[Refill]]:
        """The step that all ranks have restored, and who is to pull what of it: hosts may have been replaced."""
        steps = {state.restored for state in states.values()}
        restored = next(iter(steps)) if len(steps) == 1 and len(states) == self._hosts else None
        is_old = decided.confirmed is None or decided.confirmed.generation < decided.generation
        if restored is None or not self._replicates or decided.agreed is not None or not is_old:
            return None, []
        wanted: dict[tuple[int, int], list[int]] = {}
        for rank in sorted({rank for state in states.values() for rank in state.held}):
            holders = [host for host, state in states.items() if rank in state.held]
            home = self._home.get(rank, rank % self._hosts)
            others = [host for host in ((home + n) % self._hosts for n in range(self._hosts)) if host not in holders]
            for host in others[: max(self._copies - len(holders), 0)]:
                wanted.setdefault((host, holders[0]), []).append(rank)
        return restored, [Refill(host, source, ranks) for (host, source), ranks in wanted.items()]

    def _decide(self, decided: Round, states: Sequence[HostState]) -> Round:
        confirmed, agreed = decided.confirmed, decided.agreed
        # A keeper that was killed has lost what the others replicate.
        if agreed is not None and not all(agreed in state.complete or agreed == confirmed for state in states):
            agreed = None
        if agreed is not None and all(state.replicated == agreed for state in states):
            confirmed = agreed if confirmed is None else max(agreed, confirmed)
        if agreed is not None and confirmed is not None and agreed <= confirmed:
            agreed = None
        has_held = decided.has_held
        if agreed is None:
            common = set.intersection(*(set(state.complete) for state in states))
            newest = max(
                (
                    label
                    for label in common
                    if label.generation == decided.generation and (not confirmed or label > confirmed)
                ),
                default=None,
            )
            if newest is not None:
                has_held = True
                agreed, confirmed = (newest, confirmed) if self._replicates else (None, newest)
        floor = self._floor(decided, states, agreed)
        return replace(decided, confirmed=confirmed, agreed=agreed, floor=floor, has_held=has_held)

    def _floor(self, decided: Round, states: Sequence[HostState], agreed: Label | None) -> Label | None:
        """Where all begin again, if a host has no free slot and holds nothing that can be complete everywhere."""

        def is_possible(label: Label) -> bool:
            return all(label in state.hopeful or state.reached is None or label > state.reached for state in states)

        stuck = any(
            state.starved and not any(is_possible(label) for label in state.hopeful if label != agreed)
            for state in states
        )
        reached = max((state.reached for state in states if state.reached is not None), default=None)
        if not stuck or reached is None or (decided.floor is not None and reached < decided.floor):
            return decided.floor
        floor = Label(decided.generation, reached.step + self._margin)
        self._margin = min(2 * self._margin, LONGEST_MARGIN)
        return floor
