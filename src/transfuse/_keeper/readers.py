"""Kept states for readers: their slots are pinned, and not written to, as long as somebody reads."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING

from transfuse._errors import TransfuseError
from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import Books, Kept

if TYPE_CHECKING:
    from transfuse._keeper.restored import RestoredState


class Readers:
    """Finds and pins what readers want. The keeper's lock is taken here."""

    def __init__(self, changed: threading.Condition, books: Books) -> None:
        self._changed, self._books = changed, books

    def ranks_of(self, label: Label) -> list[int]:
        with self._changed:
            return sorted({kept.rank for kept in self._books.all() if kept.label == label and kept.brief is not None})

    def pin(self, pinned: list[Kept], rank: int, label: Label) -> RestoredState | None:
        """A rank's state as it lies in the slots; None if it is not whole. The slots are pinned: see ``pinned``."""
        from transfuse._keeper import transfers

        with self._changed:
            needed = self._books.needed_for(rank, label)
            if needed is None:
                return None
            views = {}
            for one in needed:
                kept = self._books.find(one, label)
                assert kept is not None
                kept.pins += 1
                pinned.append(kept)
                views[one] = kept.file
        return transfers.describe_slots(rank, views)

    def unpin(self, pinned: list[Kept]) -> None:
        with self._changed:
            for kept in pinned:
                kept.pins -= 1
            pinned.clear()

    def newest_step(self) -> int | None:
        with self._changed:
            label = self._books.newest_complete()
            return None if label is None else label.step

    def newest(self) -> object:
        with self._changed:
            label = self._books.newest_complete()
            if label is None:
                raise TransfuseError("this keeper holds no complete step yet")
            rank = next(iter(self._books.ranks_at(label)))
        pinned: list[Kept] = []
        try:
            restored = self.pin(pinned, rank, label)
            if restored is None:
                raise TransfuseError("this keeper holds no complete step yet")
        except BaseException:
            self.unpin(pinned)
            raise
        # The slots are in use as long as the reader's thread has the state.
        weakref.finalize(restored.state, self.unpin, pinned)
        return restored.state
