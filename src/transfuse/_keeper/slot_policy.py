"""The keeper's books: which rank has committed which step into which slot, what is whole, and what may be overwritten.

No file, socket, thread or clock is used here: the keeper's process calls these methods under one lock, and tests call
them in any order.

A step is *complete* when all ranks of its generation have committed it and nothing that they refer to is missing. A
committed slot may be overwritten only if a newer step is *confirmed*: complete on all hosts, and on the replicas where
there are any. So whatever dies, the newest confirmed step can be restored.

Steps whose number is a multiple of ``save_every`` are *candidates* for storage. The slots of this host's oldest one are
held until the keepers have *concluded* it: it has been saved, or it has been given up. Only one at a time: those that
come meanwhile are overwritten like any other step.

There is one exception, without which slots would run out for good: a step that can never be complete, because a rank
has left it out (no slot was free when that rank came to it) or because ranks refer to contents that differ, is
*hopeless* and may be overwritten at any time. The keepers of several hosts find such steps together: see ``floor``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from transfuse._keeper.bundle_table import COMPARED, PRIVATE, Bundles
from transfuse._keeper.frames import Held, Lay
from transfuse._keeper.slot_file import PAGE, Brief, Label, SlotFile, room_for, round_up
from transfuse._state.region import Ints


@dataclass(eq=False)
class Kept:
    """A slot, and what it holds."""

    rank: int
    file: SlotFile
    nbytes: int
    layout: int
    label: Label | None = None
    #: Whether a worker writes to it now.
    is_written: bool = False
    brief: Brief | None = None
    #: How many readers use it now.
    pins: int = 0
    is_replica: bool = False


@dataclass(frozen=True)
class Generation:
    """The processes of a job between two restarts."""

    number: int
    world_size: int
    #: The ranks of this host.
    ranks: tuple[int, ...]
    hosts: int = 1


@dataclass(eq=False)
class _RankSlots:
    slots: dict[int, Kept] = field(default_factory=dict)
    layout: Bundles | None = None
    layouts: int = 0
    next_number: int = 0
    #: Keys of bundles that turned out to differ from what another rank holds: this rank keeps its own from now on.
    split: set[bytes] = field(default_factory=set)
    must_renew: bool = False
    #: The newest step that this rank has begun to commit or left out, and whether it was left out for want of a slot.
    reached: Label | None = None
    is_starved: bool = False


class Books:
    def __init__(self) -> None:
        self._ranks: dict[int, _RankSlots] = {}
        self._generations: dict[int, Generation] = {}
        self.generation = 0
        #: The newest step that is complete everywhere, and the step that keepers are replicating now.
        self.confirmed: Label | None = None
        self.agreed: Label | None = None
        #: A step that keepers were replicating when an earlier generation ended: others may know that it is confirmed.
        self.perhaps_confirmed: Label | None = None
        #: The step that the ranks have restored, until a newer one is confirmed.
        self.restored: Label | None = None
        #: Steps of this generation below this one do not count, unless they are confirmed or being replicated: the
        #: hosts had no free slot for different steps, so they have agreed to begin again from a common one.
        self.floor: Label | None = None
        #: Steps of this generation that all local ranks have committed: complete here, or never to be complete.
        self._complete: set[Label] = set()
        self._useless: set[Label] = set()
        #: Steps of earlier generations that are complete here, and that ranks may be about to restore.
        self._restorable: set[Label] = set()
        #: Copies of other hosts' slots, by the rank that committed them.
        self.replicas: dict[int, list[Kept]] = {}
        #: The ranks whose slots this keeper replicates.
        self.neighbours: frozenset[int] = frozenset()
        #: Steps that are a multiple of this are candidates for storage; None: no step is.
        self.save_every: int | None = None
        #: Candidates up to this one have been saved, or given up.
        self.concluded: Label | None = None

    # -- generations

    def begin_generation(self, generation: Generation) -> None:
        """The workers have started, or started again. What they have begun to write before does not count."""
        if generation.number <= self.generation:
            return
        self.generation = generation.number
        self._generations[generation.number] = generation
        if self.agreed is not None:
            self.perhaps_confirmed = self.agreed
        self.agreed = self.floor = None
        self._complete.clear()
        self._useless.clear()
        for book in self._ranks.values():
            # A layout may refer to ranks that this host no longer has: every new worker asks for one again.
            book.layout, book.reached, book.is_starved = None, None, False
        whole = [label for label in self.labels() if self.is_complete(label)]
        self._restorable = {label for label in whole if label.generation == whole[0].generation}
        for old in [number for number in self._generations if number not in self._used(generation.number)]:
            del self._generations[old]

    def _used(self, newest: int) -> set[int]:
        return {newest} | {kept.label.generation for kept in self.all() if kept.label is not None}

    def world_size(self, label: Label) -> int:
        return self._generations[label.generation].world_size

    def current(self) -> Generation | None:
        return self._generations.get(self.generation)

    def slot(self, rank: int, number: int) -> Kept:
        return self._book(rank).slots[number]

    def ranks_at(self, label: Label) -> list[int]:
        """The ranks whose state of a step is whole here."""
        held = {kept.rank for kept in self.all() if kept.label == label and kept.brief is not None}
        return [rank for rank in sorted(held) if self.needed_for(rank, label) is not None]

    def is_alone(self) -> bool:
        """Whether the job has no other hosts."""
        generation = self._generations.get(self.generation)
        return generation is None or generation.hosts == 1

    # -- layouts

    def has_layout(self, rank: int) -> bool:
        return self._book(rank).layout is not None

    def has_come(self, rank: int) -> bool:
        """Whether a rank has come to a step in this generation."""
        return self._book(rank).reached is not None

    def is_past(self, rank: int, label: Label) -> bool:
        """Whether a rank has come to this step, or further, with the layout that it had."""
        reached = self._book(rank).reached
        return reached is not None and reached >= label

    def needs_partners(self, rank: int, bundles: Bundles) -> bool:
        """Whether a rank wants bundles that other ranks may share, and of which nobody knows yet who holds them."""
        book = self._book(rank)
        known = set(book.layout.keys) if book.layout is not None else set()
        return any(
            mode != PRIVATE and key not in known and key not in book.split
            for key, mode in zip(bundles.keys, bundles.modes.tolist(), strict=True)
        )

    def lay_out(self, lays: Mapping[int, Lay]) -> dict[int, Bundles]:
        """Decide who holds what, for ranks that ask at the same time. The ranks share the copying."""
        wanted = {rank: lay.bundles for rank, lay in lays.items()}
        owners = {rank: np.full(len(one), rank, dtype=np.int64) for rank, one in wanted.items()}
        load = dict.fromkeys(wanted, 0)
        groups: dict[tuple[bytes, bytes], list[tuple[int, int]]] = {}
        for rank, one in sorted(wanted.items()):
            book = self._book(rank)
            before = (
                {} if book.layout is None else dict(zip(book.layout.keys, book.layout.owners.tolist(), strict=True))
            )
            for number, (key, mode) in enumerate(zip(one.keys, one.modes.tolist(), strict=True)):
                if mode == PRIVATE or key in book.split:
                    continue
                if key in before and len(wanted) == 1:
                    owners[rank][number] = before[key]  # Somebody else may rely on it.
                    continue
                ground = one.digests[number] if mode in COMPARED and one.digests else None if mode in COMPARED else b""
                if ground is not None:
                    groups.setdefault((key, ground), []).append((rank, number))
        for members in groups.values():
            owner = min((rank for rank, _ in members), key=lambda rank: (load[rank], rank))
            for rank, number in members:
                owners[rank][number] = owner
                if rank == owner:
                    load[rank] += int(wanted[rank].nbytes[number])
        return {rank: place(rank, lay.bundles, lay.text_bytes, owners[rank]) for rank, lay in lays.items()}

    def reusable(self, rank: int, slot_bytes: int) -> list[int]:
        """The slots of a rank, by number, that a layout with slots of ``slot_bytes`` can use, whatever they hold."""
        slots = self._book(rank).slots.items()
        return [number for number, kept in slots if slot_bytes <= kept.nbytes <= 2 * slot_bytes and not kept.is_written]

    def free_slots(self, rank: int, but: Sequence[int]) -> list[SlotFile]:
        """Give up a rank's slots that nobody needs, but not these. Returns the files to close."""
        book = self._book(rank)
        gone = [number for number, kept in book.slots.items() if number not in but and self._is_free(kept)]
        # If the new layout comes to nothing, the rank must ask for slots again.
        book.must_renew = book.must_renew or bool(gone)
        return [self._give_up(book.slots.pop(number)) for number in gone]

    def take_layout(self, rank: int, layout: Bundles, reused: Sequence[int], files: Sequence[SlotFile]) -> int:
        """Use this layout from now on, in slots that are there and in new ones. Returns the first slot's new number."""
        book = self._book(rank)
        book.layout, book.must_renew = layout, False
        book.layouts += 1
        first = book.next_number
        slots = [book.slots.pop(number) for number in reused]
        slots += [Kept(rank, file, file.nbytes, book.layouts) for file in files]
        for number, kept in enumerate(slots, first):
            kept.layout = book.layouts
            book.slots[number] = kept
        book.next_number += len(slots)
        return first

    # -- commits

    def begin(self, rank: int, label: Label) -> tuple[int | None, bool]:
        """The slot that a commit may write to, or None; and whether the rank has to ask for a new layout first."""
        book = self._book(rank)
        if book.layout is None or book.must_renew:
            return None, True
        book.reached, book.is_starved = label, False
        # A rank writes one step at a time: what it began before and did not end, because it was interrupted, is free.
        self.detach(rank)
        if self.floor is not None and label < self.floor:
            return None, False
        slots = [
            (kept.label or Label(-1, -1), number) for number, kept in book.slots.items() if kept.layout == book.layouts
        ]
        free = [one for one in slots if self._is_free(book.slots[one[1]])]
        if not free:
            # A rank that commits has finished restoring: slots that were kept only for that are free now.
            free = [one for one in slots if self._is_spare(book.slots[one[1]])]
        if not free:
            book.is_starved = True
            return None, False
        number = min(free)[1]
        kept = book.slots[number]
        self._give_up(kept)
        self._useless.discard(label)
        kept.label, kept.is_written, kept.brief = label, True, None
        return number, False

    def leave_out(self, rank: int, label: Label) -> None:
        """A rank does not commit this step, nor those before it that it has not committed yet."""
        book = self._book(rank)
        book.reached = label if book.reached is None else max(label, book.reached)

    def commit(self, rank: int, number: int, label: Label, brief: Brief) -> bool:
        """A worker has written the marker of a slot. Returns whether the step is complete here now."""
        kept = self._book(rank).slots[number]
        kept.label, kept.is_written, kept.brief = label, False, brief
        self._notice_differences(label)
        generation = self._generations.get(label.generation)
        if generation is None or any(self.find(rank, label) is None for rank in generation.ranks):
            return False
        if not self.is_complete(label):
            self._useless.add(label)
            return False
        if self.is_alone():
            self.confirm(label)
        elif label.generation == self.generation:
            self._complete.add(label)
        return True

    def drop(self, rank: int, number: int) -> None:
        """What was written to a slot does not count."""
        kept = self._book(rank).slots.get(number)
        if kept is not None and kept.is_written:
            kept.label, kept.is_written, kept.brief = None, False, None

    def detach(self, rank: int) -> None:
        """The rank's worker has ended, or begins anew. What it was writing does not count."""
        for number in list(self._book(rank).slots):
            self.drop(rank, number)

    def confirm(self, label: Label) -> None:
        """A step is complete everywhere: older ones may be overwritten."""
        if self.confirmed is None or label > self.confirmed:
            self.confirmed = label
        if self.agreed is not None and self.agreed <= label:
            self.agreed = None
        if self.perhaps_confirmed is not None and self.perhaps_confirmed <= label:
            self.perhaps_confirmed = None
        if label.generation == self.generation:
            self.restored = None
        self._complete = {one for one in self._complete if one > label}

    def agree(self, label: Label | None, floor: Label | None = None) -> None:
        """All keepers replicate this step now. Called when all have said which step they know to be confirmed."""
        self.perhaps_confirmed = None
        self.agreed = label
        if floor is not None and floor.generation == self.generation and (self.floor is None or floor > self.floor):
            self.floor = floor

    def _is_free(self, kept: Kept) -> bool:
        label = kept.label
        if kept.is_written or kept.pins:
            return False
        if label is None:
            return True
        if label in (self.confirmed, self.agreed, self.perhaps_confirmed) or self._is_held(label):
            return False
        if self.confirmed is not None and label < self.confirmed:
            return True
        if label.generation == self.generation:
            return self._is_hopeless(label)
        return label not in self._restorable

    # -- candidates for storage

    def candidate(self) -> Label | None:
        """The oldest step of this generation that is, or may become, complete here, and is to be saved."""
        return self.candidate_after(self.concluded)

    def candidate_after(self, concluded: Label | None) -> Label | None:
        """As `candidate`, if candidates up to another one were concluded."""
        labels = {kept.label for book in self._ranks.values() for kept in book.slots.values() if kept.label is not None}
        new = [one for one in labels if self._is_due(one) and (concluded is None or one > concluded)]
        return min((one for one in new if not self._is_hopeless(one)), default=None)

    def _is_due(self, label: Label) -> bool:
        return self.save_every is not None and label.generation == self.generation and not label.step % self.save_every

    def _is_held(self, label: Label) -> bool:
        """Whether a step waits to be saved."""
        return self._is_due(label) and label == self.candidate()

    def is_saveable(self, label: Label) -> bool:
        """Whether all ranks of this host have committed a step of this generation, and nothing is missing."""
        return label.generation == self.generation and self.is_complete(label)

    def _is_spare(self, kept: Kept) -> bool:
        """Whether a slot holds a step of an earlier generation that is not known to be confirmed anywhere."""
        return kept.label is not None and kept.label.generation < self.generation and self.may_replace(kept)

    def may_replace(self, kept: Kept) -> bool:
        """Whether a replica may be overwritten by that of the agreed step."""
        if kept.is_written or kept.pins:
            return False
        return kept.label is None or kept.label not in (self.confirmed, self.perhaps_confirmed)

    def _is_hopeless(self, label: Label) -> bool:
        """Whether a step of this generation can no longer be complete."""
        if label in self._useless or (self.floor is not None and label < self.floor):
            return True
        generation = self.current()
        return generation is not None and any(self._has_left_out(rank, label) for rank in generation.ranks)

    def _has_left_out(self, rank: int, label: Label) -> bool:
        book = self._ranks.get(rank)
        if book is None or book.reached is None or book.reached < label:
            return False
        return all(kept.label != label for kept in book.slots.values())

    def _give_up(self, kept: Kept) -> SlotFile:
        """A slot's contents are about to go."""
        if kept.label is not None:
            self._complete.discard(kept.label)
        return kept.file

    # -- what the keepers of other hosts want to know, about steps of this generation that are not confirmed

    def complete_labels(self) -> list[Label]:
        """The steps that are complete here, newest first."""
        return sorted(self._complete, reverse=True)

    def hopeful_labels(self) -> list[Label]:
        """The steps that are, or may become, complete here; newest first."""
        found = {
            kept.label
            for book in self._ranks.values()
            for kept in book.slots.values()
            if kept.label is not None and kept.label.generation == self.generation
        }
        newer = [label for label in found if self.confirmed is None or label > self.confirmed]
        return sorted((label for label in newer if not self._is_hopeless(label)), reverse=True)

    def newest_everywhere(self) -> Label | None:
        """The newest step that all ranks of the job have committed."""
        return max((label for label in (self.confirmed, self.agreed) if label is not None), default=None)

    def waits_for(self, rank: int) -> tuple[Label, list[int]] | None:
        """A rank's oldest step that is not confirmed, and the ranks of this host that have not committed it."""
        generation, slots = self.current(), self._book(rank).slots.values()
        labels = [kept.label for kept in slots if kept.label is not None and kept.brief is not None]
        label = min((one for one in labels if self.confirmed is None or one > self.confirmed), default=None)
        if generation is None or label is None or label.generation != generation.number:
            return None
        return label, [one for one in generation.ranks if self.find(one, label) is None]

    def reached(self) -> Label | None:
        """The newest step that any rank of this host has come to."""
        return max((book.reached for book in self._ranks.values() if book.reached is not None), default=None)

    def is_starved(self) -> bool:
        """Whether a rank has left out its newest step because no slot was free."""
        return any(book.is_starved for book in self._ranks.values())

    # -- what is there

    def all(self) -> Iterable[Kept]:
        for book in self._ranks.values():
            yield from book.slots.values()
        for copies in self.replicas.values():
            yield from copies

    @property
    def nbytes(self) -> int:
        return sum(kept.nbytes for kept in self.all())

    def held_of(self, label: Label | None) -> list[int]:
        """The ranks whose slots of a step are here."""
        return sorted({kept.rank for kept in self.all() if kept.label == label and kept.brief is not None})

    def adopt(self, rank: int, label: Label) -> None:
        """A rank of this host has come with its state in a replica: from now on that is one of its own slots."""
        copies, book = self.replicas.get(rank, []), self._book(rank)
        for kept in [one for one in copies if one.label == label and one.brief is not None]:
            copies.remove(kept)
            # It is of no layout that the rank knows: it is not written to before the next one uses it again.
            kept.layout, kept.is_replica = -1, False
            book.slots[book.next_number] = kept
            book.next_number += 1
        if not copies:
            self.replicas.pop(rank, None)

    def find(self, rank: int, label: Label) -> Kept | None:
        """The slot, or the replica, that holds a rank's step."""
        book = self._ranks.get(rank)
        slots = [*(book.slots.values() if book is not None else ()), *self.replicas.get(rank, ())]
        return next((kept for kept in slots if kept.label == label and kept.brief is not None), None)

    def labels(self) -> list[Label]:
        """All labels of committed slots, newest first."""
        return sorted({kept.label for kept in self.all() if kept.label and kept.brief}, reverse=True)

    def needed_for(self, rank: int, label: Label) -> list[int] | None:
        """The ranks whose slots together hold all of a rank's step; None if something is missing or differs."""
        kept = self.find(rank, label)
        if kept is None or kept.brief is None:
            return None
        ranks = {rank}
        for _, owner, is_there in self._left_to_others(kept, label):
            if not is_there:
                return None
            ranks.add(owner)
        return sorted(ranks)

    def _left_to_others(self, kept: Kept, label: Label) -> Iterator[tuple[bytes, int, bool | None]]:
        """The bundles of a rank's slot that other ranks hold: key, rank, whether it is there and has the same contents.

        None instead of the last if that rank's slot is not here.
        """
        assert kept.brief is not None
        mine = kept.brief.bundles
        for number in np.flatnonzero(mine.owners != kept.rank).tolist():
            key, owner = mine.keys[number], int(mine.owners[number])
            holder = self.find(owner, label)
            if holder is None or holder.brief is None:
                yield key, owner, None
                continue
            theirs, where = holder.brief.bundles, holder.brief.own.get(key)
            yield (
                key,
                owner,
                where is not None
                and (mine.modes[number] not in COMPARED or mine.digest(number) == theirs.digest(where)),
            )

    def is_complete(self, label: Label) -> bool:
        """Whether all ranks of this host have committed a step, and nothing is missing."""
        generation = self._generations.get(label.generation)
        return generation is not None and all(self.needed_for(rank, label) is not None for rank in generation.ranks)

    def newest_complete(self) -> Label | None:
        return next((label for label in self.labels() if self.is_complete(label)), None)

    def holdings(self) -> list[Held]:
        return [
            Held(
                kept.label.generation,
                kept.label.step,
                kept.rank,
                kept.brief.world_size,
                kept.nbytes,
                self.needed_for(kept.rank, kept.label) is not None,
                kept.is_replica,
            )
            for kept in self.all()
            if kept.label is not None and kept.brief is not None
        ]

    def _notice_differences(self, label: Label) -> None:
        """Find bundles that ranks have shared so far and that differ now, or that the rank which held them has no more.

        From now on each rank keeps its own.
        """
        for rank, book in self._ranks.items():
            kept = self.find(rank, label)
            if kept is None or kept.brief is None or book.layout is None:
                continue
            split = {key for key, _, is_there in self._left_to_others(kept, label) if is_there is False}
            book.split |= split
            book.must_renew = book.must_renew or bool(split)

    def _book(self, rank: int) -> _RankSlots:
        return self._ranks.setdefault(rank, _RankSlots())

    def forget_rank(self, rank: int) -> list[SlotFile]:
        """Forget everything about a rank. Returns the files to close."""
        book = self._ranks.pop(rank, None)
        return [] if book is None else [kept.file for kept in book.slots.values()]

    def free_ranks(self) -> list[SlotFile]:
        """Give up slots of ranks and layouts, and replicas, that are no longer used, once a newer step is confirmed."""
        generation = self._generations.get(self.generation)
        files: list[SlotFile] = []
        if generation is None or self.confirmed is None or self.confirmed.generation < generation.number:
            return files
        for rank, book in list(self._ranks.items()):
            if rank not in generation.ranks:
                if all(self._is_free(kept) for kept in book.slots.values()):
                    files += self.forget_rank(rank)
                continue
            for number, kept in list(book.slots.items()):
                if kept.layout != book.layouts and self._is_free(kept):
                    files.append(self._give_up(book.slots.pop(number)))
        for rank in set(self.replicas) - self.neighbours:
            files += self.free_replicas(rank)
        return files

    def free_all(self) -> list[SlotFile]:
        """Give up all slots and replicas that nobody needs: the job has ended, and only its newest step is kept."""
        gone = [file for rank in list(self._ranks) for file in self.free_slots(rank, ())]
        return gone + [file for rank in list(self.replicas) for file in self.free_replicas(rank)]

    def free_replicas(self, rank: int, nbytes: int | None = None) -> list[SlotFile]:
        """Give up replicas of a rank that nobody needs; all, or those of another size."""
        copies = self.replicas.get(rank, [])
        gone = [kept for kept in copies if self._is_free(kept) and kept.nbytes != nbytes]
        self.replicas[rank] = [kept for kept in copies if kept not in gone]
        if not self.replicas[rank]:
            del self.replicas[rank]
        return [kept.file for kept in gone]


def ranks_and_have(ranks: Sequence[int]) -> str:
    """The subject of a sentence: "rank 1 has", "ranks [1, 2] have"."""
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {list(ranks)} have"


def place(rank: int, bundles: Bundles, text_bytes: int, owners: Ints) -> Bundles:
    """The layout of a rank's slot: it has the bundles that the rank owns, behind the description."""
    start = PAGE + room_for(text_bytes)
    places = np.full(len(owners), -1, dtype=np.int64)
    for number in np.flatnonzero(owners == rank).tolist():
        places[number] = start
        start += round_up(int(bundles.nbytes[number]))
    return bundles.laid(owners, places)


def slot_bytes(layout: Bundles, text_bytes: int) -> int:
    """How large a slot has to be for a layout and a description."""
    held = layout.places >= 0
    ends = (layout.places[held] + layout.nbytes[held]).tolist()
    return round_up(max(ends, default=PAGE + room_for(text_bytes)))
