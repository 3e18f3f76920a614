"""Which rank of this host gets which slots: ranks agree on who holds what, and memory is allocated, or refused."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

from transfuse._errors import TransfuseError
from transfuse._keeper import frames
from transfuse._keeper.bundle_table import Bundles
from transfuse._keeper.frames import Frame
from transfuse._keeper.freeing import Freeing
from transfuse._keeper.slot_file import Label, SlotFile, make_slots, round_up
from transfuse._keeper.slot_policy import Books, slot_bytes
from transfuse._memory.available import free_memory
from transfuse._sizes import human_bytes
from transfuse._tuning import KEEPER_PEER_SECONDS


@dataclass(frozen=True)
class Tenant:
    """A rank that wants slots."""

    rank: int
    #: How many slots it gets.
    slots: int
    #: The most that the keeper may hold in all, and how many hosts' replicas are among that.
    max_bytes: int | None
    replicas: int
    #: Whether no other process can write to slots of this rank.
    is_only_writer: bool


class Allotment:
    """Layouts and slots of the ranks of this host."""

    def __init__(
        self, changed: threading.Condition, books: Books, freeing: Freeing, *, attached: Collection[int]
    ) -> None:
        """``changed``: the keeper's lock. ``attached``: the ranks that are attached, now and later."""
        self._changed, self._books, self._freeing, self._attached = changed, books, freeing, attached
        #: By rank: what it wants to commit at which step, and what was decided for it.
        self._wanted: dict[int, frames.Lay] = {}
        self._laid: dict[int, Bundles] = {}
        #: Ranks that others have waited for, and that have not asked for anything yet.
        self._missed: set[int] = set()
        #: Slots that were reserved before their layout is known; bytes that are being allocated.
        self._spare: dict[int, list[SlotFile]] = {}
        self._allocating = 0

    def lay(self, tenant: Tenant, lay: frames.Lay) -> tuple[Frame, list[int]]:
        """Decide with the other ranks of the host who holds what, and make the rank's slots."""
        rank = tenant.rank
        label = _label(lay)
        until = time.monotonic() + lay.patience
        with self._changed:
            self._laid.pop(rank, None)
            self._missed.discard(rank)
            self._wanted[rank] = lay
            self._changed.notify_all()
            partners = self._books.needs_partners(rank, lay.bundles)
            while rank not in self._laid and not self._are_here(label, partners) and time.monotonic() < until:
                absent = [one for one in self._local_ranks() if one != rank and self._leaves_out(one, label)]
                if absent:
                    # The step cannot be complete without them, and a layout without them would share nothing.
                    self._wanted.pop(rank, None)
                    self._books.leave_out(rank, label)
                    self._changed.notify_all()
                    return frames.Slot(None, why=f"ranks {absent} of this host do not commit this step"), []
                self._changed.wait(KEEPER_PEER_SECONDS)
            if rank not in self._laid:
                # This rank is the last to come, or has waited long enough: it decides for all that are here.
                here = {rank: lay}
                if partners:
                    here |= {one: theirs for one, theirs in self._wanted.items() if _label(theirs) == label}
                    silent = {one for one in self._local_ranks() if not self._books.has_come(one)}
                    self._missed |= silent - set(self._wanted)
                self._laid.update(self._books.lay_out(here))
                self._changed.notify_all()
            layout = self._laid.pop(rank)
            self._wanted.pop(rank, None)
        return self._allocate(tenant, layout, slot_bytes(layout, lay.text_bytes))

    def _are_here(self, label: Label, partners: bool) -> bool:
        """Whether nobody is to be waited for. Called under the lock."""
        return not partners or all(
            (rank in self._wanted and _label(self._wanted[rank]) == label)
            or rank in self._missed
            or (self._books.has_layout(rank) and (rank not in self._attached or self._books.is_past(rank, label)))
            for rank in self._local_ranks()
        )

    def _leaves_out(self, rank: int, label: Label) -> bool:
        """Whether a rank cannot commit a step: it has no layout, and has not come (back) yet, or is further already."""
        if self._books.has_layout(rank):
            return False
        wanted = self._wanted.get(rank)
        is_further = self._books.is_past(rank, label) if wanted is None else _label(wanted) > label
        return rank not in self._attached or is_further

    def _local_ranks(self) -> tuple[int, ...]:
        generation = self._books.current()
        return () if generation is None else generation.ranks

    def _allocate(self, tenant: Tenant, layout: Bundles, nbytes: int) -> tuple[Frame, list[int]]:
        rank = tenant.rank
        with self._changed:
            # What another process may still write to is not used again.
            reused = self._books.reusable(rank, nbytes) if tenant.is_only_writer else []
            reused = reused[-tenant.slots :]
            self._freeing.add(self._books.free_slots(rank, reused))
        new = self._make_files(tenant, nbytes, tenant.slots - len(reused))
        with self._changed:
            files = [self._books.slot(rank, number).file for number in reused] + new
            first = self._books.take_layout(rank, layout, reused, new)
        return frames.Laid(layout, first, self.absent), [file.fd for file in files]

    def _make_files(self, tenant: Tenant, slot_bytes: int, count: int) -> list[SlotFile]:
        """Slots for a rank. To allocate memory takes time: no lock is held meanwhile."""
        with self._changed:
            spare = self._spare.pop(tenant.rank, [])
        fits = bool(spare) and spare[0].nbytes >= slot_bytes
        self._freeing.add(spare[count:] if fits else spare)
        if fits:
            return spare[:count]
        if not count:
            return []  # A rank that has come again. Room for replicas alone is no reason to refuse it.
        self._freeing.settle()
        with self._changed:
            self._check_room(tenant, slot_bytes, count)
            self._allocating += slot_bytes * count
        try:
            return make_slots([slot_bytes] * count)
        finally:
            with self._changed:
                self._allocating -= slot_bytes * count

    def reserve(self, tenant: Tenant, nbytes: int) -> None:
        """Make slots for a state of ``nbytes``, before its layout is known."""
        rank = tenant.rank
        with self._changed:
            if self._books.has_layout(rank):
                return
            count = tenant.slots - len(self._books.reusable(rank, nbytes))
        # Room for the description and for the padding between bundles.
        slot_bytes = round_up(nbytes + nbytes // 50 + (4 << 20))
        files = self._make_files(tenant, slot_bytes, max(count, 0))
        with self._changed:
            self._spare[rank] = files

    def _check_room(self, tenant: Tenant, slot_bytes: int, count: int) -> None:
        most = tenant.max_bytes
        need, held, free = slot_bytes * count, self.nbytes + self._allocating, free_memory()
        # Replicas of the neighbours that are here already are part of what the keeper holds.
        here = sum(kept.nbytes for one in self._books.neighbours for kept in self._books.replicas.get(one, ()))
        copies = max(0, 2 * slot_bytes * tenant.replicas - here)
        sums = (
            f"rank {tenant.rank} needs {count} slots of {human_bytes(slot_bytes)} = {human_bytes(need)}"
            + (f", and its neighbour's replicas {human_bytes(copies)}" if copies else "")
            + f"; this host's keeper holds {human_bytes(held)} already"
        )
        if most is not None and held + need + copies > most:
            raise TransfuseError(
                f"{sums}, which is more than max_bytes={human_bytes(most)}: each rank of this host needs as much; "
                "raise max_bytes=, or lower slots="
            )
        if need + copies + self._allocating > free:
            raise TransfuseError(
                f"{sums}, and only {human_bytes(max(free, 0))} of memory are free, on this host or within the limits "
                "of its control groups: raise the limit, lower slots=, or end keepers that are no longer needed "
                "(transfuse keep --status, --stop)"
            )

    def room(self, most: int | None) -> int:
        """How many bytes more the keeper may take, if it may take ``most`` in all. Called under the lock."""
        return free_memory() if most is None else min(free_memory(), most - self.nbytes)

    @property
    def nbytes(self) -> int:
        """How many bytes the keeper holds. Called under the lock."""
        return self._books.nbytes + sum(file.nbytes for files in self._spare.values() for file in files)

    @property
    def absent(self) -> list[int]:
        """The ranks that others have waited for, and that have not come since."""
        return sorted(self._missed)

    def forget(self, rank: int) -> None:
        """The rank's worker has ended. Called under the lock."""
        self._wanted.pop(rank, None)
        self._laid.pop(rank, None)

    def begin_generation(self, ranks: Collection[int]) -> None:
        """Nobody waits for a layout any more, and this host has only these ranks. Called under the lock."""
        self._wanted.clear()
        self._laid.clear()
        self._missed.clear()
        for rank in [rank for rank in self._spare if rank not in ranks]:
            self._freeing.add(self._spare.pop(rank))


def _label(lay: frames.Lay) -> Label:
    return Label(lay.generation, lay.step)
