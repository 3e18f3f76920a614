"""The orderly end of a keeper that was told to end: what is under way ends first, and nothing new begins."""

from __future__ import annotations

import time
from collections.abc import Collection

from transfuse._keeper.slot_file import Label
from transfuse._keeper.slot_policy import Books, ranks_and_have
from transfuse._tuning import DRAIN_RING_SECONDS

#: Why, for workers, the log, and the keeper that comes after this one.
TOLD_TO_END = "was told to end"


class Draining:
    """What a keeper that was told to end still takes, and what it waits for. Called under the keeper's lock."""

    def __init__(self, books: Books, seconds: float) -> None:
        self._books = books
        self._began = time.monotonic()
        self._until = self._began + seconds
        #: The newest step that a rank of this host has begun: the others may still commit it.
        self._newest = books.reached()
        #: Whether the job ran when the keeper was told to end: workers leave before it has ended.
        self.job_runs = False

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._until

    def takes(self, label: Label) -> bool:
        """Whether a commit of this step may still begin."""
        return self._newest is not None and label <= self._newest

    def waits_for(self, attached: Collection[int], *, ring_works: bool) -> str:
        """What has not ended yet; empty: nothing. ``ring_works``: whether all keepers answer, and may confirm."""
        books = self._books
        writing = sorted({kept.rank for kept in books.all() if kept.is_written and not kept.is_replica})
        if writing:
            return f"the commit of rank {writing[0]}"
        missing = [rank for rank in self._missing() if rank in attached]
        if self._newest is not None and missing:
            return f"{ranks_and_have(missing)} not committed step {self._newest.step}, which others have"
        if ring_works and books.agreed is not None:
            return f"step {books.agreed.step} is being replicated"
        if ring_works and books.complete_labels() and self.seconds < DRAIN_RING_SECONDS:
            return f"step {books.complete_labels()[0].step}, which may be complete on all hosts"
        reading = sum(kept.pins > 0 for kept in books.all())
        return f"readers of {reading} slots" if reading else ""

    def _missing(self) -> list[int]:
        """The ranks of this host that have not committed the newest step, if it may still be complete."""
        books, newest, generation = self._books, self._newest, self._books.current()
        if newest is None or generation is None or newest not in books.hopeful_labels():
            return []
        return [rank for rank in generation.ranks if books.find(rank, newest) is None]
