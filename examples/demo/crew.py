"""The workers' processes, from the parent's side: start them, give orders, listen, kill, and end them all."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Iterator
from typing import Any, Self

from examples.demo.job import work
from examples.demo.words import Go, Lost, Over, Settings, Started, Word

from transfuse.testing.ranks import Died, Fleet, Outcome, RanksFailed, threads_for
from transfuse.testing.ranks.outcome import how_it_ended

__all__ = ["Crew"]

#: In seconds: longer than any step takes here, such as starting all workers on a busy machine.
PATIENCE = 300.0

#: How a worker ends that was killed. A worker that ends otherwise has a bug, which its replacement would have too.
KILLED = (signal.SIGKILL, signal.SIGTERM)


class Crew:
    """``settings.workers`` processes, and the store through which they form their groups."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        # Spawned, since the demo shows how long it takes to start a process. The workers form groups of their own.
        self._fleet = Fleet(
            settings.workers,
            method="spawn",
            group=False,
            threads=threads_for(settings.workers),
            interrupts=False,
            start=PATIENCE,
        )
        self._heard = time.monotonic()
        self._generations = itertools.count()

    def __enter__(self) -> Self:
        self._fleet.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    @property
    def ranks(self) -> range:
        return range(self.settings.workers)

    def __contains__(self, rank: int) -> bool:
        return rank in self._fleet

    def next_generation(self) -> int:
        """A number that no group has had before: the store remembers the earlier ones."""
        return next(self._generations)

    def start(self, rank: int) -> Started:
        """Start a fresh process for this rank, which has none."""
        assert rank not in self
        pid = self._fleet.restart(rank)
        self._fleet.start(work, self.settings, self._fleet.port, ranks=[rank])
        return Started(pid)

    def kill(self, rank: int) -> None:
        self._fleet.kill(rank)

    def order(self, rank: int, order: Go | Over) -> None:
        self._fleet.tell(rank, order)

    def hear(self, seconds: float) -> Iterator[tuple[int, Word]]:
        """Yield what is said within about ``seconds``, or was said already. A killed worker says :class:`Lost`.

        One word at a time: once a worker is ended, its remaining words are dropped.
        """
        until = time.monotonic() + seconds
        while (said := self._fleet.said(max(0.0, until - time.monotonic()))) is not None:
            self._heard = time.monotonic()
            rank, word = said
            yield rank, self._lost(rank, word) if isinstance(word, Outcome) else word
            if time.monotonic() >= until:
                break
        if time.monotonic() - self._heard > PATIENCE:
            raise RanksFailed({rank: f"has said nothing for {PATIENCE:.0f} s" for rank in self.ranks if rank in self})

    def _lost(self, rank: int, outcome: Outcome[Any]) -> Lost:
        died = outcome.error
        assert died is not None, "a worker never ends by itself"
        if not isinstance(died, Died) or died.signal not in KILLED:
            raise RanksFailed.of({rank: died})
        self._fleet.end(rank)
        return Lost(how_it_ended(died.exitcode))

    def end(self) -> None:
        """End all processes. None is left when this returns."""
        self._fleet.end(*self.ranks)
