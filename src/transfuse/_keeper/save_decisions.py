"""Which step is saved next, and who writes what. No file, socket, thread or clock is used here.

Every host holds its oldest *candidate* (:mod:`.slot_policy`). One that is complete on all hosts is written. One that a
host cannot have any more never will be: then all begin again beyond the newest step that anybody has reached, and
further beyond it if some were faster than the word of it. What was leapt over gets another chance when all ranks have
closed: nobody commits any more, and the job's last step must not be lost by a leap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from transfuse._keeper.bundle_table import COMPARED, NO_DIGEST, PRIVATE, Bundles
from transfuse._keeper.questions import SaveState
from transfuse._keeper.slot_file import Label
from transfuse._state.region import Ints

#: The most steps that all begin again beyond what the hosts have reached.
LONGEST_LEAP = 1 << 20


class SaveDecisions:
    """What the leader decides in one generation, about steps that are to be saved."""

    def __init__(self, hosts: int) -> None:
        self._hosts = hosts
        #: The step that is being written now; candidates up to the second are done with.
        self.saving: Label | None = None
        self.concluded: Label | None = None
        #: The newest step that was saved or given up; and whether all hosts commit no more.
        self.ended: Label | None = None
        self.is_over = False
        #: Steps that could never be complete on all hosts, and those that were given up.
        self.missed = 0
        self.failed = 0
        #: How far beyond. After a leap: the hosts that have not heard of it yet, and whether it was too short for one.
        self._leap = 1
        self._unaware: set[int] = set()
        self._is_short = False

    def hear(self, states: Mapping[int, SaveState]) -> None:
        """Decide. ``states``: by host, of all that have answered and are at this generation."""
        self._judge_leap(states)
        if self.saving is not None or len(states) < self._hosts:
            return
        if not self.is_over and all(state.is_over for state in states.values()):
            self.is_over, self.concluded = True, self.ended
            self._unaware.clear()
            return
        candidates = {host: self._candidate_of(state) for host, state in states.items()}
        first = min((label for label in candidates.values() if label is not None), default=None)
        if first is None:
            return
        reached = max((state.reached for state in states.values() if state.reached is not None), default=first)
        if all(candidates[host] == first and state.is_whole for host, state in states.items()):
            self.saving = first
        elif self.is_over:
            self._conclude(first)
        elif any(self._lacks(state, candidates[host], first) for host, state in states.items()):
            self.missed += 1
            self._conclude(Label(first.generation, max(first.step, reached.step) + self._leap - 1))
            self._unaware, self._is_short = set(range(self._hosts)), False

    def _judge_leap(self, states: Mapping[int, SaveState]) -> None:
        """These have heard of the last leap. A host that was beyond it by then may have overwritten a step."""
        if not self._unaware or self.concluded is None:
            return
        for host in self._unaware & states.keys():
            reached = states[host].reached
            self._is_short = self._is_short or (reached is not None and reached > self.concluded)
        self._unaware -= states.keys()
        if not self._unaware:
            self._leap = min(2 * self._leap, LONGEST_LEAP) if self._is_short else max(1, self._leap // 2)

    def _candidate_of(self, state: SaveState) -> Label | None:
        """A host may not have heard yet what is concluded."""
        label = state.candidate
        return None if label is None or (self.concluded is not None and label <= self.concluded) else label

    def _lacks(self, state: SaveState, candidate: Label | None, first: Label) -> bool:
        """Whether a host will never have this step: it has passed it, or has a later one already."""
        if candidate is not None:
            return candidate > first
        # What it held when it was asked counts: it may not have heard yet what is concluded.
        return state.candidate is None and state.reached is not None and state.reached >= first

    def end(self, *, well: bool) -> None:
        """The step that was being written is saved, or given up."""
        if self.saving is None:
            return
        self.failed += not well
        self._conclude(self.saving)
        self.ended, self.saving = self.saving, None

    def _conclude(self, label: Label) -> None:
        if self.concluded is None or label > self.concluded:
            self.concluded = label


# ------------------------------------------------------------------------------------------------- who writes what


def writers(tables: Mapping[int, Bundles], hosts: Mapping[int, int], *, together: bool) -> dict[int, Ints]:
    """For each rank: which rank's file has each of its bundles.

    ``tables``: the bundles of all ranks, as they lie in the slots. ``hosts``: of each rank. ``together``: all hosts see
    one file system, so what several of them hold is written once. Else each host writes what its ranks refer to.
    """
    found = {rank: table.owners.copy() for rank, table in tables.items()}
    if not together:
        return found
    groups: dict[tuple[bytes, bytes], _SharedBundle] = {}
    load = dict.fromkeys(hosts.values(), 0)
    of_rank = dict.fromkeys(tables, 0)
    for rank, table in sorted(tables.items()):
        for number, ground in enumerate(_grounds(table)):
            if ground is None:
                continue
            group = groups.setdefault((table.keys[number], ground), _SharedBundle(int(table.nbytes[number])))
            group.users.append((rank, number))
            if int(table.owners[number]) == rank:
                group.holders.append(rank)
        alone = np.array([ground is None for ground in _grounds(table)], dtype=bool)
        nbytes = int(table.nbytes[alone & (table.owners == rank)].sum())
        load[hosts[rank]] += nbytes
        of_rank[rank] += nbytes
    # What only few can write goes first, and large ones before small ones.
    for group in sorted(groups.values(), key=lambda one: (len(one.holders), -one.nbytes)):
        writer = min(group.holders, key=lambda rank: (load[hosts[rank]], of_rank[rank], rank))
        load[hosts[writer]] += group.nbytes
        of_rank[writer] += group.nbytes
        for rank, number in group.users:
            found[rank][number] = writer
    return found


class _SharedBundle:
    """A bundle that ranks may share: who has it in a slot of its own, and who refers to it."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.holders: list[int] = []
        self.users: list[tuple[int, int]] = []


def _grounds(table: Bundles) -> list[bytes | None]:
    """On what ground ranks share each bundle, as in `Books.lay_out`; None: this one is not shared with other hosts."""
    digests: Sequence[bytes] = table.digests or [NO_DIGEST] * len(table)
    return [
        None if mode == PRIVATE or (mode in COMPARED and digest == NO_DIGEST) else digest if mode in COMPARED else b""
        for mode, digest in zip(table.modes.tolist(), digests, strict=True)
    ]


# ------------------------------------------------------------------------------------------------- what may go


def to_remove(whole: Iterable[Label], counted: Iterable[Label], unfinished: Iterable[Label], keep: int) -> list[Label]:
    """The steps on storage to remove, oldest first, after a step was saved.

    ``whole``: those that have a record and all their files. ``keep`` of these stay, and what has no record and is newer
    than the newest of them: somebody may be writing it.
    """
    kept = sorted(whole, reverse=True)[: max(keep, 1)]
    if not kept:
        return []
    return sorted([label for label in counted if label < kept[-1]] + [label for label in unfinished if label < kept[0]])
