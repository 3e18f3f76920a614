"""Everything of a job is lost, again and again, at moments that storage shows; and what is there afterwards."""

from __future__ import annotations

import os
import pathlib
import random

from transfuse._keeper.saved import SavedStep
from transfuse._keeper.storage import Storage, folder_of

__all__ = ["Losses"]

#: When lives end: while a step is being written, when one has just become whole, or when memory is some steps ahead.
MOMENTS = ("writing", "written", "writing", "ahead")


class Losses:
    """Watches a job's directory over its lives."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.seed = int(os.environ.get("TRANSFUSE_TEST_SEED", str(random.randrange(10**6))))
        self.chance = random.Random(self.seed)
        self._folder, self._storage = folder, Storage.at(folder)
        #: How many lives were lost while a step was being written, and how many had gone on from storage.
        self.under_way = self.restored = 0
        self.newest: int | None = None

    def begin(self, life: int) -> None:
        """A life begins; its number says at which moment it ends."""
        self._moment, self._files = MOMENTS[life % len(MOMENTS)], self.chance.randrange(1, 4)
        self._old = set(self._storage.labels() + self._storage.unfinished())

    def has_come(self, step: int) -> bool:
        """Whether the moment has come. ``step``: the one that the job has done."""
        if self._moment == "writing":  # And there is one to go on from.
            if not self._storage.labels():
                return False
            torn = [label for label in self._storage.unfinished() if label not in self._old]
            return any(len(self._names(folder_of(label))) >= self._files for label in torn)
        new = [label for label in self._storage.labels() if label not in self._old]
        return bool(new) and (self._moment == "written" or step > new[0].step + 1)

    def _names(self, folder: str) -> list[str]:
        try:
            return os.listdir(self._folder / folder)
        except FileNotFoundError:
            return []

    def check(self, restored: set[int | None]) -> None:
        """Everything was lost. ``restored``: what the ranks of this life have gone on from."""
        assert restored == {self.newest}, self.seed
        self.restored += self.newest is not None
        self.under_way += any(label not in self._old for label in self._storage.unfinished())
        assert self.look() >= (self.newest or 0), self.seed
        self.newest = self.look() or None

    def look(self) -> int:
        """Every step that counts is whole, to the last byte. Returns the newest; 0: there is none."""
        labels = self._storage.labels()
        for label in labels:
            saved = SavedStep(self._storage, label, self._storage.record(label))
            saved.check_bytes(saved.states())
        return labels[0].step if labels else 0
